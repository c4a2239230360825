"""Experiments for dry runs alone: the measured stacks, and models of keras-hub.

`benchmarks.studies.dry_runs` takes them by name, such as
`benchmarks.studies.experiments.Encoder`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.config import Pipelining, Training
from tfgpipe_trainer.experiment import Experiment, Split
from tfgpipe_trainer.hyperparams import field

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from benchmarks.workloads import Workload
    from tfgpipe.quantization import QuantizeConfig


class _Regression(Experiment):
    """Mean squared error to zeros, in two stages."""

    pipelining: Pipelining = Pipelining(num_stages=2, num_microbatches=4)
    training: Training = Training(num_steps=1, batch_size=8)

    def loss(self) -> keras.losses.Loss:
        """Returns the mean squared error, of each output if there are several."""
        import keras

        return keras.losses.MeanSquaredError()


class MLP(_Regression):
    """Dense layers of 1024 with relu, which are heavy in weights."""

    num_layers: int = field(default=2, at_least=1, help="Number of layers.")

    def workload(self) -> Workload:
        """Returns the layers with the shape of a batch."""
        from benchmarks import workloads

        return workloads.mlp(num_layers=self.num_layers)

    def network(self) -> keras.Model:
        """Returns the layers."""
        import keras

        workload = self.workload()
        inputs = keras.Input(workload.batch_shape[1:])
        return keras.Sequential([inputs, *workload.make_layers()])

    def examples(self, split: Split) -> Any:
        """Returns zeros."""
        del split
        shape = self.training.batch_size, *self.workload().batch_shape[1:]
        return np.zeros(shape, np.float32), np.zeros(shape, np.float32)


class Encoder(MLP):
    """Pre-LN encoder blocks, which are heavy in arithmetic."""

    width: int = field(default=64, at_least=4, help="Width.")
    length: int = field(default=32, at_least=1, help="Positions.")

    def workload(self) -> Workload:
        """Returns the layers with the shape of a batch."""
        from benchmarks import workloads

        T = self.pipelining.num_shards
        workload = workloads.transformer(
            num_layers=self.num_layers, length=self.length, d_model=self.width
        )
        if T == 1:
            return workload

        def make_layers() -> list[keras.layers.Layer]:
            number = range(self.num_layers)
            return [workloads.ShardedEncoderBlock(num_shards=T) for _ in number]

        return dataclasses.replace(workload, make_layers=make_layers)

    def quantize_rules(self) -> Mapping[type, QuantizeConfig]:
        """Returns how a block is quantized."""
        from benchmarks import workloads

        return {workloads.EncoderBlock: workloads.quantize_config()}


class KerasHub(_Regression):
    """A small model of a family of `benchmarks.studies.keras_hub`."""

    family: str = field(
        default="gpt2", help="One of `benchmarks.studies.keras_hub.FAMILIES`."
    )

    def network(self) -> keras.Model:
        """Returns the model, with inputs of known sizes."""
        import keras

        inputs, model = self._example()
        known = keras.tree.map_structure(
            lambda x: keras.Input(x.shape[1:], dtype=x.dtype.name), inputs
        )
        return keras.Model(known, model.call(known))

    def batches(
        self, split: Split, *, first_step: int = 0, shard: HostShard | None = None
    ) -> tf.data.Dataset:
        """Returns a batch of random inputs, and of zeros for each output."""
        import keras
        import tensorflow as tf

        del split, first_step, shard
        inputs, model = self._example()
        zeros = keras.tree.map_structure(tf.zeros_like, model(inputs))
        return tf.data.Dataset.from_tensors((inputs, zeros))

    def _example(self) -> tuple[Any, keras.Model]:
        from benchmarks.studies import keras_hub

        family = keras_hub.FAMILIES[self.family]
        model = family.make()
        return keras_hub.example_inputs(model, family), model
