"""The groups of hyperparameters that every experiment has."""

from __future__ import annotations

import ast
import contextlib
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tfgpipe import PipelineConfig, schedules
from tfgpipe import remat as remat_lib
from tfgpipe.partition import balances
from tfgpipe.simulation import ScheduleName, find_schedule
from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras

    import tfgpipe
    from tfgpipe.quantization import QuantizeConfig


# What is more than anybody has is a slip of the hand: it is refused before lists are
# made of it, which would take all memory.
_DEVICES = 10_001
_EXAMPLES = 2**24
_STEPS = 2**31


def _option(name: str, **changes: Any) -> Any:
    """Declares a hyperparameter that is a field of `PipelineConfig`.

    Args:
        name: Name of the field, which has default and help.
        **changes: Another default, or bounds.
    """
    option = {
        "default": PipelineConfig.default_of(name),
        "help": PipelineConfig.summary_of(name),
    }
    return field(**{**option, **changes})


class Pipelining(Hyperparams):
    """Parallelism: stages, microbatches, replicas, shards, and how they run."""

    num_stages: int = _option("num_stages", default=1, at_least=1, less_than=_DEVICES)
    num_microbatches: int = _option(
        "num_microbatches", default=1, at_least=1, less_than=_DEVICES
    )
    num_hosts: int | None = field(
        default=None,
        at_least=1,
        less_than=_DEVICES,
        help="Hosts that stages and replicas are for: on fewer these are fewer.",
    )
    num_replicas: int = field(
        default=1,
        at_least=1,
        less_than=_DEVICES,
        help="Data-parallel degree D: replicas of the pipeline.",
    )
    num_shards: int = field(
        default=1,
        at_least=1,
        less_than=_DEVICES,
        help="Tensor-parallel degree T: devices of a sharded layer.",
    )
    tp_collective: Literal["gather", "ring", "sequence"] = field(
        formerly="sharding",
        former_values={"sync": "gather"},
        default="gather",
        help="ring: communication overlaps with the products; sequence: attention "
        "over parts of the sequence.",
    )
    shard_replicas: Literal["none", "slots", "whole_weights", "weights"] = field(
        default="none", help="ZeRO over replicas: optimizer slots, or weights as well."
    )
    balance: balances.Name = _option("balance")
    memory_limit_gib: float | None = field(
        formerly="memory_limit",
        default=None,
        at_least=0,
        help="Memory limit of a device; None: no limit.",
    )
    device_speeds: tuple[float, ...] | None = _option("device_speeds")
    layers_per_stage: tuple[int, ...] | None = field(
        formerly="layers",
        default=None,
        help="Number of layers of each stage, instead of a balance.",
    )
    remat: remat_lib.Name = _option("remat")
    schedule: ScheduleName = _option("schedule", default="1f1b")
    stages_per_device: int | None = field(
        default=None,
        at_least=2,
        help="Stages on each device, v; None: the smallest v of the schedule.",
    )
    transfer_dtype: Literal["none", "bfloat16", "float16", "int8", "int8_channel"] = (
        _option("transfer_dtype", default="none")
    )
    jit_compile: Literal["auto", "on", "off"] = field(
        default="auto",
        help="Compile stages with XLA; auto: on CPUs only elementwise operations.",
    )
    batch_norm: Literal["microbatch", "deferred"] = _option("batch_norm")
    added_losses: Literal["mini_batch", "microbatch"] = _option("added_losses")
    offload: bool = field(
        default=False, help="Microbatches wait for their backward on the host."
    )
    gather: bool = field(
        default=False,
        help="Weights that replicas shard are gathered for some passes at a time.",
    )
    offload_optimizer: bool = _option("offload_optimizer")

    def validate(self) -> None:
        """Checks that stages can be dealt to devices evenly, and how many these are."""
        if self.num_devices >= _DEVICES:
            raise HyperparameterError(
                f"num_replicas: expected at most {_DEVICES - 1} devices in all; "
                f"received {self.num_stages} stages x {self.num_replicas} replicas x "
                f"{self.num_shards} shards."
            )
        v = self.stages_per_device
        if v is not None and not self._policy.shares_devices:
            raise HyperparameterError(
                "stages_per_device: expected None, as this schedule has one stage on "
                f"each device; received {v} for schedule={self.schedule}."
            )
        own = self._policy.stages_per_device
        if v is not None and self._policy.deals_stages and len(own) == 1 and v > own[0]:
            raise HyperparameterError(
                f"stages_per_device: expected {own[0]} or less, as the stages of this "
                f"schedule fold back; received {v} for schedule={self.schedule}."
            )
        each = self.resolved_stages_per_device
        if self.num_stages % each:
            raise HyperparameterError(
                f"num_stages: expected a multiple of {each}, the stages on each device "
                f"of schedule={self.schedule}; received {self.num_stages}. Change it, "
                "or stages_per_device."
            )

    @property
    def _policy(self) -> schedules.SchedulePolicy:
        policy = find_schedule(self.schedule)
        assert isinstance(policy, schedules.SchedulePolicy)
        return policy

    @property
    def resolved_stages_per_device(self) -> int:
        """v, the number of stages on each device."""
        return self.stages_per_device or min(self._policy.stages_per_device)

    @property
    def num_devices(self) -> int:
        """Number of devices, D * (K / v) * T."""
        num_groups = self.num_stages // self.resolved_stages_per_device
        return self.num_replicas * num_groups * self.num_shards

    @property
    def placement(self) -> tuple[int, ...]:
        """For each stage, the index of its device in a replica."""
        num_groups = self.num_stages // self.resolved_stages_per_device
        return self._policy.deal(self.num_stages, num_groups)

    def make_schedule(self) -> str | schedules.Schedule:
        """Returns the schedule. A subclass with one of its own returns that."""
        name = f"{self.schedule}+offload" if self.offload else self.schedule
        return f"{name}+gather" if self.gather else name

    def build(
        self, layers: Sequence[keras.layers.Layer] | keras.Model, **stages: Any
    ) -> tfgpipe.PipelinedModel:
        """Returns a model, or layers one after another, as a pipeline.

        Args:
            layers: The model, or the layers.
            **stages: Arguments of the pipeline in place of these hyperparameters.
        """
        import tfgpipe

        limit = self.memory_limit_gib
        jit_compile: dict[str, Any] = {"auto": "auto", "on": True, "off": False}
        options = {
            "num_stages": self.num_stages,
            "num_microbatches": self.num_microbatches,
            "schedule": self.make_schedule(),
            "balance": self.balance,
            "partition": self.layers_per_stage,
            "memory_limit": None if limit is None else limit * 2**30,
            "device_speeds": self.device_speeds,
            "remat": self.remat,
            "jit_compile": jit_compile[self.jit_compile],
            "batch_norm": self.batch_norm,
            "added_losses": self.added_losses,
            "offload_optimizer": self.offload_optimizer,
            "transfer_dtype": None
            if self.transfer_dtype == "none"
            else self.transfer_dtype,
        }
        try:
            return tfgpipe.PipelinedModel(layers, **{**options, **stages})
        except (ValueError, TypeError) as error:
            raise _refused(error, "pipelining") from None


class Training(Hyperparams):
    """Number and size of training steps."""

    num_steps: int = field(
        default=1000,
        at_least=1,
        less_than=_STEPS,
        help="Number of training steps.",
    )
    batch_size: int = field(
        default=32,
        at_least=1,
        less_than=_EXAMPLES,
        help="Examples of a step, over all replicas.",
    )
    num_workers: int = field(
        default=0,
        at_least=0,
        help="Processes that read and transform examples; 0: threads.",
    )
    log_every: int = field(
        default=10, at_least=1, help="Steps between records of metrics.jsonl."
    )
    log_seconds: float = field(
        default=5.0,
        at_least=0,
        help="Seconds between log lines of a file or pipe; 0: one each step.",
    )
    frozen: tuple[str, ...] = field(
        default=(), help="Patterns of weights that are not trained, as block*/kernel."
    )
    writers: tuple[str, ...] = field(
        default=("tensorboard",),
        help="Beside metrics.jsonl: tensorboard, wandb, mlflow, MODULE.CLASS.",
    )
    on_nonfinite: Literal["stop", "skip"] = field(
        formerly="nonfinite",
        default="stop",
        help="At a NaN or Inf in loss or gradients: stop, or skip the step.",
    )
    max_nonfinite_steps: int = field(
        formerly="max_skips",
        default=10,
        at_least=0,
        help="Maximum number of skipped steps.",
    )
    watchdog_minutes: float | None = field(
        default=None,
        at_least=0.01,
        help="Minutes without a step until the run ends, status 75; None: never.",
    )
    export: bool = field(
        default=False, help="Export the model at the end, as --mode=export does."
    )


class Saving(Hyperparams):
    """Intervals between checkpoints, and the number that is kept."""

    every_steps: int = field(
        formerly="checkpoint_steps",
        default=100,
        at_least=1,
        help="Steps between checkpoints.",
    )
    every_minutes: float | None = field(
        formerly="checkpoint_minutes",
        default=None,
        at_least=0,
        help="Minutes between checkpoints, if that is sooner.",
    )
    keep: int = field(
        default=3, at_least=1, help="Number of latest checkpoints to keep."
    )
    keep_hours: float | None = field(
        default=None,
        at_least=0,
        help="Hours between checkpoints that are kept for good.",
    )
    async_save: bool = field(
        formerly="write",
        former_values={"background": "True", "at_once": "False"},
        default=True,
        help="False: training waits until a checkpoint is on disk.",
    )


class Evaluation(Hyperparams):
    """Evaluation on the validation split, the best checkpoint, early stopping."""

    every_steps: int | None = field(
        formerly="steps",
        default=None,
        at_least=1,
        help="Steps between evaluations; None: one, at the end.",
    )
    max_batches: int | None = field(
        formerly="num_batches",
        default=None,
        at_least=1,
        less_than=_STEPS,
        help="Number of validation batches; None: all.",
    )
    metric: str = field(default="loss", help="Metric that chooses the best checkpoint.")
    mode: Literal["min", "max"] | None = field(
        formerly="better",
        former_values={"lower": "min", "higher": "max"},
        default=None,
        help="Direction of the metric; None: as Keras knows it.",
    )
    patience: int | None = field(
        default=None,
        at_least=1,
        help="Early stopping: evaluations without improvement.",
    )

    def validate(self) -> None:
        """Checks that there are evaluations to be patient for."""
        if self.patience is not None and self.every_steps is None:
            raise HyperparameterError(
                "patience: expected None, as there are no evaluations in between; "
                f"received {self.patience}. Give evaluation.every_steps as well."
            )

    def check(self, metrics: Any, outputs: Sequence[str] = ()) -> None:
        """Checks that the metric is measured, and that it is known what is better.

        Args:
            metrics: Metrics beside the loss, as `compile` takes them.
            outputs: The names of the model's outputs.

        Raises:
            HyperparameterError: If not.
        """
        names = sorted(_by_name(metrics, outputs))
        if self.metric not in names:
            raise HyperparameterError(
                f"evaluation.metric: expected one of {', '.join(names)}; received "
                f"{self.metric!r}."
            )
        if self.every_steps is not None:
            self.direction(metrics, outputs)

    def direction(
        self, metrics: Any, outputs: Sequence[str] = ()
    ) -> Literal["min", "max"]:
        """Returns the direction in which the metric improves.

        Args:
            metrics: Metrics beside the loss, this one among them.
            outputs: The names of the model's outputs.

        Raises:
            HyperparameterError: If neither `mode` nor the metric's class says it.
        """
        from tfgpipe._compat import keras_internals

        if self.mode is not None:
            return self.mode
        found = _by_name(metrics, outputs)[self.metric]
        if found == "loss":
            return "min"
        better = keras_internals.compiled.preferred_direction(found)
        if better is None:
            raise HyperparameterError(
                "evaluation.mode: expected min or max, as Keras does not say "
                f"which of two values of {self.metric!r}, a {type(found).__name__}, is "
                "better; received None."
            )
        return "min" if better == "lower" else "max"


def _by_name(metrics: Any, outputs: Sequence[str]) -> dict[str, Any]:
    """Returns metrics by the names that Keras reports them by, losses as `"loss"`."""
    import keras

    if len(outputs) < 2:
        found = {each.name: each for each in keras.tree.flatten(metrics)}
        return {"loss": "loss", **found}
    # Each is of one output, whose name comes first.
    if not isinstance(metrics, dict):
        metrics = dict(zip(outputs, metrics, strict=False))
    return {
        "loss": "loss",
        **{f"{output}_loss": "loss" for output in outputs},
        **{
            f"{output}_{each.name}": each
            for output, own in metrics.items()
            for each in keras.tree.flatten(own)
            if each is not None
        },
    }


def keyword_arguments(
    name: str, texts: Sequence[str], *, example: str
) -> dict[str, Any]:
    """Returns the arguments of a class that a hyperparameter lists.

    >>> keyword_arguments("optimizer.arguments", ["epsilon=1e-6"], example="epsilon=1")
    {'epsilon': 1e-06}

    Args:
        name: The hyperparameter, which an error names.
        texts: Its value, `NAME=VALUE` each.
        example: One that an error shows.

    Raises:
        HyperparameterError: If one is not of this form.
    """
    found = {}
    for text in texts:
        argument, equals, value = text.partition("=")
        try:
            if not (argument.isidentifier() and equals):
                raise ValueError
            found[argument] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise HyperparameterError(
                f"{name}: expected NAME=VALUE, such as {example}; received {text!r}."
            ) from None
    return found


class WarmStart(Hyperparams):
    """Weights that a new run begins with."""

    path: str | None = field(
        default=None,
        help="Run folder, checkpoint, .keras, .weights.h5 or .safetensors file.",
    )
    names: tuple[str, ...] = field(
        default=("*",), help="Patterns of weights to load, as block*/dense/kernel."
    )
    rename: tuple[str, ...] = field(
        default=(), help="OLD=NEW: prefixes of names there, and here."
    )


class Optimizer(Hyperparams):
    """The optimizer and the schedule of its learning rate."""

    name: str = field(
        default="adamw",
        help="adamw, adafactor, lamb, lion, sgd, or a class of keras.optimizers.",
    )
    arguments: tuple[str, ...] = field(
        default=(), help="NAME=VALUE: further arguments of the class."
    )
    learning_rate: float = field(
        default=1e-3,
        at_least=0,
        less_than=math.inf,
        help="Peak learning rate, at the end of the warm-up.",
    )
    schedule: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = field(
        default="cosine",
        help="Decay of the learning rate, to zero by the first three.",
    )
    decay: float = field(
        default=0.2,
        at_least=0,
        less_than=1,
        help="wsd: fraction of the steps, the last, in which the rate falls linearly.",
    )
    warmup: float = field(
        default=0.1,
        at_least=0,
        less_than=1,
        help="Fraction of the steps in which the rate rises linearly.",
    )
    beta_1: float = field(
        formerly="momentum",
        default=0.9,
        at_least=0,
        less_than=1,
        help="Decay of first moments; momentum of sgd; adafactor has none.",
    )
    beta_2: float = field(
        default=0.98,
        at_least=0,
        less_than=1,
        help="Decay of second moments: adamw, lamb, lion.",
    )
    weight_decay: float = field(
        default=0.01,
        at_least=0,
        less_than=math.inf,
        help="Decoupled weight decay of matrices.",
    )
    decayed: tuple[str, ...] = field(
        default=(), help="Patterns of weights that decay instead, as block*/kernel."
    )
    learning_rates: tuple[str, ...] = field(
        default=(), help="PATTERN=FACTOR of the learning rate, as *embedding*=0.1."
    )
    global_clipnorm: float | None = field(
        formerly="clip_norm",
        default=1.0,
        at_least=0,
        less_than=math.inf,
        help="Clips gradients to this global norm; None: does not.",
    )
    gradient_accumulation_steps: int = field(
        formerly="accumulate",
        default=1,
        at_least=1,
        help="Steps per optimizer update.",
    )
    ema_decay: float | None = field(
        formerly="average",
        default=None,
        at_least=0,
        less_than=1,
        help="EMA decay of weights; None: no moving average.",
    )
    log_norms: bool = field(
        default=False, help="Log norms of gradients, weights and updates."
    )

    def validate(self) -> None:
        """Checks that clipping leaves something of gradients."""
        if self.global_clipnorm == 0:
            raise HyperparameterError(
                "global_clipnorm: expected a number above 0, or None for no clipping; "
                "received 0."
            )

    def build(self, num_steps: int) -> Any:
        """Returns the optimizer of a run of `num_steps`: see `apply_if_finite`.

        Raises:
            HyperparameterError: If the run is over before the first update.
        """
        if self.gradient_accumulation_steps > num_steps:
            raise HyperparameterError(
                "optimizer.gradient_accumulation_steps: expected at most "
                "training.num_steps="
                f"{num_steps}, or no weight is ever updated; received "
                f"{self.gradient_accumulation_steps}."
            )

        from tfgpipe_trainer import optimizers

        arguments: dict[str, Any] = {}
        if self.name in ("adamw", "lamb", "lion"):
            arguments = {"beta_1": self.beta_1, "beta_2": self.beta_2}
        elif self.name == "sgd":
            arguments = {"momentum": self.beta_1}
        if self.ema_decay is not None:
            arguments |= {"use_ema": True, "ema_momentum": self.ema_decay}
        if self.gradient_accumulation_steps > 1:
            arguments |= {
                "gradient_accumulation_steps": self.gradient_accumulation_steps
            }
        arguments |= {
            "weight_decay": self.weight_decay,
            "global_clipnorm": self.global_clipnorm,
            **keyword_arguments(
                "optimizer.arguments", self.arguments, example="epsilon=1e-6"
            ),
        }
        rate = self._learning_rate(num_steps)
        try:
            return optimizers.apply_if_finite(self._class())(
                rate, **arguments, keeps_norm=self.log_norms
            )
        except (TypeError, ValueError) as error:
            raise HyperparameterError(
                f"optimizer.arguments: expected those of {self._class().__name__}; "
                f"received {', '.join(self.arguments) or 'none'}: {error}"
            ) from None

    def _class(self) -> Any:
        """Returns the class of a name, of whatever case."""
        import keras

        classes = {
            name.lower(): cls
            for name, cls in vars(keras.optimizers).items()
            if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)
            if name not in ("Optimizer", "LossScaleOptimizer")
        }
        if self.name.lower() not in classes:
            raise HyperparameterError(
                f"optimizer.name: expected one of {', '.join(sorted(classes))}; "
                f"received {self.name!r}."
            )
        return classes[self.name.lower()]

    def _learning_rate(
        self, num_steps: int
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        import keras

        from tfgpipe_trainer import optimizers

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
        if self.schedule == "wsd":
            falls = max(1, round(self.decay * num_steps))
            after = optimizers.StableDecay(
                self.learning_rate, max(0, falling - falls), falls
            )
        elif self.schedule == "linear":
            after = schedules.PolynomialDecay(self.learning_rate, falling, 0.0)
        elif self.schedule == "inverse_sqrt":
            after = optimizers.InverseSquareRoot(self.learning_rate, max(1, rising))
        return optimizers.WarmUp(self.learning_rate, rising, after)


class Precision(Hyperparams):
    """Half precision, and training for 8-bit integers."""

    policy: Literal["float32", "mixed_float16", "mixed_bfloat16"] = field(
        default="float32", help="Keras dtype policy; weights stay float32."
    )
    quantize: Literal["none", "8bit"] = field(
        default="none", help="8bit: quantization-aware training for int8."
    )
    quantize_start_step: int = field(
        default=0,
        at_least=0,
        less_than=_STEPS,
        help="Steps that observe ranges before fake quantization.",
    )
    freeze_ranges_step: int | None = field(
        default=None,
        at_least=1,
        less_than=_STEPS,
        help="Step after which ranges are frozen; None: never.",
    )
    range_warmup: bool = field(
        formerly="ranges",
        former_values={"ramped": "True", "slow": "False"},
        default=True,
        help="Moving averages of ranges have a decay that rises.",
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
        """True if the model trains for 8 bits."""
        return self.quantize != "none"

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which layers are made with this precision."""
        from tfgpipe.capture import dtype_policies

        return dtype_policies.default_policy_scope(self.policy)

    def apply(
        self,
        model_or_layers: Any,
        rules: Callable[[], Mapping[type, QuantizeConfig]] = dict,
    ) -> Any:
        """Returns a model, or layers, trained for 8 bits if that is asked for.

        Args:
            model_or_layers: As in `tfgpipe.quantization.apply`.
            rules: Returns configurations for layers of the experiment's own.

        Raises:
            HyperparameterError: If it cannot be.
        """
        if not self.quantizes:
            return model_or_layers
        from tfgpipe import quantization

        activations = quantization.MovingAverageRange(ramp=self.range_warmup)
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
        except (ValueError, TypeError) as error:
            raise _refused(error, "precision.quantize") from None


def _refused(error: Exception, name: str) -> Exception:
    """Returns an error of tfgpipe as one of a hyperparameter, any other as it is.

    Layers of the user's run meanwhile, whose errors are no wrong hyperparameters.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__", "").startswith("tfgpipe."):
        return HyperparameterError(f"{name}: {error}")
    return error
