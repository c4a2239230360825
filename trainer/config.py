"""The groups of hyperparameters that every experiment has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras

    import tfgpipe
    from tfgpipe.quantization import QuantizeConfig
    from tfgpipe.schedules import Name, Schedule


class Pipelining(Hyperparams):
    """How the layers are spread over devices."""

    num_stages: int = field(default=1, at_least=1, help="K, stages of the pipeline.")
    num_microbatches: int = field(
        default=1, at_least=1, help="M, microbatches to a mini-batch."
    )
    num_replicas: int = field(
        default=1, at_least=1, help="D, copies of the pipeline that share each batch."
    )
    num_shards: int = field(
        default=1, at_least=1, help="T, devices that share each sharded layer."
    )
    sharding: Literal["sync", "ring"] = field(
        default="sync", help="ring: parts move on while parts are multiplied."
    )
    shard_replicas: Literal["none", "slots", "weights"] = field(
        default="none", help="What replicas share out: optimizer slots, weights, too."
    )
    balance: Literal["params", "flops", "time", "memory"] = field(
        default="params", help="What the fullest stage is to have least of."
    )
    memory_limit: float | None = field(
        default=None, at_least=0, help="Most GiB that a stage may need; None: any."
    )
    layers: tuple[int, ...] | None = field(
        default=None, help="Layers of each stage, in place of a balance."
    )
    remat: Literal["stage", "layer", "except_last", "none"] = field(
        default="stage", help="What the backward pass recomputes: see PipelinedLayer."
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = field(
        default="1f1b", help="The order of forwards and backwards on each device."
    )
    stages_per_device: int | None = field(
        default=None,
        at_least=2,
        help="v, of schedule=interleaved, None: 2; or of gpipe, None: 1.",
    )
    transfer_dtype: Literal["none", "bfloat16", "float16", "int8", "int8_channel"] = (
        field(default="none", help="What tensors between stages are compressed to.")
    )
    jit_compile: Literal["auto", "on", "off"] = field(
        default="auto", help="Whether XLA compiles the stages; auto: on GPUs only."
    )
    batch_norm: Literal["microbatch", "deferred"] = field(
        default="microbatch", help="When moving averages of batch statistics move."
    )

    def validate(self) -> None:
        """Checks that stages can be dealt to devices evenly."""
        v = self.stages_per_device
        if v is not None and self.schedule not in ("interleaved", "gpipe"):
            raise HyperparameterError(
                "stages_per_device: expected None, as only the schedules interleaved "
                f"and gpipe have several stages on a device; received {v} for "
                f"schedule={self.schedule}."
            )
        if self.num_stages % self.num_stages_each:
            raise HyperparameterError(
                f"num_stages: expected a multiple of {self.num_stages_each}, the "
                f"stages on each device of schedule={self.schedule}; received "
                f"{self.num_stages}. Change it, or stages_per_device."
            )

    @property
    def num_stages_each(self) -> int:
        """v, the number of stages on each device."""
        return self.stages_per_device or (2 if self.schedule == "interleaved" else 1)

    @property
    def num_devices(self) -> int:
        """How many devices it takes: D * (K / v) * T."""
        num_groups = self.num_stages // self.num_stages_each
        return self.num_replicas * num_groups * self.num_shards

    def make_schedule(self) -> Name | Schedule:
        """Returns the schedule. A subclass with one of its own returns that."""
        return self.schedule

    def build(
        self, layers: Sequence[keras.layers.Layer] | keras.Model
    ) -> tfgpipe.PipelinedModel:
        """Returns a model, or layers one after another, as a pipeline."""
        import tfgpipe

        choice, limit = self.jit_compile, self.memory_limit
        try:
            return tfgpipe.PipelinedModel(
                layers,
                num_stages=self.num_stages,
                num_microbatches=self.num_microbatches,
                schedule=self.make_schedule(),
                balance=self.balance if self.layers is None else self.layers,
                memory_limit=None if limit is None else limit * 2**30,
                remat=self.remat,
                jit_compile="auto" if choice == "auto" else choice == "on",
                batch_norm=self.batch_norm,
                transfer_dtype=None
                if self.transfer_dtype == "none"
                else self.transfer_dtype,
            )
        except ValueError as error:
            raise HyperparameterError(f"pipelining: {error}") from None


class Training(Hyperparams):
    """How long, and in which steps."""

    num_steps: int = field(default=1000, at_least=1, help="Steps of the run.")
    batch_size: int = field(default=32, at_least=1, help="Examples in a step.")
    num_workers: int = field(
        default=0,
        at_least=0,
        help="Processes that read and transform examples; 0: threads of this one.",
    )
    log_every: int = field(default=10, at_least=1, help="Steps from line to line.")
    nonfinite: Literal["stop", "skip"] = field(
        default="stop",
        help="At a loss or gradient that is not finite; skip: leave out.",
    )
    max_skips: int = field(
        default=10, at_least=0, help="Steps that may be left out before it stops."
    )
    export: bool = field(
        default=False, help="Whether the run ends with what --mode=export does."
    )


class Saving(Hyperparams):
    """When checkpoints are written, and which of them are kept."""

    checkpoint_steps: int = field(
        default=100, at_least=1, help="Steps from checkpoint to checkpoint."
    )
    checkpoint_minutes: float | None = field(
        default=None, at_least=0, help="Minutes, if those are over before; None: never."
    )
    keep: int = field(default=3, at_least=1, help="How many of the last are kept.")
    keep_hours: float | None = field(
        default=None, at_least=0, help="Hours between those that stay for good."
    )
    write: Literal["background", "at_once"] = field(
        default="background", help="at_once: training waits for the disk."
    )


class Evaluation(Hyperparams):
    """What is measured on the validation split, and what follows from it."""

    steps: int | None = field(
        default=None,
        at_least=1,
        help="Steps between evaluations; None: one, at the end.",
    )
    num_batches: int = field(
        default=32, at_least=1, help="Batches of the validation split to evaluate on."
    )
    metric: str = field(default="loss", help="What the best checkpoint is best in.")
    better: Literal["lower", "higher"] | None = field(
        default=None, help="Which of two values of it is better; None: as Keras says."
    )
    patience: int | None = field(
        default=None, at_least=1, help="Evaluations without a better one to stop after."
    )

    def validate(self) -> None:
        """Checks that there are evaluations to be patient for."""
        if self.patience is not None and self.steps is None:
            raise HyperparameterError(
                "patience: expected None, as there are no evaluations in between; "
                f"received {self.patience}. Give evaluation.steps as well."
            )

    def check(self, metrics: Sequence[keras.metrics.Metric]) -> None:
        """Checks that the metric is measured, and that it is known what is better.

        Args:
            metrics: What is measured beside the loss.

        Raises:
            HyperparameterError: If not.
        """
        names = sorted({"loss", *(each.name for each in metrics)})
        if self.metric not in names:
            raise HyperparameterError(
                f"evaluation.metric: expected one of {', '.join(names)}; received "
                f"{self.metric!r}."
            )
        if self.steps is not None:
            self.direction(metrics)

    def direction(
        self, metrics: Sequence[keras.metrics.Metric]
    ) -> Literal["lower", "higher"]:
        """Returns which of two values of the metric is better.

        Args:
            metrics: What is measured beside the loss, the metric among it.

        Raises:
            HyperparameterError: If neither `better` nor the metric's class says it.
        """
        from tfgpipe._compat import keras_internals

        if self.better is not None:
            return self.better
        if self.metric == "loss":
            return "lower"
        (found,) = (each for each in metrics if each.name == self.metric)
        better = keras_internals.preferred_direction(found)
        if better is None:
            raise HyperparameterError(
                "evaluation.better: expected lower or higher, as Keras does not say "
                f"which of two values of {self.metric!r}, a {type(found).__name__}, is "
                "better; received None."
            )
        return better


class WarmStart(Hyperparams):
    """Weights that a new run begins with."""

    path: str | None = field(
        default=None, help="A run's folder, a checkpoint in it, .keras or .weights.h5."
    )
    names: tuple[str, ...] = field(
        default=("*",), help="Patterns of the weights to take, as block*/dense/kernel."
    )
    rename: tuple[str, ...] = field(
        default=(), help="OLD=NEW: how beginnings of names there are called here."
    )


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
        """Returns the optimizer of a run of `num_steps`: see `apply_if_finite`."""
        import keras

        from trainer import optimizers

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
        optimizer = optimizers.apply_if_finite(rule)(
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

        from trainer import optimizers

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
            after = optimizers.InverseSquareRoot(self.learning_rate, max(1, rising))
        return optimizers.WarmUp(self.learning_rate, rising, after)


class Precision(Hyperparams):
    """Half precision, and training for 8-bit integers."""

    policy: Literal["float32", "mixed_float16", "mixed_bfloat16"] = field(
        default="float32", help="What layers compute in; weights are in float32."
    )
    quantize: Literal["none", "8bit"] = field(
        default="none", help="8bit: trains for int8: see tfgpipe.quantization."
    )
    quantize_start_step: int = field(
        default=0, at_least=0, help="Steps that only look at ranges before it rounds."
    )
    freeze_ranges_step: int | None = field(
        default=None, at_least=1, help="Steps after which ranges stay; None: never."
    )
    ranges: Literal["ramped", "slow"] = field(
        default="ramped", help="ramped: averages that soon forget how they began."
    )

    def validate(self) -> None:
        """Checks that ranges are seen before they are frozen, or rounded to."""
        frozen = self.freeze_ranges_step
        if frozen is not None and frozen < self.quantize_start_step:
            raise HyperparameterError(
                "freeze_ranges_step: expected at least quantize_start_step="
                f"{self.quantize_start_step}, or None; received {frozen}."
            )

    @property
    def quantizes(self) -> bool:
        """Whether the model trains for 8 bits."""
        return self.quantize != "none"

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Has layers that are made meanwhile compute in this precision."""
        from tfgpipe.capture import dtype_policies

        return dtype_policies.default_policy_scope(self.policy)

    def apply(
        self,
        model_or_layers: Any,
        rules: Callable[[], Mapping[type, QuantizeConfig]] = dict,
    ) -> Any:
        """Returns a model, or layers, trained for 8 bits if that is asked for.

        Args:
            model_or_layers: As of `tfgpipe.quantization.apply`.
            rules: Returns how layers of an experiment's own are quantized.

        Raises:
            HyperparameterError: If it cannot be.
        """
        if not self.quantizes:
            return model_or_layers
        from tfgpipe import quantization

        activations = quantization.MovingAverageRange(ramp=self.ranges == "ramped")
        scheme = quantization.default_8bit(activations=activations)
        for kind, rule in rules().items():
            scheme = scheme.with_rule(kind, rule)
        try:
            return quantization.apply(
                model_or_layers,
                scheme=scheme,
                delay=self.quantize_start_step,
                freeze_after=self.freeze_ranges_step,
            )
        except ValueError as error:
            raise HyperparameterError(f"precision.quantize: {error}") from None
