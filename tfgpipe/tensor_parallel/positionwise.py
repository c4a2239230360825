"""Layers that treat each position alike, with the positions on T devices.

Norms, dropout and perceptrons between the attentions of a transformer see one position
at a time. In tensor parallelism they would run on every device on all positions; in
parts each device has L / T of them (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.2: sequence parallelism), with
whole weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import unique
from tfgpipe.tensor_parallel import device_ops
from tfgpipe.tensor_parallel.chunks import Chunks
from tfgpipe.tensor_parallel.head_dropout import dropped_heads, next_seed
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer, check_sequences


@keras.saving.register_keras_serializable(package="tfgpipe")
class TPPositionwise(ShardedLayer):
    """Layers that follow one another, with T devices for parts of the sequence.

    It computes what `keras.Sequential(layers)` does, of layers that treat each position
    alike: norms over features, `Dropout`, `Dense`, activations. Weights are whole, on
    the first device, and sent to the others. Beside `TPSequenceAttention` it is the
    rest of a transformer's block.

    Args:
        layers: The layers, each of which takes what the one before returns. Of dropout
            the same numbers are dropped as by Keras' layer with the same seed, and each
            device draws those of its own positions alone.
        residual: True to add the input to the result.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are, or those of the
            pipeline around the layer.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        `(batch, length, features)`. T need not divide the length.

    Output shape:
        `(batch, length, features)`, with the features of the last layer.

    Example, half of a block of a transformer:

    >>> layers = [
    ...     keras.layers.LayerNormalization(),
    ...     keras.layers.Dense(16, "gelu"),
    ...     keras.layers.Dense(4),
    ...     keras.layers.Dropout(0.1),
    ... ]
    >>> half = tfgpipe.layers.TPPositionwise(layers, residual=True, num_shards=2)
    >>> tuple(half(np.ones((3, 5, 4), "float32")).shape)
    (3, 5, 4)

    Raises:
        ValueError: If a layer has a state that calls change, other than the seed of a
            `Dropout`, or there are too few devices.
    """

    config_is_complete = True
    config_names = ("residual",)
    key_value_size = 0  # Positions exchange nothing.

    def __init__(
        self,
        layers: Sequence[keras.layers.Layer],
        *,
        residual: bool = False,
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_shards=num_shards, devices=devices, **kwargs)
        self.supports_masking = True
        self.layers = list(layers)
        self.residual = residual

    def build(self, input_shape: Any) -> None:
        """Builds the layers.

        Raises:
            ValueError: If the input is no sequence, or a layer has a state.
        """
        check_sequences("Positions", self.name, input_shape)
        shape = input_shape
        for layer in self.layers:
            if not layer.built:
                layer.build(shape)
            shape = layer.compute_output_shape(shape)
            if not _is_dropout(layer) and keras_internals.layers.mutable_state(layer):
                raise ValueError(
                    "Layers on parts of a sequence change no state, except the seed of "
                    f"a `Dropout`. Received '{layer.name}' in layer '{self.name}'. "
                    "Keep it outside."
                )

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Returns the results of the last layer.

        Args:
            inputs: The whole sequence.
            training: True to drop.
        """
        mask = keras_internals.calls.get_mask(inputs)
        keras_internals.calls.set_mask(inputs, None)
        first = self.shard_devices[0]
        chunks = Chunks(self.shard_devices, is_causal=False)
        parts = chunks.split(inputs)
        drops = [x for x in self.layers if _is_dropout(x) and x.rate and training]
        seeds = [next_seed(x) for x in drops]
        variables = unique(v for layer in self.layers for v in _weights(layer))
        # Each layer casts its own, as it does for Keras.
        weights = self.copies_of(variables, len(parts), casts=False)
        places = _places(inputs, chunks) if drops else [(0, 0)] * len(parts)
        outputs = [
            device_ops.on(
                chunks.device(c),
                self._layers_on(variables, len(seeds), places[c]),
                part,
                *weights[c],
                *seeds,
                *(x for x in places[c] if isinstance(x, tf.Tensor)),
            )
            for c, part in enumerate(parts)
        ]
        output = device_ops.gather(outputs, first, axis=1)
        keras_internals.calls.set_mask(output, mask)
        return output

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output."""
        for layer in self.layers:
            input_shape = layer.compute_output_shape(input_shape)
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        layers = [keras.saving.serialize_keras_object(x) for x in self.layers]
        return {**super().get_config(), "layers": layers}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TPPositionwise:
        """Creates a layer from what `get_config` returned."""
        layers = [*map(keras.saving.deserialize_keras_object, config["layers"])]
        return cls(**{**config, "layers": layers})

    def _layers_on(
        self, variables: Sequence[keras.Variable], num_seeds: int, place: Sequence[Any]
    ) -> Callable[..., tf.Tensor]:
        """Returns the function of a chunk, of weights, and of the seeds of dropout.

        Args:
            variables: The weights of the layers.
            num_seeds: Number of layers that drop.
            place: The first position of the chunk and the number of all: integers, or
                tensors, which are then the function's last arguments.
        """

        def run(x: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
            values, rest = rest[: len(variables)], rest[len(variables) :]
            seeds = iter(rest[:num_seeds])
            first, length = rest[num_seeds:] or place
            y = x
            with keras.StatelessScope(
                state_mapping=[*zip(variables, values, strict=True)]
            ):
                for layer in self.layers:
                    if not _is_dropout(layer):
                        y = layer(y)
                    elif num_seeds and layer.rate:
                        y = dropped_heads(
                            y,
                            rate=layer.rate,
                            seed=next(seeds),
                            num_heads=length,
                            first=first,
                        )
            # Of unlike dtypes the wider one, as of Keras' tensors.
            return keras.ops.add(x, y) if self.residual else y

        return run


def _places(inputs: tf.Tensor, chunks: Chunks) -> list[tuple[Any, Any]]:
    """Returns the first position of each chunk, and the number of all."""
    length = inputs.shape[1]
    if length is not None:
        ends = itertools.accumulate(chunks.sizes(length), initial=0)
        return [(first, length) for first in itertools.islice(ends, chunks.num)]
    with tf.device(chunks.device(0)):
        length = tf.shape(inputs, out_type=tf.int64)[1]
        firsts = tf.cumsum(chunks.sizes(length), exclusive=True)
        return [(first, length) for first in tf.unstack(firsts, num=chunks.num)]


def _is_dropout(layer: Any) -> bool:
    return type(layer) is keras.layers.Dropout and layer.noise_shape is None


def _weights(layer: keras.layers.Layer) -> Sequence[keras.Variable]:
    return () if _is_dropout(layer) else layer.variables
