"""What every experiment has: a pipeline, an optimizer, a length, a seed."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from params.optimizer import Optimizer
from params.precision import Precision
from params.share import WHOLE, Share
from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpipe
    from tfgpipe.quantization import QuantizeConfig

Split = Literal["train", "validation"]


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
        help="v, stages on each device of schedule=interleaved; None: 2.",
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
        if v is not None and self.schedule != "interleaved":
            raise HyperparameterError(
                "stages_per_device: expected None, as only schedule=interleaved has "
                f"several stages on a device; received {v} for "
                f"schedule={self.schedule}."
            )
        if self.num_stages % self.num_stages_each:
            raise HyperparameterError(
                f"num_stages: expected a multiple of {self.num_stages_each}, the "
                "stages on each device of schedule=interleaved; received "
                f"{self.num_stages}. Change it, or stages_per_device."
            )

    @property
    def num_stages_each(self) -> int:
        """v, the number of stages on each device."""
        if self.schedule != "interleaved":
            return 1
        return self.stages_per_device or 2

    @property
    def num_devices(self) -> int:
        """How many devices it takes: D * (K / v) * T."""
        num_groups = self.num_stages // self.num_stages_each
        return self.num_replicas * num_groups * self.num_shards

    def build(
        self, layers: Sequence[keras.layers.Layer] | keras.Model
    ) -> tfgpipe.PipelinedModel:
        """Returns a model, or layers one after another, as a pipeline."""
        import tfgpipe

        choice = self.jit_compile
        try:
            return tfgpipe.PipelinedModel(
                layers,
                num_stages=self.num_stages,
                num_microbatches=self.num_microbatches,
                schedule=self.schedule,
                balance=self.balance if self.layers is None else self.layers,
                remat=self.remat,
                jit_compile="auto" if choice == "auto" else choice == "on",
                batch_norm=self.batch_norm,
            )
        except ValueError as error:
            raise HyperparameterError(f"pipelining: {error}") from None


class Training(Hyperparams):
    """How long, and in which steps."""

    num_steps: int = field(default=1000, at_least=1, help="Steps of the run.")
    batch_size: int = field(default=32, at_least=1, help="Examples in a step.")
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


class Experiment(Hyperparams, abc.ABC):
    """Everything that decides a run, and how its model and data are built."""

    unit: ClassVar[str] = "example"

    pipelining: Pipelining = field(
        default=Pipelining(), help="How the layers are spread over devices."
    )
    optimizer: Optimizer = field(default=Optimizer(), help="How weights are updated.")
    training: Training = field(default=Training(), help="The run.")
    saving: Saving = field(default=Saving(), help="Its checkpoints.")
    evaluation: Evaluation = field(default=Evaluation(), help="How good it is.")
    warm_start: WarmStart = field(default=WarmStart(), help="Weights to begin with.")
    precision: Precision = field(
        default=Precision(), help="In which numbers it computes."
    )
    seed: int = field(
        default=0, at_least=0, less_than=2**32, help="Seed of all that is random."
    )

    @property
    @abc.abstractmethod
    def tokens_per_step(self) -> int:
        """How many `unit`s, such as bytes, a step trains on."""

    @abc.abstractmethod
    def network(self) -> keras.Model:
        """Returns the network without its pipeline, from inputs to logits.

        Raises:
            HyperparameterError: If there is none of these sizes.
        """

    def loss(self) -> keras.losses.Loss:
        """Returns the loss of logits, in nats per `unit`."""
        import keras

        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns what is measured beside the loss."""
        return []

    def quantize_rules(self) -> Mapping[type, QuantizeConfig]:
        """Returns how layers of the experiment's own are quantized."""
        return {}

    def build_model(self) -> tfgpipe.PipelinedModel:
        """Returns the network as a pipeline, compiled.

        Raises:
            HyperparameterError: If it does not fit its pipeline, or its metrics.
        """
        with self.precision.scope():
            network = self.precision.apply(self.network(), self.quantize_rules)
            model = self.pipelining.build(network)
            metrics = self.metrics()
            model.compile(
                optimizer=self.optimizer.build(self.training.num_steps),
                loss=self.loss(),
                metrics=metrics,
            )
        self.evaluation.check(metrics)
        return model

    @abc.abstractmethod
    def build_dataset(
        self, split: Split, *, first_step: int = 0, share: Share = WHOLE
    ) -> tf.data.Dataset:
        """Returns the batches of a split.

        The batch of a training step depends on the seed and on the number of the step
        alone, so that a run can be taken up at any step.

        Args:
            split: `"train"`, one batch for each step, or `"validation"`.
            first_step: The step of the first batch, counted from 0.
            share: Which rows of each batch of training are read here.
        """

    def check(self) -> None:
        """Looks for what would otherwise come up after the training.

        Raises:
            HyperparameterError: If there is something.
        """
        return

    def baselines(self) -> dict[str, float]:
        """Returns losses to beat on the validation split, by name."""
        return {}

    def decode(self, model: keras.Model, folder: Path) -> str:
        """Writes what a trained model makes of data it has not seen.

        Args:
            model: The model.
            folder: Where to write files.

        Returns:
            A text that shows some of it, or an empty one.
        """
        del model, folder  # Not every experiment has something to show.
        return ""

    def representative(self) -> np.ndarray | None:
        """Returns inputs to find ranges of activations with, if the model has such."""
        return None

    def test_data(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns inputs and classes that no training has seen, if it has such."""
        return None

    def float_twin(self) -> Self | None:
        """Returns what a quantized model is to be compared with, trained as well."""
        return None
