"""Gradient accumulation: weight gradients summed over the microbatches of a step.

Three forms, by what is fastest and takes no more memory than an accumulator:

* **Nothing to sum.** A step of one microbatch has its gradients at once.
* **In place.** Each microbatch adds its gradient to the accumulator's own buffer.
* **Deferred.** The gradient of a dense kernel is a matrix product, `x^T @ dy`, and
  the sum of products is the product of the stacked rows:

      x1^T dy1 + x2^T dy2 + ... = [x1; x2; ...]^T [dy1; dy2; ...]

  Where x and dy of a mini-batch take no more memory than the kernel, each microbatch
  only stores its own, and one product at the end replaces M, at the rate of
  a large one, and without M additions as large as the kernel.

XLA has no in-place operation, and decides itself what to update in place. So on TPUs,
where it compiles the addition as well, gradients are added as usual.

A weight that was indexed, as an embedding, has as gradient some of its rows, and only
these are added. Not on GPUs: there the host would wait to know how many different rows
there are. Instead the rows are first summed into a tensor as large as the weight, which
takes that much more memory for the time of one function.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfgpipe.devices import sharding, small_functions
from tfgpipe.graph import joint_graph, passes
from tfgpipe.stage.options import StageOptions


class GradientAccumulation:
    """Accumulates the weight gradients of a stage.

    Accumulators are a list of tensors, in buffers that are written in place: one for
    each added gradient, then the stacked rows of deferred ones. With one microbatch
    there are no accumulators before it, and the gradients after it.

    Args:
        trace: The stage.
        options: Its options.

    Attributes:
        addend_names: Names of a microbatch's tensors that are stacked or added.
        is_final: True if the accumulators are the gradients, so `finalize` does
            nothing.
    """

    def __init__(self, trace: joint_graph.JointGraph, options: StageOptions) -> None:
        self._platform = options.platform
        self._is_sharded = trace.is_sharded
        num_microbatches = options.num_microbatches
        self._terms = [
            _WeightGradient(
                trace.spec(name), gradient, trace.shard_indices.get(name, 0)
            )
            for name, gradient in zip(
                trace.given.weights, trace.backward.weight_grads, strict=True
            )
            if gradient is not None
        ]
        self._single_microbatch = num_microbatches == 1
        self._stacked: dict[str, tf.TensorSpec] = {}
        self._deferred: set[joint_graph.GradientNames] = set()
        if num_microbatches is not None and not self._single_microbatch:
            for term in self._terms:
                rows = _stacked_specs(
                    trace, term.weight, term.gradient, num_microbatches
                )
                self._stacked.update(rows)
                self._deferred.update({term.gradient} if rows else ())
        self._added = [t for t in self._terms if t.gradient not in self._deferred]
        added = [name for term in self._added for name in term.gradient.names]
        self.addend_names = tuple(dict.fromkeys((*added, *self._stacked)))
        finalized = any(gradient.finalized for gradient in self.gradients)
        self.is_final = not (self._deferred or finalized)
        # Accumulators of shards are on their devices, stacked rows where they are made.
        self._shard_indices = [term.shard for term in self._added]
        self._shard_indices += [trace.shard_index(name) for name in self._stacked]
        self._shard_indices += [0] if self._stacked else []  # Their count.

    @property
    def gradients(self) -> list[joint_graph.GradientNames]:
        """Names of the gradients whose sums `finalize` returns."""
        return [term.gradient for term in self._terms]

    @functools.cached_property
    def specs(self) -> list[tf.TensorSpec]:
        """Shapes and dtypes of the accumulators."""
        if self._single_microbatch:
            return []
        count = [tf.TensorSpec([1], tf.int32)] if self._stacked else []
        added = (term.weight for term in self._added)
        return [*added, *self._stacked.values(), *count]

    def begin(self, devices: Sequence[str] = ()) -> list[tf.Tensor]:
        """Returns the accumulators before the first microbatch.

        Args:
            devices: Devices of the shards; empty for the current device.
        """
        sums = []
        for spec, shard in zip(self.specs, self._shard_indices, strict=False):
            sums.append(
                small_functions.run_on(devices[shard], joint_graph.zero_buffer, spec)
                if devices
                else joint_graph.zero_buffer(spec)
            )
        return sums

    def add(
        self, sums: Sequence[tf.Tensor], values: Mapping[str, tf.Tensor]
    ) -> list[tf.Tensor]:
        """Adds the gradients of a microbatch.

        Args:
            sums: Sums over the microbatches before.
            values: The tensors of this one in `addend_names`.
        """
        if self._single_microbatch:
            return [self._single(term, values) for term in self._terms]
        add = self._adder()
        added = [
            add(total, term, values)
            for total, term in zip(sums, self._added, strict=False)
        ]
        if not self._stacked:
            return added
        *stacked, count = sums[len(added) :]
        shards = self._shard_indices[len(added) :]
        for i, (name, shard) in enumerate(zip(self._stacked, shards, strict=False)):
            with sharding.shard_scope(shard):
                stacked[i] = _stack_rows(stacked[i], values[name], count)
        # Not in place: whatever stacks rows has to see the count before.
        return [*added, *stacked, count + 1]

    def skip_empty(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Leaves the accumulators as they are: the microbatch is empty."""
        if self._single_microbatch:
            weights = [term.weight for term in self._terms]
            return [tf.zeros(weight.shape, weight.dtype) for weight in weights]
        return list(sums)

    def _single(
        self, term: _WeightGradient, values: Mapping[str, tf.Tensor]
    ) -> tf.Tensor:
        """Returns the gradient of a single microbatch, which is the sum.

        It is not added to zeros in a buffer, which would make the function stateful:
        TensorFlow runs such functions of replicas one after the other.
        """
        if term.gradient.indices is None:
            return values[term.gradient.values]
        with sharding.shard_scope(term.shard):
            rows, value = term.rows(values)
            return tf.math.unsorted_segment_sum(value, rows, term.weight.shape[0])

    def _adder(self) -> _Adder:
        if self._platform == "tpu":
            return _Adder()
        return _InPlaceAdder(
            on_gpu=self._platform == "gpu", is_sharded=self._is_sharded
        )

    def finalize(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the final gradients, after the last microbatch."""
        added = iter(sums)
        rows = dict(zip(self._stacked, sums[len(self._added) :], strict=False))
        gradients = []
        for term in self._terms:
            if term.gradient in self._deferred:
                with sharding.shard_scope(term.shard):
                    x, dy = (
                        _flatten_stacked(rows[name]) for name in term.gradient.factors
                    )
                    product = passes.multiply(x, dy, transpose_a=True)
                    gradients.append(tf.reshape(product, term.weight.shape))
            else:
                gradients.append(next(added))
        return gradients


@dataclasses.dataclass(frozen=True)
class _WeightGradient:
    """A gradient to sum.

    Attributes:
        weight: Shape and type of the weight, and of the sum.
        gradient: The gradient.
        shard: The shard whose device holds the weight.
    """

    weight: tf.TensorSpec
    gradient: joint_graph.GradientNames
    shard: int

    def rows(self, values: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the indices `[n]` and the rows `[n, ...]` of a microbatch."""
        assert self.gradient.indices is not None
        indices = values[self.gradient.indices]
        if indices.shape.rank != 1:  # GPUs have the host reshape integers.
            indices = tf.reshape(indices, [-1])
        rows = values[self.gradient.values]
        return indices, tf.reshape(rows, [-1, *self.weight.shape[1:]])


class _Adder:
    """Adds gradients of a microbatch, in one function."""

    def __call__(
        self,
        total: tf.Tensor,
        term: _WeightGradient,
        values: Mapping[str, tf.Tensor],
    ) -> tf.Tensor:
        """Returns an accumulator plus a gradient."""
        with sharding.shard_scope(term.shard):
            if term.gradient.indices is None:
                return self.add(total, values[term.gradient.values], term.shard)
            return self.add_rows(total, *term.rows(values), term.shard)

    def add(self, total: tf.Tensor, value: tf.Tensor, shard: int) -> tf.Tensor:
        """Adds a dense gradient."""
        del shard
        return total + value

    def add_rows(
        self, total: tf.Tensor, rows: tf.Tensor, value: tf.Tensor, shard: int
    ) -> tf.Tensor:
        """Adds rows of a gradient; several may be of one row of the weight."""
        del shard
        return tf.tensor_scatter_nd_add(total, rows[:, None], value)


class _InPlaceAdder(_Adder):
    """Adds gradients to the accumulators' own buffers.

    A function's argument is never the only reference to its buffer, so `acc + g` would
    allocate a second one, and fault its pages in, for every weight and microbatch.
    """

    def __init__(self, *, on_gpu: bool, is_sharded: bool) -> None:
        self._on_gpu = on_gpu
        self._is_sharded = is_sharded
        self._indices: dict[int, tf.Tensor] = {}

    def add(self, total: tf.Tensor, value: tf.Tensor, shard: int) -> tf.Tensor:
        added = tf.raw_ops.InplaceAdd(
            x=tf.reshape(total, [1, -1]),
            i=self._index(shard),
            v=tf.reshape(value, [1, -1]),
        )
        return tf.reshape(added, total.shape)

    def add_rows(
        self, total: tf.Tensor, rows: tf.Tensor, value: tf.Tensor, shard: int
    ) -> tf.Tensor:
        if self._on_gpu:
            whole = tf.math.unsorted_segment_sum(value, rows, total.shape[0])
            return self.add(total, whole, shard)
        # Each row once: additions to one row might overtake one another.
        rows, where = tf.unique(rows)
        value = tf.math.unsorted_segment_sum(value, where, tf.size(rows))
        return tf.raw_ops.InplaceAdd(x=total, i=tf.cast(rows, tf.int32), v=value)

    def _index(self, shard: int) -> tf.Tensor:
        """Returns the index of the only row, one tensor for all gradients of a shard.

        A constant of integers is in the memory of the host, and GPUs take the index in
        theirs, where `zero_buffer` makes one. But a function in shards is several, and
        what one hands to another is in the memory of the host as well; each has
        constants of its own.
        """
        if shard not in self._indices:
            self._indices[shard] = (
                joint_graph.zero_buffer(tf.TensorSpec([1], tf.int32))
                if self._on_gpu and not self._is_sharded
                else tf.constant([0])
            )
        return self._indices[shard]


def _refuse_second_order(operation: tf.Operation, *gradients: tf.Tensor) -> None:
    """Has a gradient of accumulated gradients say what TensorFlow cannot know."""
    del gradients
    raise LookupError(
        "A pipeline adds up the gradients of its weights in place, so they have no "
        "gradients themselves. Received a tape around the gradient of another, as for "
        f"a penalty of gradients, which reaches an {operation.type}. Compute it with "
        "the plain model, `unpipelined()`, whose weights are the same."
    )


for _type in ("InplaceAdd", "InplaceUpdate"):
    tf.RegisterGradient(_type)(_refuse_second_order)


def _stacked_specs(
    trace: joint_graph.JointGraph,
    weight: tf.TensorSpec,
    gradient: joint_graph.GradientNames,
    num_microbatches: int,
) -> dict[str, tf.TensorSpec]:
    """Returns the specs `[M, rows, width]` to stack if a gradient is to be deferred.

    It is deferred if that takes no more memory than its accumulator.
    """
    specs = {name: trace.spec(name) for name in gradient.factors}
    if not specs or not all(s.shape.is_fully_defined() for s in specs.values()):
        return {}
    stacked = {
        name: tf.TensorSpec([num_microbatches, *spec.shape], spec.dtype)
        for name, spec in specs.items()
    }
    num_entries = sum(math.prod(spec.shape) for spec in stacked.values())
    return stacked if num_entries <= math.prod(weight.shape) else {}


def _stack_rows(stacked: tf.Tensor, rows: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Writes the rows of the next microbatch into the stack."""
    return tf.raw_ops.InplaceUpdate(x=stacked, i=count, v=tf.expand_dims(rows, 0))


def _flatten_stacked(stacked: tf.Tensor) -> tf.Tensor:
    """Returns the rows of all microbatches, `[M * rows, width]`."""
    return tf.reshape(stacked, [-1, stacked.shape[-1]])
