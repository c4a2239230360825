"""Two dense layers with nothing to exchange between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfgpipe.tensor_parallel import linear
from tfgpipe.tensor_parallel.dense import Dense, outer
from tfgpipe.tensor_parallel.linear import Collective, MaybeSharded


@keras.saving.register_keras_serializable(package="tfgpipe")
class TPMLP(keras.layers.Layer):
    """A dense layer of columns, an activation, and a dense layer of rows.

    It computes what `keras.layers.Dense(hidden_units, activation)` followed by
    `keras.layers.Dense(units)` does. Each device keeps its part of the hidden units:
    there is one exchange before and one after (Megatron-LM, Shoeybi et al. 2019).

    Args:
        hidden_units: Size of the output of the first layer. T divides it.
        units: Size of the output.
        activation: Of the hidden units, one by one: by name, or of `keras.activations`.
        dropout: The share of outputs that is dropped in training, on the first device,
            so that the same are dropped whatever T is.
        seed: Of the dropout.
        collective: As of `TPDense`.
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are; in a pipeline
            it decides.
        use_bias: Whether the layers have biases.
        kernel_initializer: As of `keras.layers.Dense`: it draws full kernels.
        bias_initializer: Likewise.
        **kwargs: Of the base layer.

    Attributes:
        inner: The layer of columns, a `TPDense`.
        outer: The layer of rows, likewise.

    Input shape:
        `(batch, ..., features)`, or a tuple of T parts of it.

    Output shape:
        `(batch, ..., units)`.

    Example:

    >>> mlp = tfgpipe.layers.TPMLP(16, units=6, num_shards=2)
    >>> tuple(mlp(np.ones((3, 6), "float32")).shape)
    (3, 6)
    >>> [weight.name for weight in mlp.weights]
    ['kernel_0', 'kernel_1', 'bias_0', 'bias_1', 'kernel_0', 'kernel_1', 'bias']

    Raises:
        ValueError: As of `TPDense`.
    """

    config_is_complete = True

    def __init__(
        self,
        hidden_units: int,
        *,
        units: int,
        activation: Any = "gelu",
        dropout: float = 0.0,
        seed: int | None = None,
        collective: Collective = "gather",
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA compiles for one device.
        self.supports_masking = True
        common = {
            "collective": collective,
            "num_shards": num_shards,
            "devices": devices,
            "use_bias": use_bias,
            "kernel_initializer": kernel_initializer,
            "bias_initializer": bias_initializer,
            "dtype": self.dtype_policy,
        }
        self.inner = Dense(
            hidden_units,
            activation=activation,
            gather_output=False,
            name="inner",
            **common,
        )
        self.outer = Dense(units, partition="row", name="outer", **common)
        self.dropout = keras.layers.Dropout(dropout, seed=seed, dtype=self.dtype_policy)

    @property
    def max_shards(self) -> int:
        """T divides it: the hidden units."""
        return self.inner.max_shards

    def build(self, input_shape: Any) -> None:
        """Makes the layers' weights."""
        self.inner.build(input_shape)
        self.outer.build(self.inner.compute_output_shape(input_shape))

    def call(self, inputs: MaybeSharded, training: bool | None = None) -> Any:
        """Applies the layers."""
        return self.dropout(self.outer(self.inner(inputs)), training=training)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output."""
        return (*outer(input_shape), self.outer.units)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Passes a mask on."""
        return self.outer.compute_mask(inputs, previous_mask)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        inner = self.inner.get_config()
        shared = ("collective", "num_shards", "devices", "use_bias", "activation")
        drawn = ("kernel_initializer", "bias_initializer")
        return {
            **super().get_config(),
            "hidden_units": self.inner.units,
            "units": self.outer.units,
            "dropout": self.dropout.rate,
            "seed": self.dropout.seed,
            **{name: inner[name] for name in (*shared, *drawn)},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TPMLP:
        """Makes a layer from what `get_config` returned."""
        return cls(**linear.with_collective(config))
