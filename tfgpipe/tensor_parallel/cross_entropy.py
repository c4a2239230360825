"""The cross-entropy of a softmax over a vocabulary that is on T devices.

    loss = log(sum over v of exp(logit[v])) - logit[target]

Each device takes the largest of its logits, the sum of its exponentials and, if it has
it, the target's logit: three numbers a position instead of a vocabulary (Megatron-LM,
Shoeybi et al. 2019, section 3). The logits are never in one place, nor is their
gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.tensor_parallel import device_ops
from tfgpipe.tensor_parallel.sharded_layer import ShardedLayer


@keras.saving.register_keras_serializable(package="tfgpipe")
class TPCrossEntropy(ShardedLayer):
    """The loss of each position, of logits that are in T parts.

    It computes what `keras.losses.sparse_categorical_crossentropy(targets, logits,
    from_logits=True)` does. Keras' losses know one output and its targets, so this one
    is a layer: targets go into the model as an input, losses come out of it, and
    `OutputLoss` averages them.

    Args:
        num_shards: T. Defaults to the number of devices.
        devices: Names of devices. Defaults to the first T there are, or those of the
            pipeline around the layer.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        Of the logits a tuple of T parts, `(batch, ..., size)` each, in the order of the
        vocabulary, as from a `TPDense` with `gather_output=False`. Of the targets
        `(batch, ...)`, integers.

    Output shape:
        `(batch, ...)`, in single precision at least.

    Example:

    >>> features = keras.Input((6,))
    >>> targets = keras.Input((), dtype="int32")
    >>> head = tfgpipe.layers.TPDense(10, num_shards=2, gather_output=False)
    >>> loss = tfgpipe.layers.TPCrossEntropy(num_shards=2)
    >>> model = keras.Model([features, targets], loss(head(features), targets))
    >>> model.compile("adam", tfgpipe.tensor_parallel.OutputLoss())
    >>> x, y = np.ones((3, 6)), np.array([2, 3, 4])
    >>> _ = model.fit([x, y], y, verbose=0)

    Raises:
        ValueError: If there are too few devices, or logits in more or fewer parts.
    """

    config_is_complete = True

    def build(self, logits_shape: Any, targets_shape: Any = None) -> None:
        """Checks that there are T parts."""
        if not isinstance(logits_shape[0], (tuple, list)) or (
            len(logits_shape) != self.num_shards
        ):
            raise ValueError(
                "Logits come in a tuple of one part for each shard. Layer "
                f"'{self.name}' has num_shards={self.num_shards}. Received the shape "
                f"{logits_shape}. Take them from a `TPDense` with "
                "`gather_output=False` and as many shards."
            )

    def call(self, logits: Sequence[tf.Tensor], targets: tf.Tensor) -> tf.Tensor:
        """Returns the loss of each position."""
        return cross_entropy(targets, logits, self.shard_devices)

    @staticmethod
    def largest_logit(logits: tf.Tensor) -> tf.Tensor:
        """Returns the largest logit of each position, in single precision at least."""
        return tf.cast(tf.reduce_max(logits, axis=-1), precise(logits.dtype))

    @staticmethod
    def terms(
        logits: tf.Tensor, maximum: tf.Tensor, targets: tf.Tensor, *, start: int
    ) -> list[tf.Tensor]:
        """Returns the sum of exponentials, and the target's logit, less a maximum.

        The latter is 0 if the target is none of the tokens.

        Args:
            logits: Logits of the tokens from `start` on, `(batch, ..., size)`.
            maximum: The maximum of each position, which has no gradient.
            targets: Targets among all tokens.
            start: The first of the tokens.
        """
        x = tf.cast(logits, maximum.dtype) - tf.stop_gradient(maximum)[..., None]
        local = tf.cast(targets, tf.int32) - start
        inside = (local >= 0) & (local < x.shape[-1])
        chosen = tf.gather(
            x, tf.where(inside, local, 0), axis=-1, batch_dims=len(x.shape) - 1
        )
        return [
            tf.reduce_sum(tf.exp(x), axis=-1),
            tf.where(inside, chosen, tf.zeros((), x.dtype)),
        ]

    def compute_output_spec(self, logits: Any, targets: Any) -> keras.KerasTensor:
        """Infers the losses' shape and dtype."""
        return keras.KerasTensor(targets.shape, precise(logits[0].dtype))


@keras.saving.register_keras_serializable(package="tfgpipe")
class OutputLoss(keras.losses.Loss):
    """The loss that a model has computed itself: its output, averaged and weighted.

    Args:
        reduction: Reduction over the batch, of `keras.losses.Loss`.
        name: Name of the loss.
        **kwargs: Arguments of `keras.losses.Loss`.

    Example:

    >>> loss = tfgpipe.tensor_parallel.OutputLoss()
    >>> float(loss(np.zeros(2), np.array([1.0, 2.0])))
    1.5
    """

    def __init__(
        self,
        *,
        reduction: str = "sum_over_batch_size",
        name: str = "output_loss",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, reduction=reduction, **kwargs)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the output, whatever the targets are."""
        return y_pred


def cross_entropy(
    targets: tf.Tensor, logits: Sequence[tf.Tensor], devices: Sequence[str]
) -> tf.Tensor:
    """Returns the cross-entropy of each position, on the first device.

    In single precision at least. `logits[t]` is `[..., size_t]` on device t.
    """
    primary = devices[0]
    # A shard may be all padding.
    shards = [(d, x) for d, x in zip(devices, logits, strict=True) if x.shape[-1]]
    devices, logits = zip(*shards, strict=True)
    maxima = device_ops.on_each(devices, TPCrossEntropy.largest_logit, logits)
    with tf.device(primary):
        maximum = device_ops.on(primary, lambda *m: tf.reduce_max(m, axis=0), *maxima)
        maximum = tf.stop_gradient(maximum)
    start, terms = 0, []
    for device, x in shards:
        own = functools.partial(TPCrossEntropy.terms, start=start)
        terms.append(device_ops.on(device, own, x, maximum, targets))
        start += x.shape[-1]
    sums, chosen = zip(*terms, strict=True)
    return device_ops.on(primary, _loss, *sums, *chosen)


def precise(dtype: Any) -> str:
    """Returns the dtype of losses of logits of a dtype."""
    return keras.backend.result_type(dtype, "float32")


def _loss(*terms: tf.Tensor) -> tf.Tensor:
    half = len(terms) // 2
    return tf.math.log(tf.add_n(terms[:half])) - tf.add_n(terms[half:])
