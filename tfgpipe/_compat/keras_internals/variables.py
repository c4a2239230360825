"""Creation of the `tf.Variable` behind a Keras variable."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import register_uninitialized_variable

from tfgpipe._compat.keras_internals.calls import current_stateless_scope
from tfgpipe._compat.sliced_variables import SlicedVariable

ScopeFactory = Callable[[], contextlib.AbstractContextManager[Any]]


def initialize_in_scope(
    variable: keras.Variable, scope: ScopeFactory, device: str | None = None
) -> None:
    """Has the `tf.Variable` behind a Keras variable created inside `scope()`.

    Keras creates the `tf.Variable` of a layer that is built in a `StatelessScope` when
    the outermost such scope ends, long after any `tf.device` the layer could have set,
    and has no public hook there. Should that fail, it is not tried again until the
    variable is given here again. A variable that already has its value is created anew
    inside the scope, with that value, unless it is on `device` as it is; an optimizer
    that was built for it still knows it.
    """
    if variable._value is not None:
        if variable._value.device == device:
            return
        old = variable._value
        with tf.init_scope(), scope():
            variable._initialize(tf.convert_to_tensor(old))
        # By this an optimizer knows the weights that it was built for.
        new = getattr(variable._value, "_primary", variable._value)
        new._unique_id = old._unique_id
        return
    # A pipeline that failed to build may have had it.
    again = "_initialize" in vars(variable)
    if again and not any(variable is v for v in _uninitialized()):
        register_uninitialized_variable(variable)

    def placed(value: Any) -> None:
        try:
            with scope():
                type(variable)._initialize(variable, value)
        except BaseException:
            _forget_uninitialized()
            raise
        del variable._initialize

    variable._initialize = placed


def _uninitialized() -> list[keras.Variable]:
    """Returns the variables that Keras creates when a `StatelessScope` ends."""
    return global_state.get_global_attribute("uninitialized_variables") or []


def _forget_uninitialized() -> None:
    """Has Keras create no variable when a `StatelessScope` ends.

    Keras empties the list only when all are created. After a failure it would try again
    at the end of each later scope, of whatever model.
    """
    for variable in _uninitialized():
        if variable._value is None:
            variable._initialize = variable._initialize  # Seen by the function above.
    global_state.set_global_attribute("uninitialized_variables", [])


@contextlib.contextmanager
def build_scope() -> Iterator[None]:
    """A `StatelessScope` that raises its first error, and leaves nothing after it.

    After an error inside Keras creates the variables nevertheless, which can fail too.
    """
    first: BaseException | None = None
    try:
        with keras.StatelessScope():
            try:
                yield
            except BaseException as error:
                first = error
                raise
    except BaseException as error:
        if current_stateless_scope() is None:
            _forget_uninitialized()
        if first is not None and error is not first:
            raise first from first.__cause__
        raise


@contextlib.contextmanager
def unmoved_on_error(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Variables that are created anew inside are the old ones again after an error."""
    values = [(variable, variable._value) for variable in variables]
    try:
        yield
    except BaseException:
        for variable, value in values:
            variable._value = value
        raise


def is_initialized(variable: keras.Variable) -> bool:
    """Returns whether a variable has a value yet.

    In the `StatelessScope` that its layer was built in it has not; reading it there
    would draw one.
    """
    return variable._value is not None


def is_sliced(variable: keras.Variable) -> bool:
    """Returns whether a variable is in slices on devices of their own."""
    return isinstance(variable._value, SlicedVariable)


def slices_of(variable: keras.Variable) -> list[keras.Variable]:
    """Returns Keras variables of the slices of one that is in slices, else itself."""
    if not is_sliced(variable):
        return [variable]
    found = []
    for each in variable._value.slices:
        part = copy.copy(variable)
        part._value, part._shape = each, tuple(each.shape)
        found.append(part)
    return found
