"""A mixture of experts that are dealt over T devices.

Of E experts, MLPs of equal sizes, each token takes the k that a router gives the
largest probabilities, and adds up their outputs (Shazeer et al. 2017; Lepikhin et al.
2020, "GShard"; Jiang et al. 2024, "Mixtral"):

    y = sum over e in top-k of p[e] mlp[e](x),    p = softmax(router x)

Device t has experts t E / T to (t + 1) E / T. The first device sends each one the
tokens that take any of its experts, once, and gets one row for each of them back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._util import argument_checks
from tfgpipe.tensor_parallel import device_ops
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer, check_divides

# Of kernels: each an axis of experts, of inputs and of outputs.
_GATE, _UP, _DOWN = "gate_kernels", "up_kernels", "down_kernels"


@keras.saving.register_keras_serializable(package="tfgpipe")
class TPMixtureOfExperts(ShardedLayer):
    """A routed layer of experts, with some of the experts on each of T devices.

    Results, and for the same seed initial weights, are the same for any T. Each token
    is routed by itself, so they are also the same for any microbatches.

    Args:
        num_experts: E, a multiple of T.
        hidden_units: Size of the hidden layer of each expert.
        top_k: k, the number of experts that a token takes.
        activation: Activation of hidden layers.
        gated: True for hidden layers `activation(x gate) * (x up)`, as SwiGLU; False
            for `activation(x up)`.
        normalizes: True for probabilities that are divided by their sum over the k
            experts, as Mixtral's; False for them as they are, as Switch's.
        capacity_factor: Tokens that an expert takes of an example of n positions at
            most, in shares of k n / E; first choices of all positions come before
            second ones. A token gets nothing from an expert that is full. None for no
            limit.
        balancing: Weight of the loss that balances experts, `E sum over e of f[e] p[e]`
            with the share f of choices and the mean probability p of each expert (Fedus
            et al. 2021, "Switch", section 2.2), of each example, averaged over examples
            (DeepSeek-AI 2024, equation 17).
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are, or those of the
            pipeline around the layer.
        kernel_initializer: Initializer of each expert's kernels, and of the router.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        `(batch, ..., features)`. Positions that a Keras mask leaves out are not routed:
        they get zeros, take no capacity, and do not count in the balancing loss.

    Output shape:
        `(batch, ..., features)`.

    Example:

    >>> experts = tfgpipe.layers.TPMixtureOfExperts(4, hidden_units=16, num_shards=2)
    >>> tuple(experts(np.ones((3, 5, 6), "float32")).shape)
    (3, 5, 6)

    Raises:
        ValueError: If T does not divide E, k is more than E, a number is out of range,
            or there are too few devices.
    """

    config_is_complete = True
    config_names = (
        *("num_experts", "hidden_units", "top_k", "activation", "gated", "normalizes"),
        *("capacity_factor", "balancing", "kernel_initializer"),
    )

    def __init__(
        self,
        num_experts: int,
        *,
        hidden_units: int,
        top_k: int = 2,
        activation: Any = "silu",
        gated: bool = True,
        normalizes: bool = True,
        capacity_factor: float | None = None,
        balancing: float = 0.0,
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_shards=num_shards, devices=devices, **kwargs)
        self.supports_masking = True
        self.num_experts = argument_checks.check_count("num_experts", num_experts)
        self.hidden_units = argument_checks.check_count("hidden_units", hidden_units)
        self.top_k = argument_checks.check_count("top_k", top_k, most=num_experts)
        check_divides("experts", num_experts, self.num_shards, self.name)
        for name, value in (
            ("capacity_factor", 1.0 if capacity_factor is None else capacity_factor),
            ("balancing", balancing + 1.0),
        ):
            if not 0 < value < math.inf:
                raise ValueError(
                    f"`{name}` is a positive number; `balancing` may be 0. Received "
                    f"capacity_factor={capacity_factor}, balancing={balancing} in "
                    f"layer '{self.name}'."
                )
        self.activation = keras.activations.get(activation)
        self.gated, self.normalizes = gated, normalizes
        self.capacity_factor, self.balancing = capacity_factor, balancing
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    @property
    def max_shards(self) -> int:
        """Size that T divides: the experts."""
        return self.num_experts

    def build(self, input_shape: Any) -> None:
        """Creates the router and the experts' kernels."""
        features = input_shape[-1]
        E, hidden = self.num_experts, self.hidden_units
        draw = self.kernel_initializer

        def each(shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
            """Draws a kernel for each expert, by the sizes of one."""
            return tf.stack([draw.clone()(shape[1:], dtype) for _ in range(shape[0])])

        (self.router,) = self.add_parts(
            "router", (features, E), axis=None, initializer=draw.clone()
        )
        shapes = {_UP: (E, features, hidden), _DOWN: (E, hidden, features)}
        if self.gated:
            shapes[_GATE] = shapes[_UP]
        self.kernels = tuple(
            self.add_parts(name, shape, axis=0, initializer=each)
            for name, shape in shapes.items()
        )

    def call(self, inputs: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
        """Routes each position to its experts, and adds up what they return.

        Args:
            inputs: Features.
            mask: False for positions that are not routed, `(batch, ...)`.
        """
        devices, T = self.shard_devices, self.num_shards
        first, (router,) = devices[0], self.values((self.router,), self._router_dtype)
        x, *copies = device_ops.copy(inputs, first, T + 1)
        logits = device_ops.on(first, self._logits, x, router)
        with tf.device(first):
            chosen = tf.math.top_k(tf.stop_gradient(logits), self.top_k).indices
            taken = self._taken(chosen, mask)
        if self.balancing:
            logits, other = device_ops.copy(logits, first, 2)
            self.add_loss(
                device_ops.on(first, self._balancing_loss, other, chosen, taken)
            )
        weights = device_ops.on(first, self._weights, logits, chosen, taken)
        of_shards = device_ops.copy(weights, first, T)
        kernels = [self.values(parts) for parts in self.kernels]
        rows, outputs = [], []
        for t, device in enumerate(devices):
            with tf.device(first):
                mine, local = self._choices_of(t, chosen, taken)
            tokens, shares = (
                device_ops.on(first, _rows_of, x, mine)
                for x in (copies[t], of_shards[t])
            )
            rows.append(mine)
            mine_of = (of_shard[t] for of_shard in kernels)
            outputs.append(
                device_ops.on(device, self._experts, tokens, shares, local, *mine_of)
            )
        with tf.device(first):
            size = tf.reduce_prod(tf.shape(inputs)[:-1])
        total = device_ops.on(first, _sum_rows, *outputs, *rows, size)
        with tf.device(first):
            return tf.ensure_shape(tf.reshape(total, tf.shape(inputs)), inputs.shape)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output."""
        return input_shape

    @property
    def _router_dtype(self) -> str:
        """The dtype of logits, at least single precision (Fedus et al. 2021)."""
        return keras.backend.result_type(self.compute_dtype, "float32")

    def _logits(self, x: tf.Tensor, router: tf.Tensor) -> tf.Tensor:
        return keras.ops.matmul(tf.cast(x, router.dtype), router)

    def _weights(
        self, logits: tf.Tensor, chosen: tf.Tensor, taken: tf.Tensor
    ) -> tf.Tensor:
        """Returns the weight of each choice, `[batch, ..., k]`, zero if not taken."""
        dims = len(logits.shape) - 1
        if self.normalizes:  # The softmax over the k is the same, divided by their sum.
            weights = tf.nn.softmax(tf.gather(logits, chosen, axis=-1, batch_dims=dims))
        else:
            every = tf.nn.softmax(logits)
            weights = tf.gather(every, chosen, axis=-1, batch_dims=dims)
        weights = tf.where(taken, weights, tf.zeros((), weights.dtype))
        return tf.cast(weights, self.compute_dtype)

    def _taken(self, chosen: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
        """Returns whether each choice is taken, bool `[batch, ..., k]`."""
        taken = tf.ones_like(chosen, tf.bool)
        if mask is not None:
            taken &= tf.cast(mask, tf.bool)[..., None]
        if self.capacity_factor is None:
            return taken
        batch, k, E = tf.shape(chosen)[0], self.top_k, self.num_experts
        # In the order in which they are served: `[batch, k, positions]`.
        order = tf.transpose(tf.reshape(chosen, [batch, -1, k]), [0, 2, 1])
        valid = tf.transpose(tf.reshape(taken, [batch, -1, k]), [0, 2, 1])
        wants = (
            tf.one_hot(order, E, dtype=tf.int32) * tf.cast(valid, tf.int32)[..., None]
        )
        served = tf.cumsum(tf.reshape(wants, [batch, -1, E]), axis=1)
        rank = tf.reduce_sum(tf.reshape(served, tf.shape(wants)) * wants, axis=-1)
        positions = tf.cast(tf.shape(order)[2], tf.float64)
        share = self.capacity_factor * k / E
        capacity = tf.cast(tf.math.ceil(share * positions), tf.int32)
        fits = tf.transpose((rank <= capacity) & valid, [0, 2, 1])
        return tf.reshape(fits, tf.shape(chosen))

    def _balancing_loss(
        self, logits: tf.Tensor, chosen: tf.Tensor, taken: tf.Tensor
    ) -> tf.Tensor:
        """Returns the loss that balances experts, averaged over examples."""
        E, k = self.num_experts, self.top_k
        batch = tf.shape(logits)[0]
        probabilities = tf.reshape(tf.nn.softmax(logits), [batch, -1, E])
        chosen = tf.reshape(chosen, [batch, -1, k])
        counted = tf.reshape(tf.reduce_any(taken, -1), [batch, -1, 1])
        counted = tf.cast(counted, logits.dtype)
        num = tf.maximum(tf.reduce_sum(counted, axis=1), 1)
        choices = tf.reduce_sum(tf.one_hot(chosen, E, dtype=logits.dtype), axis=2)
        share = tf.reduce_sum(choices * counted, axis=1) / (k * num)
        mean = tf.reduce_sum(probabilities * counted, axis=1) / num
        return self.balancing * E * tf.reduce_mean(tf.reduce_sum(share * mean, axis=-1))

    def _choices_of(
        self, t: int, chosen: tf.Tensor, taken: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the tokens that take experts of shard t, and those of its experts.

        They are indices of positions, `[n]`, and of experts, `[n, k]`, -1 for those of
        other shards.
        """
        each = self.num_experts // self.num_shards
        local = tf.reshape(chosen - t * each, [-1, self.top_k])
        inside = (local >= 0) & (local < each) & tf.reshape(taken, [-1, self.top_k])
        rows = tf.where(tf.reduce_any(inside, axis=-1))[:, 0]
        local = tf.where(inside, local, -tf.ones_like(local))
        return rows, tf.gather(local, rows)

    def _experts(
        self, x: tf.Tensor, shares: tf.Tensor, local: tf.Tensor, *kernels: tf.Tensor
    ) -> tf.Tensor:
        """Returns the sum of what a shard's experts return for each token.

        Args:
            x: Tokens, `[n, features]`.
            shares: Weight of each choice, `[n, k]`.
            local: Expert of each choice, `[n, k]`, -1 for others.
            *kernels: Kernels of up and down, and of the gate if there is one.
        """
        total = tf.zeros_like(x)
        for i, (up, down, *gate) in enumerate(
            zip(*map(tf.unstack, kernels), strict=True)
        ):
            pairs = tf.where(tf.equal(local, i))
            tokens = tf.gather(x, pairs[:, 0])
            hidden = keras.ops.matmul(tokens, up)
            if gate:
                hidden *= self.activation(keras.ops.matmul(tokens, gate[0]))
            else:
                hidden = self.activation(hidden)
            y = keras.ops.matmul(hidden, down) * tf.gather_nd(shares, pairs)[:, None]
            total = tf.tensor_scatter_nd_add(total, pairs[:, :1], y)
        return total


def _rows_of(x: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns some positions of a tensor, `[n, size of the last axis]`."""
    return tf.gather(tf.reshape(x, [-1, x.shape[-1]]), rows)


def _sum_rows(*tensors: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the rows of all shards, at their positions.

    Args:
        *tensors: For each shard its rows, for each shard their positions, and the
            number of positions.
    """
    *parts, size = tensors
    half = len(parts) // 2
    outputs, rows = parts[:half], parts[half:]
    total = tf.zeros([size, outputs[0].shape[-1]], outputs[0].dtype)
    for output, mine in zip(outputs, rows, strict=True):
        total = tf.tensor_scatter_nd_add(total, mine[:, None], output)
    return total
