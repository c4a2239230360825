"""Learning-rate schedules and an optimizer that Keras does not have.

`apply_if_finite` (Optax's word) leaves a step out whose gradients are not finite, which
would turn every weight into NaN: weights, slots and the count of updates stay as they
are, and which gradients were not finite is kept in a variable.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat.keras_internals import optimizers as keras_optimizers
from tfgpipe_trainer.hyperparams import HyperparameterError, matching


@keras.saving.register_keras_serializable(package="params")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Rises in a straight line, then does what another schedule does from its start.

    Args:
        learning_rate: The learning rate at the end of the line.
        num_steps: Length of the line, in steps.
        after: The schedule that follows, or a constant.
    """

    def __init__(
        self, learning_rate: float, num_steps: int, after: Callable[[Any], Any] | float
    ) -> None:
        self.learning_rate = learning_rate
        self.num_steps = num_steps
        self.after = after

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of a step."""
        number = keras.ops.cast(step, "float32")
        passed = keras.ops.maximum(number - self.num_steps, 0.0)
        after = self.after(passed) if callable(self.after) else self.after
        rising = self.learning_rate * number / max(1, self.num_steps)
        return keras.ops.where(number < self.num_steps, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            "learning_rate": self.learning_rate,
            "num_steps": self.num_steps,
            "after": keras.saving.serialize_keras_object(self.after),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        """Returns the schedule of a configuration."""
        after = keras.saving.deserialize_keras_object(config["after"])
        return cls(**{**config, "after": after})


@keras.saving.register_keras_serializable(package="params")
class InverseSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """Falls as `1 / sqrt(1 + step / scale)` (Vaswani et al. 2017, section 5.3).

    Args:
        learning_rate: The initial learning rate.
        scale: Steps until it has fallen to `1 / sqrt(2)` of that.
    """

    def __init__(self, learning_rate: float, scale: int) -> None:
        self.learning_rate = learning_rate
        self.scale = scale

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of a step."""
        number = keras.ops.cast(step, "float32")
        return self.learning_rate * keras.ops.rsqrt(1.0 + number / self.scale)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"learning_rate": self.learning_rate, "scale": self.scale}


@keras.saving.register_keras_serializable(package="params")
class StableDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Stays, then falls in a straight line to zero (Hu et al. 2024, section 4).

    Args:
        learning_rate: The learning rate until then.
        num_stable: Steps until then.
        num_falling: Steps in which it falls.
    """

    def __init__(self, learning_rate: float, num_stable: int, num_falling: int) -> None:
        self.learning_rate = learning_rate
        self.num_stable = num_stable
        self.num_falling = num_falling

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of a step."""
        passed = keras.ops.cast(step, "float32") - self.num_stable
        left = keras.ops.clip(1.0 - passed / self.num_falling, 0.0, 1.0)
        return self.learning_rate * left

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            "learning_rate": self.learning_rate,
            "num_stable": self.num_stable,
            "num_falling": self.num_falling,
        }


class ApplyIfFinite(keras_optimizers.GroupedDecay):
    """Comes before an optimizer class: see `apply_if_finite`.

    Args:
        arguments: Arguments of the class.
        keeps_norm: True to keep the norm of all gradients.
        factors: Factors of the learning rate, by path of the weight.
        decays: True for a weight that decays, by path. Defaults to matrices.
        options: Further arguments of the class.

    Attributes:
        num_skipped: Steps left out so far, a scalar of type int32.
        gradient_norm: The norm of the last gradients, if it is kept.
        was_finite: True for each weight with a finite gradient in the last step that
            was left out, bool `[num_weights]`.
    """

    num_skipped: keras.Variable
    was_finite: keras.Variable
    gradient_norm: keras.Variable
    built: bool
    rule: type[keras.optimizers.Optimizer]

    def __init__(
        self,
        *arguments: Any,
        keeps_norm: bool = False,
        factors: Mapping[str, float] | None = None,
        decays: Mapping[str, bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.keeps_norm = keeps_norm
        self._factors, self._decays = dict(factors or {}), dict(decays or {})

    def set_groups(
        self,
        named: Mapping[str, keras.Variable],
        *,
        learning_rates: Sequence[str] = (),
        decayed: Sequence[str] = (),
    ) -> None:
        """Gives groups of weights learning rates of their own, and weight decay.

        As in PyTorch's groups of parameters, the decay of a weight goes by its own
        learning rate.

        Args:
            named: The weights, by name.
            learning_rates: `PATTERN=FACTOR` of the learning rate; the first counts.
            decayed: Patterns of weights that decay. Defaults to matrices.

        Raises:
            HyperparameterError: If a rule is none, or its pattern matches nothing.
        """
        paths = [v.path for v in named.values()]
        if (learning_rates or decayed) and len({*paths}) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise HyperparameterError(
                "optimizer.learning_rates: expected weights of different paths, by "
                f"which groups are known; received several called {twice}."
            )
        for rule in reversed(learning_rates):
            pattern, _, factor = rule.rpartition("=")
            try:
                scale = float(factor)
            except ValueError:
                scale = -1.0
            if not (pattern and 0 <= scale < float("inf")):
                raise HyperparameterError(
                    "optimizer.learning_rates: expected PATTERN=FACTOR, such as "
                    f"*embedding*=0.1; received {rule!r}."
                )
            for name in matching("optimizer.learning_rates", pattern, named):
                self._factors[named[name].path] = scale
        if decayed:
            self._decays = {v.path: False for v in named.values()}
            for pattern in decayed:
                for name in matching("optimizer.decayed", pattern, named):
                    self._decays[named[name].path] = True

    def learning_rate_factor(self, weight: keras.Variable) -> float:
        """Returns the factor of the learning rate of a weight's group."""
        return self._factors.get(weight.path, 1.0)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a weight, by the learning rate of its group."""
        if self._factors:
            own: Any = self
            index = keras_optimizers.variable_index(own, variable)
            weight = keras_optimizers.optimizer_weights(own)[index]
            learning_rate = learning_rate * self.learning_rate_factor(weight)
        super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        own = {
            "keeps_norm": self.keeps_norm,
            "factors": dict(self._factors),
            "decays": dict(self._decays),
        }
        return config | {name: value for name, value in own.items() if value}

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the slots, and what is kept of steps left out; only matrices decay."""
        if self.built:
            return
        own: Any = self
        # By name norms over several axes, and biases of several heads.
        of_norms = re.compile("bias|gamma|beta|^scale$")

        def decays(v: keras.Variable) -> bool:
            matrix = len(v.shape) > 1 and not of_norms.search(v.name)
            return self._decays.get(v.path, matrix)

        own.exclude_from_weight_decay([v for v in variables if not decays(v)])
        super().build(variables)  # type: ignore[misc]
        add = own.add_variable
        self.num_skipped = add((), initializer="zeros", dtype="int32", name="left_out")
        self.was_finite = add(
            (len(variables),), initializer="ones", dtype="bool", name="was_finite"
        )
        if self.keeps_norm:
            self.gradient_norm = add(
                (), initializer="zeros", dtype="float32", name="gradient_norm"
            )

    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Updates the weights if all gradients are finite."""
        update = functools.partial(
            super().apply,  # type: ignore[misc]
            grads,
            trainable_variables,
        )
        if trainable_variables is not None:
            self.build(trainable_variables)
        if self.keeps_norm:
            squares = [_squares(each) for each in grads if each is not None]
            self.gradient_norm.assign(tf.sqrt(tf.add_n(squares)))
        each = [_is_finite(gradient) for gradient in grads]
        variables = trainable_variables or ()
        if len(each) > self.was_finite.shape[0]:  # Those of slices, weight by weight.
            slices = itertools.groupby(
                zip(variables, each, strict=True), key=lambda pair: pair[0].path
            )
            each = [tf.reduce_all([x for _, x in some]) for _, some in slices]
        finite = tf.stack(each)

        def leave_out() -> None:
            self.num_skipped.assign_add(1)
            self.was_finite.assign(finite)

        tf.cond(tf.reduce_all(finite), update, leave_out)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Leaves weights as trained; their averages are beside them."""


def _is_finite(gradient: Any) -> tf.Tensor:
    if gradient is None:
        return tf.constant(True)
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    return tf.reduce_all(tf.math.is_finite(gradient))


def _squares(gradient: Any) -> tf.Tensor:
    # Rows of a table that several tokens have are added up first.
    dense = tf.convert_to_tensor(gradient)
    return tf.reduce_sum(tf.square(tf.cast(dense, tf.float32)))


@functools.cache
def apply_if_finite(rule: type[keras.optimizers.Optimizer]) -> Any:
    """Returns an optimizer class that leaves out steps that are not finite.

    >>> optimizer = apply_if_finite(keras.optimizers.SGD)(0.5)
    >>> weight = keras.Variable(1.0)
    >>> optimizer.build([weight])
    >>> optimizer.apply([tf.constant(1.0)])
    >>> optimizer.apply([tf.constant(float("nan"))])
    >>> print(float(weight), int(optimizer.num_skipped))
    0.5 1

    Args:
        rule: A class of Keras optimizers.
    """
    name = f"SkipNonFinite{rule.__name__}"
    own = {"__doc__": ApplyIfFinite.__doc__, "rule": rule}
    cls = type(name, (ApplyIfFinite, rule), own)
    return keras.saving.register_keras_serializable(package="params")(cls)
