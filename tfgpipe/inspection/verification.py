"""`tfgpipe.verify`: one training step of a pipeline beside that of plain Keras.

Both begin with the same weights, statistics and seeds, and an optimizer that records
the gradients and changes nothing. Compared are the outputs in inference, the loss, the
gradient of every weight, and every other variable after the step.

A pipeline computes what plain Keras does on the same microbatches one after another.
Where that differs from the whole mini-batch, the calls of the model are run in turn on
both, which finds those that it is due to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import text_table
from tfgpipe.devices import sharding
from tfgpipe.distribution import PipelineStrategy, StageStrategy, current_strategy
from tfgpipe.inspection import model_copies
from tfgpipe.inspection.causes import Cause, find_causes
from tfgpipe.inspection.comparison import TIMES, Comparison, compared
from tfgpipe.inspection.recorded_steps import (
    InMicrobatches,
    Step,
    num_rows,
    recording,
)
from tfgpipe.partition import PipelineConfig
from tfgpipe.pipelined_model import PipelinedModel, pipeline
from tfgpipe.runtime import coupled_layers
from tfgpipe.stage import normalization

# The largest deviation that needs no explanation, by the narrowest type of a layer;
# the distance of numbers in a type, relative to them.
_TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}
_ROUNDING = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
_DRAWS = 3
_MOST_ROWS = 12


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `tfgpipe.verify`. `print` it for a table.

    Attributes:
        model: The model's name.
        num_stages: K.
        num_microbatches: M, of each replica.
        num_replicas: D.
        num_shards: T.
        tolerance: The largest deviation that counts as equal.
        comparisons: Every tensor that was compared.
        by_microbatch: The same, beside plain Keras on the same microbatches one after
            another, with `added_losses="microbatch"`; empty if that was not needed.
        causes: Layers that depend on the microbatches, in the order of the model.
    """

    model: str
    num_stages: int
    num_microbatches: int
    tolerance: float
    comparisons: tuple[Comparison, ...]
    by_microbatch: tuple[Comparison, ...] = ()
    causes: tuple[Cause, ...] = ()
    num_replicas: int = 1
    num_shards: int = 1

    @property
    def is_equal(self) -> bool:
        """True if all is equal to plain Keras on the mini-batch, but for rounding."""
        return all(x.is_within(self.tolerance) for x in self.comparisons)

    @property
    def is_exact(self) -> bool:
        """True if the pipeline computes what plain Keras does on its microbatches."""
        some = self.by_microbatch
        return self.is_equal or (
            bool(some) and all(x.is_within(self.tolerance) for x in some)
        )

    @property
    def verdict(self) -> str:
        """The result in words."""
        M, rounding = self.num_microbatches, f"rounding ({self.tolerance:g})"
        others = [x for x in self.by_microbatch if x.kind != "loss"]
        noise = max((x.rounding for x in others), default=0.0)
        if TIMES * noise > self.tolerance:
            rounding += f", by which {noise:.0e} of a tensor changes in plain Keras"
        if self.is_equal:
            return f"Equal to plain Keras but for {rounding}."
        if self.is_exact:
            D = self.num_replicas
            each = f" of each of {D} replicas" if D > 1 else ""
            return (
                f"Equal, but for {rounding}, to plain Keras on the same {M} "
                f"microbatches{each} one after another;\nnot on the whole mini-batch."
            )
        worst = max(self.by_microbatch, key=lambda x: x.deviation)
        advice = (
            '\nIn float64, by `keras.config.set_floatx("float64")` before the model is '
            "built,\nonly an error is left. Please report it."
        )
        if self.causes and self.causes[-1].why == "compresses":
            advice = ""
        return (
            "DIFFERS from plain Keras, on the same microbatches as well: most in "
            f"{worst.kind} '{worst.name}', by {worst.deviation:.1e}.{advice}"
        )

    def __str__(self) -> str:
        kinds = dict.fromkeys(x.kind for x in self.comparisons)
        header = ["", "tensors", "of plain Keras", "most in"]
        if self.by_microbatch:
            header += ["on microbatches", "most in"]
        rows = []
        for kind in kinds:
            row = [kind, str(sum(x.kind == kind for x in self.comparisons))]
            for some in (self.comparisons, self.by_microbatch):
                own = [x for x in some if x.kind == kind]
                if own:
                    worst = max(own, key=lambda x: x.deviation)
                    row += [f"{worst.deviation:.1e}", worst.name]
            rows.append((*row, *[""] * (len(header) - len(row))))
        left = ("", "most in")
        D, K, T = self.num_replicas, self.num_stages, self.num_shards
        replicas, shards = f"D={D}, " * (D > 1), f"T={T}, " * (T > 1)
        text = [
            f"{self.model}: {replicas}K={K}, {shards}M={self.num_microbatches}, one "
            "training step; largest differences, relative:",
            text_table(tuple(header), rows, left=left),
            self.verdict,
        ]
        if self.causes:
            text += ["Why, in the order of the model:"]
            text += [f"  {cause}" for cause in self.causes[:_MOST_ROWS]]
        if len(self.causes) > _MOST_ROWS:
            text += [f"  and {len(self.causes) - _MOST_ROWS} more"]
        return "\n".join(text)


def verify(
    model: keras.Model | Callable[[], keras.Model],
    batch: tuple[Any, ...],
    *,
    strategy: PipelineStrategy | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Verification:
    """Compares a training step of a pipeline with that of plain Keras.

    Before accelerators are rented: on logical CPUs, which
    `tfgpipe.make_logical_cpus(n)` makes, a pipeline computes the same. `model` stays as
    it is. The plain model is on one device: its sharded layers, as `TPDense`, have one
    shard each.

    Example:

    >>> model = keras.Sequential([keras.Input((8,))])
    >>> for _ in range(4):
    ...     model.add(keras.layers.Dense(8, activation="tanh"))
    >>> model.compile("adam", "mse")
    >>> x = np.ones((8, 8), "float32")
    >>> verified = tfgpipe.verify(model, (x, x), num_stages=2, num_microbatches=4)
    >>> verified.is_equal
    True

    Args:
        model: A Functional or Sequential model that is compiled, or a pipeline of one;
            or a function that returns one, for layers without a `get_config`.
        batch: A mini-batch as a dataset for `fit` has it: `(x, y)` or
            `(x, y, sample_weight)`.
        strategy: Replicas of the pipeline, and how they share state. Defaults to that
            of a pipeline that is given; otherwise to none.
        tolerance: The largest deviation that counts as equal, over the largest entry
            of a tensor. Defaults to 1e-10 in float64, 1e-5 in float32, 2e-2 in float16
            and 0.1 in bfloat16.
        **options: Arguments of `tfgpipe.pipeline`. Default to those of a pipeline that
            is given.

    Raises:
        TypeError: If the model is not compiled, or has a `call` of its own.
        ValueError: If no such pipeline can be built, replicas are in other processes,
            get unequal parts of the mini-batch or have batch statistics in common, or a
            strategy is in scope.
    """
    batch = _checked(batch)
    if isinstance(model, PipelinedModel):
        options = options or vars(model.config)
    over = _strategy_of(model) if strategy is None else strategy
    return _verified(_Copies(model, over, options), over, batch, tolerance)


def _verified(
    copies: _Copies,
    strategy: StageStrategy,
    batch: tuple[Any, ...],
    tolerance: float | None,
) -> Verification:
    """Returns the comparison of copies of a model."""
    plain, fresh = copies.plain(), copies.plain()
    D = _num_replicas(strategy, batch, plain)
    pipelined = copies.pipelined()
    whole, ours = Step.of(plain, batch), Step.of(pipelined, batch)
    result = Verification(
        plain.name,
        num_stages=len(pipelined.stages),
        num_microbatches=pipelined.schedule.num_microbatches,
        tolerance=_TOLERANCES[_computes_in(plain)] if tolerance is None else tolerance,
        comparisons=tuple(compared(ours, whole)),
        num_replicas=D,
        num_shards=sharding.num_shards([pipelined]),
    )
    if result.is_equal:
        return result
    steps = ours, ours
    if coupled_layers(pipelined.pipelined.pipeline, training=True).keys:
        steps = ours, Step.of(copies.pipelined(added_losses="microbatch"), batch)
    return _explained(result, steps, whole, fresh, pipelined, batch)


class _Copies:
    """Copies of a model that keep their gradients, all in its state.

    Args:
        model: A model, a pipeline of one, or a function that returns one.
        strategy: The strategy of pipelines.
        options: Options of pipelines.
    """

    def __init__(
        self, model: Any, strategy: StageStrategy, options: Mapping[str, Any]
    ) -> None:
        self._build = model_copies.compiled_copies(model)
        self._strategy, self._options = strategy, options
        if isinstance(model, PipelinedModel):
            model = model.unpipelined()
        self._source = model if isinstance(model, keras.Model) else self._build()

    def plain(self) -> keras.Model:
        """Returns a copy on one device."""
        return self._filled(model_copies.unsharded(self._build()))

    def pipelined(self, **others: Any) -> PipelinedModel:
        """Returns a pipeline of a copy.

        Args:
            **others: Options that it has in place of these.
        """
        with self._strategy.scope():
            copied = self._filled(self._build())
            return pipeline(copied, **{**self._options, **others})

    def _filled(self, copied: keras.Model) -> keras.Model:
        model_copies.copy_state(self._source, recording(copied))
        return copied


def _checked(batch: Any) -> tuple[Any, ...]:
    """Returns a mini-batch for `fit`.

    Raises:
        ValueError: If it is none, or a strategy is in scope.
    """
    if current_strategy().is_distributed:
        raise ValueError(
            "A pipeline is compared with a model without replicas. Received a call in "
            "the scope of a strategy. Verify outside of it, with `strategy=strategy`."
        )
    if not isinstance(batch, tuple) or not 2 <= len(batch) <= 3:
        raise ValueError(
            "`batch` is a tuple `(x, y)` or `(x, y, sample_weight)`. Received "
            f"{type(batch).__name__}."
        )
    checked: tuple[Any, ...] = _tuples(batch)
    return checked


def _strategy_of(model: Any) -> StageStrategy:
    """Returns the strategy of a pipeline, or one for a pipeline without replicas."""
    own = getattr(model, "distribute_strategy", None)
    return own if isinstance(own, StageStrategy) else current_strategy()


def _num_replicas(
    strategy: StageStrategy, batch: tuple[Any, ...], model: keras.Model
) -> int:
    """Returns D.

    Raises:
        ValueError: If not all replicas are here, some get more of the mini-batch, or
            they have batch statistics in common.
    """
    count, D = num_rows(batch[0]), strategy.mesh.num_replicas
    if strategy.metrics_are_reduced:
        raise ValueError(
            "All replicas are compared in this process. Received a "
            f"{type(strategy).__name__} with others. Use a `tfgpipe.PipelineStrategy` "
            "on logical CPUs."
        )
    if count % D:
        raise ValueError(
            f"Each replica takes as many examples of the mini-batch. Received {count} "
            f"for {D} replicas."
        )
    if D > 1 and normalization.any_synchronized([model]):
        raise ValueError(
            "Each replica is compared with plain Keras on its own examples. Received "
            f"`BatchNormalization(synchronized=True)` and {D} replicas. Verify with "
            "one replica."
        )
    return D


def _explained(
    result: Verification,
    ours: tuple[Step, Step],
    whole: Step,
    fresh: keras.Model,
    pipelined: PipelinedModel,
    batch: tuple[Any, ...],
) -> Verification:
    """Returns a result with the comparison by microbatch, and causes.

    Args:
        result: The result.
        ours: The step of the pipeline, and one with all losses by microbatch.
        whole: The step of plain Keras on the mini-batch.
        fresh: The plain model, which has made no step.
        pipelined: The pipeline.
        batch: The mini-batch.
    """
    cut = {
        "num_microbatches": result.num_microbatches,
        "num_replicas": result.num_replicas,
    }
    causes = find_causes(fresh, batch, **cut, tolerance=result.tolerance)
    plain = InMicrobatches.of(fresh, **cut)
    before = model_copies.values(model_copies.variables(fresh))
    by_microbatch = Step.of(plain, batch)
    off = []
    for seed in range(_DRAWS):
        _round_off(fresh, before, seed)
        each = compared(Step.of(plain, batch), by_microbatch)
        off.append([x.deviation for x in each])

    def beside(step: Step, expected: Step) -> tuple[Comparison, ...]:
        both = zip(compared(step, expected), *off, strict=True)
        return tuple(
            dataclasses.replace(x, rounding=max(x.rounding, *y)) for x, *y in both
        )

    codec, moved = pipelined.config.transfer_dtype, _moved_by_all(pipelined)
    if codec != PipelineConfig(num_microbatches=1).transfer_dtype:
        causes.append(Cause(f"transfer_dtype={codec}", "compresses", math.nan))
    return dataclasses.replace(
        result,
        comparisons=beside(ours[0], whole),
        by_microbatch=tuple(
            x for x in beside(ours[1], by_microbatch) if x.name not in moved
        ),
        causes=tuple(causes),
    )


def _round_off(model: keras.Model, values: Sequence[tf.Tensor], seed: int) -> None:
    """Sets a model's variables to values, the weights to such that are rounded off."""
    draw, error = np.random.default_rng(seed), _ROUNDING[_computes_in(model)]
    variables = model_copies.variables(model)
    for variable, value in zip(variables, values, strict=True):
        if variable.trainable:
            factors = 1 + error * draw.choice((-1.0, 1.0), value.shape)
            value = value * tf.cast(factors, value.dtype)
        variable.assign(value)


def _moved_by_all(pipelined: PipelinedModel) -> set[str]:
    """Returns paths of moving averages that move by all microbatches together."""
    norms = normalization.batch_norms(keras_internals.layers.inner_layers(pipelined))
    usual = PipelineConfig(num_microbatches=1).batch_norm
    if pipelined.config.batch_norm == usual:
        norms = [x for x in norms if isinstance(x, normalization.BatchNormalization)]
    return {x.path for norm in norms for x in norm.non_trainable_variables}


def _tuples(structure: Any) -> Any:
    """Returns a structure with tuples for lists, which a dataset takes for tensors."""
    if isinstance(structure, Mapping):
        return {name: _tuples(x) for name, x in structure.items()}
    if isinstance(structure, list | tuple):
        return tuple(map(_tuples, structure))
    return structure


def _computes_in(model: keras.Model) -> str:
    """Returns the narrowest type that a layer computes in."""
    inner = keras_internals.layers.inner_layers(model)
    computing = [x for x in inner if x.weights and not isinstance(x, keras.Model)]
    types = {x.compute_dtype for x in computing} or {keras.config.floatx()}
    return max(types, key=lambda name: _TOLERANCES[name])
