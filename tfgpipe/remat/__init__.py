"""Rematerialisation: what forwards save of each microbatch, and backwards recompute.

| name | held of each microbatch in flight | recomputed at its backward |
|---|---|---|
| `stage` | the inputs of the stage | the stage |
| `layer` | the inputs of the stage | the stage, then each layer as its turn comes |
| `except_last` | the inputs of the stage | the stage, unless its turn comes at once |
| `none` | all activations | nothing |

Each is a value in a file of its own; so is a policy of one's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.remat.named import NAMES as NAMES
    from tfgpipe.remat.named import Name as Name
    from tfgpipe.remat.named import RematLike as RematLike
    from tfgpipe.remat.named import find as find
    from tfgpipe.remat.named import is_named as is_named
    from tfgpipe.remat.policy import Remat as Remat

__all__, __getattr__, __dir__ = lazy_exports(__name__)
