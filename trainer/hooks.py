"""The methods that an experiment may define, with the values that each returns."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tfgpipe_trainer.hyperparams import HyperparameterError


class Returned(NamedTuple):
    """The value that a method returns.

    Attributes:
        expected: The value, as a phrase.
        fits: Returns whether a value is such a one.
    """

    expected: str
    fits: Callable[[Any], bool]


def call(experiment: object, hook: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of an experiment, and checks the value that it returns.

    Raises:
        HyperparameterError: If it is not one of `HOOKS`.
    """
    found = getattr(experiment, hook)(*args, **kwargs)
    expected, fits = HOOKS[hook]
    if not fits(found):
        raise HyperparameterError(
            f"{type(experiment).__name__}: expected `{hook}()` to return {expected}; "
            f"received {found!r}."
        )
    return found


def _is_network(found: Any) -> bool:
    import keras

    return isinstance(found, keras.Model)


def _are_losses(found: Any) -> bool:
    """Returns whether Keras knows such losses: objects, functions or names."""
    import keras

    losses = [each for each in keras.tree.flatten(found) if each is not None]
    try:
        known = [not isinstance(x, type) and keras.losses.get(x) for x in losses]
    except ValueError:
        return False
    return bool(known) and all(known)


def _are_metrics(found: Any) -> bool:
    import keras

    metrics = keras.tree.flatten(found)
    is_metric = [isinstance(each, keras.metrics.Metric) for each in metrics]
    return found is not None and all(is_metric)


def _is_dataset(found: Any) -> bool:
    import tensorflow as tf

    return isinstance(found, tf.data.Dataset)


def _is_dict(found: Any, is_value: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(found, Mapping) and all(map(is_value, found.values()))


def _is_evaluator(found: Any) -> bool:
    from tfgpipe_trainer.evaluators import Evaluator

    return isinstance(found, Evaluator)


def _is_number(found: Any) -> bool:
    return isinstance(found, numbers.Real)


# Methods that once had other names, by these.
_FORMER = {
    "digests": "file_hashes",
    "other_units": "report_units",
    "tokens_per_step": "units_per_step",
}


def refuse_former(cls: type) -> None:
    """Raises HyperparameterError if a class defines a method by its former name."""
    for former, name in _FORMER.items():
        if hasattr(cls, former):
            raise HyperparameterError(
                f"{cls.__name__}: expected `{name}`; received its former name "
                f"`{former}`."
            )


# By the name of the method.
HOOKS = {
    "network": Returned("a keras.Model", _is_network),
    "loss": Returned("a keras.losses.Loss", _are_losses),
    "metrics": Returned("a list of keras.metrics", _are_metrics),
    "batches": Returned("a tf.data.Dataset", _is_dataset),
    "evaluators": Returned(
        "a dict of Evaluators", lambda x: _is_dict(x, _is_evaluator)
    ),
    "quantize_rules": Returned("a dict", _is_dict),
    "baselines": Returned("a dict of numbers", lambda x: _is_dict(x, _is_number)),
    "report_units": Returned(
        "a dict of numbers above 0",
        lambda x: _is_dict(x, lambda each: _is_number(each) and each > 0),
    ),
    "file_hashes": Returned(
        "a dict of strings", lambda x: _is_dict(x, lambda each: isinstance(each, str))
    ),
}
