"""Merges the means and variances of microbatches into those of the mini-batch.

By the law of total variance

    mean     = sum_m n_m mean_m / n
    variance = sum_m n_m (variance_m + (mean_m - mean)^2) / n

which is summed here one microbatch at a time (Chan, Golub and LeVeque 1983), without
ever taking the difference of two large sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfgpipe.capture import Accumulator
from tfgpipe.distribution import ReplicaGroup


class BatchMoments(Accumulator):
    """Mean and variance over all but one axis, which moving averages move by.

    Args:
        x: The microbatch.
        mask: Mask of the positions that count, of one dimension less than `x`, or None
            for all.
        axis: The axis that is kept, of size C.
        variables: The moving averages of the mean and of the variance, `[C]` each.
        momentum: The share of the moving averages that stays.
        replicas: The replicas that have other examples of the microbatch, or None. (As
            in Keras' layer a mask keeps moments from being taken over replicas.)

    Attributes:
        mean: `[C]`, as `keras.layers.BatchNormalization` takes it.
        variance: Variance, `[C]`.
    """

    def __init__(
        self,
        x: tf.Tensor,
        mask: tf.Tensor | None,
        *,
        axis: int,
        variables: Sequence[keras.Variable],
        momentum: float,
        replicas: ReplicaGroup | None = None,
    ) -> None:
        self.variables = tuple(variables)
        self.over_replicas = mask is None and replicas is not None
        self._momentum = momentum
        axes = [a for a in range(len(x.shape)) if a != axis % len(x.shape)]
        if mask is None:
            rows = tf.size(x, out_type=tf.int64) // x.shape[axis]
            count = tf.cast(rows, x.dtype)
            # Keras divides by the count, and where there is a mask by a little more.
            self._epsilon = 0.0
            self.mean, self.variance = keras.ops.moments(x, axes)
            if replicas:
                count, self.mean, self.variance = _all_reduce_moments(
                    x, axis, axes, count, replicas
                )
        else:
            counts = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(x))
            count = tf.reduce_sum(tf.cast(counts, x.dtype), axes)
            self._epsilon = keras.config.epsilon()
            number = count + self._epsilon
            total = tf.reduce_sum(tf.where(counts, x, tf.zeros_like(x)), axes)
            self.mean = total / number
            away = x - _broadcast_along(self.mean, axis, len(x.shape))
            away = tf.where(counts, away, tf.zeros_like(x))
            self.variance = tf.reduce_sum(tf.square(away), axes) / number
        self.values = self._to_count_mean_squares(count)

    def merge(self, previous: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns count, mean and sum of squares of all microbatches so far."""
        count, mean, squares = previous
        more, mean_of_more, squares_of_more = self.values
        total = count + more
        share = tf.math.divide_no_nan(more, total)
        away = mean_of_more - mean
        return [
            total,
            mean + away * share,
            squares + squares_of_more + tf.square(away) * count * share,
        ]

    def update(
        self, merged: Sequence[tf.Tensor], variable_values: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the moving averages, moved by the moments of the mini-batch.

        Without rows they stay. (With a mask Keras' layer moves them by zeros.)
        """
        has_moments = merged[0] + self._epsilon > 0
        return [
            tf.where(
                has_moments,
                tf.cast(
                    tf.cast(average, moment.dtype) * self._momentum
                    + moment * (1.0 - self._momentum),
                    average.dtype,
                ),
                average,
            )
            for average, moment in zip(
                variable_values, self._to_mean_variance(*merged), strict=True
            )
        ]

    def _to_count_mean_squares(self, count: tf.Tensor) -> list[tf.Tensor]:
        """Returns the count, the mean and the sum of squares of distances from it."""
        number = count + self._epsilon
        mean = tf.math.divide_no_nan(self.mean * number, count)
        squares = self.variance * number - count * tf.square(self.mean - mean)
        return [count, mean, squares]

    def _to_mean_variance(
        self, count: tf.Tensor, mean: tf.Tensor, squares: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance as Keras would have taken them."""
        number = count + self._epsilon
        mean_of_keras = tf.math.divide_no_nan(mean * count, number)
        squares += count * tf.square(mean_of_keras - mean)
        return mean_of_keras, tf.math.divide_no_nan(squares, number)


def _all_reduce_moments(
    x: tf.Tensor,
    axis: int,
    axes: Sequence[int],
    count: tf.Tensor,
    replicas: ReplicaGroup,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns count, mean and variance of the rows of all replicas."""
    sums = replicas.all_reduce_sum(
        tf.concat([tf.reduce_sum(x, axes), count[None]], axis=0)
    )
    count = sums[-1]
    mean = tf.math.divide_no_nan(sums[:-1], count)
    away = tf.square(x - _broadcast_along(mean, axis, len(x.shape)))
    squares = replicas.all_reduce_sum(tf.reduce_sum(away, axes))
    return count, mean, tf.math.divide_no_nan(squares, count)


def _broadcast_along(vector: tf.Tensor, axis: int, rank: int) -> tf.Tensor:
    """Returns a vector `[C]` shaped to be broadcast along an axis."""
    shape = [1] * rank
    shape[axis] = -1
    return tf.reshape(vector, shape)
