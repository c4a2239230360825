"""Private Keras API, a module for each of Keras' concepts.

Public API is used wherever it suffices. Each function wraps one private name, says why,
and has a contract test in the file of its module's name in
`tests/_compat/keras_internals`, so that an upgrade that moves one of them fails there,
by name, rather than as a wrong gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe._compat.keras_internals import calls as calls
    from tfgpipe._compat.keras_internals import compiled as compiled
    from tfgpipe._compat.keras_internals import functional as functional
    from tfgpipe._compat.keras_internals import layers as layers
    from tfgpipe._compat.keras_internals import optimizers as optimizers
    from tfgpipe._compat.keras_internals import replicated_model as replicated_model
    from tfgpipe._compat.keras_internals import substitution as substitution
    from tfgpipe._compat.keras_internals import variables as variables

__all__, __getattr__, __dir__ = lazy_exports(__name__)
