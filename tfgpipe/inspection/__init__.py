"""Training steps seen from inside, and compared.

callbacks       the times of a step's actions, and calls at each of them
model_copies    compiled copies of a model, for steps that leave it as it is
recorded_steps  training steps whose results are kept
comparison      tensors of one step beside those of another
causes          layers whose results depend on the microbatches
verification    a step of a pipeline beside that of the plain model: `tfgpipe.verify`
"""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.inspection.callbacks import ActionCallback as ActionCallback
    from tfgpipe.inspection.callbacks import TimelineCallback as TimelineCallback
    from tfgpipe.inspection.causes import Cause as Cause
    from tfgpipe.inspection.comparison import Comparison as Comparison
    from tfgpipe.inspection.model_copies import compiled_copies as compiled_copies
    from tfgpipe.inspection.verification import Verification as Verification
    from tfgpipe.inspection.verification import verify as verify

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    callbacks="ActionCallback TimelineCallback",
    causes="Cause",
    comparison="Comparison",
    model_copies="compiled_copies",
    verification="Verification verify",
)
