"""Private Keras API, a module for each of Keras' concepts.

Public API is used wherever it suffices. Each function wraps one private name, says why,
and has a contract test in the file of its module's name in
`tests/_compat/keras_internals`, so that an upgrade that moves one of them fails there,
by name, rather than as a wrong gradient.
"""

from tfgpipe._compat.keras_internals import (
    attention,
    calls,
    compiled,
    functional,
    layers,
    optimizers,
    replicated_model,
    substitution,
    variables,
)
