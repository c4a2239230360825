"""How weights are updated: an optimizer, its learning rate, what gradients go through.

Between gradients and weights, in this order: sums over `accumulate` steps, clipping,
the rule that `name` says. Beside the weights their averages may be kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from trainer.hyperparams import Hyperparams, field

if TYPE_CHECKING:
    import keras


class Optimizer(Hyperparams):
    """A rule to update weights by, and how its learning rate goes."""

    name: Literal["adamw", "adafactor", "lamb", "lion", "sgd"] = field(
        default="adamw", help="The rule, as in keras.optimizers; sgd: with momentum."
    )
    learning_rate: float = field(
        default=1e-3, at_least=0, help="The highest, at the end of the warm-up."
    )
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant"] = field(
        default="cosine", help="How it falls after that; the first two end at nothing."
    )
    warmup: float = field(
        default=0.1,
        at_least=0,
        less_than=1,
        help="Share of the steps in which it rises.",
    )
    momentum: float = field(
        default=0.9,
        at_least=0,
        less_than=1,
        help="Decay of first moments (beta 1); none in adafactor.",
    )
    beta_2: float = field(
        default=0.98,
        at_least=0,
        less_than=1,
        help="Decay of second moments, of adamw, lamb and lion.",
    )
    weight_decay: float = field(
        default=0.01, at_least=0, help="Decay of matrices, times the learning rate."
    )
    clip_norm: float | None = field(
        default=1.0, at_least=0, help="Largest norm of all gradients; None: no limit."
    )
    accumulate: int = field(
        default=1, at_least=1, help="Steps whose mean gradient makes one update."
    )
    average: float | None = field(
        default=None,
        at_least=0,
        less_than=1,
        help="Decay of averaged weights; None: not averaged.",
    )

    def build(self, num_steps: int) -> Any:
        """Returns the optimizer of a run of `num_steps`: see `params.guard`."""
        import keras

        from params import guard

        arguments: dict[str, Any] = {}
        if self.name in ("adamw", "lamb", "lion"):
            arguments = {"beta_1": self.momentum, "beta_2": self.beta_2}
        elif self.name == "sgd":
            arguments = {"momentum": self.momentum}
        if self.average is not None:
            arguments |= {"use_ema": True, "ema_momentum": self.average}
        if self.accumulate > 1:
            arguments |= {"gradient_accumulation_steps": self.accumulate}
        rule = {
            "adamw": keras.optimizers.AdamW,
            "adafactor": keras.optimizers.Adafactor,
            "lamb": keras.optimizers.Lamb,
            "lion": keras.optimizers.Lion,
            "sgd": keras.optimizers.SGD,
        }[self.name]
        optimizer = guard.guarded(rule)(
            self._learning_rate(num_steps),
            weight_decay=self.weight_decay,
            global_clipnorm=self.clip_norm,
            **arguments,
        )
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
        return optimizer

    def _learning_rate(
        self, num_steps: int
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        import keras

        from params import warmup

        rising = int(self.warmup * num_steps)
        falling = max(1, num_steps - rising)
        schedules = keras.optimizers.schedules
        if self.schedule == "cosine":
            return schedules.CosineDecay(
                0.0,
                decay_steps=falling,
                warmup_steps=rising,
                warmup_target=self.learning_rate,
            )
        after: Any = self.learning_rate
        if self.schedule == "linear":
            after = schedules.PolynomialDecay(self.learning_rate, falling, 0.0)
        elif self.schedule == "inverse_sqrt":
            after = warmup.InverseSquareRoot(self.learning_rate, max(1, rising))
        return warmup.WarmUp(self.learning_rate, rising, after)
