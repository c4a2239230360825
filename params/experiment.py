"""What every experiment has: a pipeline, an optimizer, a length, a seed."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from params.precision import Precision
from tfgpipe.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpipe

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
    jit_compile: Literal["auto", "on", "off"] = field(
        default="auto", help="Whether XLA compiles the stages; auto: on GPUs only."
    )
    batch_norm: Literal["microbatch", "deferred"] = field(
        default="microbatch", help="When moving averages of batch statistics move."
    )

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


class Adam(Hyperparams):
    """AdamW with a linear warm-up, then a cosine decay to nothing."""

    learning_rate: float = field(
        default=1e-3, at_least=0, help="The highest, at the end of the warm-up."
    )
    warmup: float = field(
        default=0.1, at_least=0, help="Share of the steps in which it rises."
    )
    beta_2: float = field(
        default=0.98, at_least=0, help="Decay of the second moments' average."
    )
    weight_decay: float = field(
        default=0.01, at_least=0, help="Decay of matrices, times the learning rate."
    )
    clip_norm: float | None = field(
        default=1.0, at_least=0, help="Largest norm of all gradients; None: no limit."
    )

    def build(self, num_steps: int) -> keras.optimizers.Optimizer:
        """Returns the optimizer of a run of `num_steps`."""
        import keras

        warmup_steps = int(self.warmup * num_steps)
        optimizer = keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(
                0.0,
                decay_steps=max(1, num_steps - warmup_steps),
                warmup_steps=warmup_steps,
                warmup_target=self.learning_rate,
            ),
            beta_2=self.beta_2,
            weight_decay=self.weight_decay,
            global_clipnorm=self.clip_norm,
        )
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
        return optimizer


class Training(Hyperparams):
    """How long, and what is written when."""

    num_steps: int = field(default=1000, at_least=1, help="Steps of the optimizer.")
    batch_size: int = field(default=32, at_least=1, help="Examples in a step.")
    num_validation_batches: int = field(
        default=32, at_least=1, help="Batches of the validation split to evaluate on."
    )
    log_every: int = field(default=10, at_least=1, help="Steps from line to line.")
    save_every: int = field(
        default=100, at_least=1, help="Steps from checkpoint to checkpoint."
    )
    export: bool = field(
        default=False, help="Whether the run ends with what --mode=export does."
    )


class Experiment(Hyperparams, abc.ABC):
    """Everything that decides a run, and how its model and data are built."""

    unit: ClassVar[str] = "example"

    pipelining: Pipelining = field(
        default=Pipelining(), help="How the layers are spread over devices."
    )
    optimizer: Adam = field(default=Adam(), help="The optimizer.")
    training: Training = field(default=Training(), help="The run.")
    precision: Precision = field(
        default=Precision(), help="In which numbers it computes."
    )
    seed: int = field(default=0, at_least=0, help="Seed of all that is random.")

    @property
    @abc.abstractmethod
    def tokens_per_step(self) -> int:
        """How many `unit`s, such as bytes, a step trains on."""

    @abc.abstractmethod
    def build_model(self) -> tfgpipe.PipelinedModel:
        """Returns the compiled model; its loss is in nats per `unit`."""

    @abc.abstractmethod
    def build_dataset(self, split: Split, *, first_step: int = 0) -> tf.data.Dataset:
        """Returns the batches of a split.

        The batch of a training step depends on the seed and on the number of the step
        alone, so that a run can be taken up at any step.

        Args:
            split: `"train"`, one batch for each step, or `"validation"`.
            first_step: The step of the first batch, counted from 0.
        """

    def baselines(self) -> dict[str, float]:
        """Returns losses to beat on the validation split, by name."""
        return {}

    def sample(self, model: keras.Model) -> str:
        """Returns a text that shows what the model has learnt, or an empty one."""
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
