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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import text_table
from tfgpipe.capture import (
    CallGraph,
    Interpreter,
    TensorKey,
    TracingScope,
    layer_variables,
    source_model,
)
from tfgpipe.distribution import current_strategy
from tfgpipe.inspection import model_copies
from tfgpipe.partition import PipelineConfig
from tfgpipe.pipelined_model import PipelinedModel, pipeline
from tfgpipe.runtime import coupled_layers
from tfgpipe.stage import normalization

# The largest deviation that needs no explanation, by the narrowest type of a layer;
# the distance of numbers in a type, relative to them.
_TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}
_ROUNDING = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
# Deviations that such an error of the weights explains, as there is one in every sum.
_TIMES = 8.0
_DRAWS = 3
# Of float16: so small that few gradients overflow.
_LOSS_SCALE = 1024.0
# A tensor counts as no smaller than that part of the largest of its kind: of a gradient
# that is zero but for rounding, nothing is left to compare.
_LEAST = 1e-2
_MOST_ROWS = 12


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A tensor of the pipeline beside that of plain Keras.

    Attributes:
        kind: `"output"`, `"loss"`, `"gradient"` or `"state"`.
        name: Name of the output, or path of the variable.
        deviation: The largest difference of an entry, over the largest entry of plain
            Keras'.
        rounding: The deviation of plain Keras if its weights are off by a rounding; 0
            if that was not needed.
    """

    kind: str
    name: str
    deviation: float
    rounding: float = 0.0

    def is_within(self, tolerance: float) -> bool:
        """Returns whether rounding explains the deviation."""
        return self.deviation <= max(tolerance, _TIMES * self.rounding)


@dataclasses.dataclass(frozen=True)
class Cause:
    """A layer whose results depend on the microbatches, in plain Keras as well.

    Attributes:
        layer: Its name, or that of an option of the pipeline.
        why: `"draws random numbers"`, `"mixes examples"`, `"moves statistics"`,
            or `"compresses"`.
        deviation: The largest of its outputs, or statistics, on the same inputs; NaN
            where they are not compared.
    """

    layer: str
    why: str
    deviation: float

    def __str__(self) -> str:
        explained = {
            "draws random numbers": "draws its random numbers for each microbatch",
            "mixes examples": "computes from the examples of a microbatch together",
            "moves statistics": "moves its statistics once a microbatch",
            "compresses": "changes what is sent between stages",
        }
        how_much = "" if math.isnan(self.deviation) else f" ({self.deviation:.1e})"
        return f"{self.layer} {explained[self.why]}{how_much}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `tfgpipe.verify`. `print` it for a table.

    Attributes:
        model: The model's name.
        num_stages: K.
        num_microbatches: M.
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
        noise = max((x.rounding for x in self.by_microbatch), default=0.0)
        if _TIMES * noise > self.tolerance:
            rounding += f", by which {noise:.0e} of a tensor changes in plain Keras"
        if self.is_equal:
            return f"Equal to plain Keras but for {rounding}."
        if self.is_exact:
            return (
                f"Equal, but for {rounding}, to plain Keras on the same {M} "
                "microbatches one after another;\nnot on the whole mini-batch."
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
        text = [
            f"{self.model}: K={self.num_stages}, M={self.num_microbatches}, one "
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
    tolerance: float | None = None,
    **options: Any,
) -> Verification:
    """Compares a training step of a pipeline with that of plain Keras.

    Before accelerators are rented: on logical CPUs, which
    `tfgpipe.make_logical_cpus(n)` makes, a pipeline computes the same. `model` stays as
    it is.

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
        tolerance: The largest deviation that counts as equal, over the largest entry
            of a tensor. Defaults to 1e-10 in float64, 1e-5 in float32, 2e-2 in float16
            and 0.1 in bfloat16.
        **options: Arguments of `tfgpipe.pipeline`. Default to those of a pipeline that
            is given.

    Raises:
        TypeError: If the model is not compiled, or has a `call` of its own.
        ValueError: If no such pipeline can be built. Under a strategy of replicas.
    """
    batch = _checked(batch)
    if isinstance(model, PipelinedModel) and not options:
        options = vars(model.config)
    plain, pieces, copied = _recording_copies(model)
    pipelined = pipeline(copied, **options)
    M = pipelined.schedule.num_microbatches
    if tolerance is None:
        tolerance = _TOLERANCES[_computes_in(copied)]
    whole, ours = _Step.of(plain, batch), _Step.of(pipelined, batch)
    compared, K = tuple(_compared(ours, whole)), len(pipelined.stages)
    result = Verification(plain.name, K, M, tolerance, compared)
    if result.is_equal:
        return result
    steps = ours, ours
    if coupled_layers(pipelined.pipelined.pipeline, training=True).keys:
        steps = ours, _by_microbatch(model, pieces, batch, options)
    return _explained(result, steps, whole, pieces, pipelined, batch)


def _by_microbatch(
    model: Any, like: keras.Model, batch: tuple[Any, ...], options: Mapping[str, Any]
) -> _Step:
    """Returns the step of a pipeline that takes all losses by microbatch.

    Args:
        model: The model, or a function that returns it.
        like: A model with the weights and state that it is to begin with.
        batch: The mini-batch.
        options: Options of the pipeline.
    """
    made = _recording(model_copies.compiled_copies(model)())
    model_copies.copy_state(like, made)
    return _Step.of(pipeline(made, **{**options, "added_losses": "microbatch"}), batch)


def _checked(batch: Any) -> tuple[Any, ...]:
    """Returns a mini-batch for a dataset.

    Raises:
        ValueError: If it is none, or there is a strategy of replicas.
    """
    if current_strategy().is_distributed:
        raise ValueError(
            "A pipeline without replicas is compared. Received a call in the scope of "
            "a strategy. Verify outside of it."
        )
    if not isinstance(batch, tuple) or not 2 <= len(batch) <= 3:
        raise ValueError(
            "`batch` is a tuple `(x, y)` or `(x, y, sample_weight)`. Received "
            f"{type(batch).__name__}."
        )
    checked: tuple[Any, ...] = _tuples(batch)
    return checked


def _explained(
    result: Verification,
    ours: tuple[_Step, _Step],
    whole: _Step,
    pieces: keras.Model,
    pipelined: PipelinedModel,
    batch: tuple[Any, ...],
) -> Verification:
    """Returns a result with the comparison by microbatch, and causes.

    Args:
        result: The result.
        ours: The step of the pipeline, and one with all losses by microbatch.
        whole: The step of plain Keras on the mini-batch.
        pieces: The plain model, which has made no step.
        pipelined: The pipeline.
        batch: The mini-batch.
    """
    M, tolerance = result.num_microbatches, result.tolerance
    causes = _causes(pieces, batch, M, tolerance)
    plain = _InMicrobatches.of(pieces, M)
    before = [tf.identity(x.value) for x in model_copies.state(pieces)]
    by_microbatch = _Step.of(plain, batch)
    off = []
    for seed in range(_DRAWS):
        _round_off(pieces, before, seed)
        each = _compared(_Step.of(plain, batch), by_microbatch)
        off.append([x.deviation for x in each])

    def beside(step: _Step, expected: _Step) -> tuple[Comparison, ...]:
        both = zip(_compared(step, expected), *off, strict=True)
        return tuple(dataclasses.replace(x, rounding=max(y)) for x, *y in both)

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
    for variable, value in zip(model_copies.state(model), values, strict=True):
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


class _Recorder(keras.optimizers.Optimizer):
    """An optimizer that keeps the gradients, and changes no weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"learning_rate": 0.0, "name": "recorder", **options})

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes a place for each gradient."""
        super().build(variables)
        self.gradients = [
            self.add_variable_from_reference(variable, name="gradient")
            for variable in variables
        ]

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: Any
    ) -> None:
        """Keeps a gradient."""
        del learning_rate
        kept = self.gradients[keras_internals.optimizers.variable_index(self, variable)]
        self.assign(kept, tf.convert_to_tensor(gradient))


def _recording_copies(model: Any) -> list[keras.Model]:
    """Returns three copies of a model that record their gradients, in one state."""
    build = model_copies.compiled_copies(model)
    copies = [_recording(build()) for _ in range(3)]
    source = copies[0]
    if isinstance(model, keras.Model):
        source = model.unpipelined() if isinstance(model, PipelinedModel) else model
    for each in copies:
        if each is not source:
            model_copies.copy_state(source, each)
    return copies


def _recording(model: keras.Model) -> keras.Model:
    """Returns a model after compiling it anew, to record its gradients."""
    arguments = keras_internals.compiled.compile_arguments(model)
    recorder: keras.optimizers.Optimizer = _Recorder()
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        recorder = keras.optimizers.LossScaleOptimizer(recorder, _LOSS_SCALE)
    others = {"metrics": None, "weighted_metrics": None, "steps_per_execution": 1}
    model.compile(**{**arguments, **others, "optimizer": recorder})
    return model


class _InMicrobatches(keras.Model):
    """Plain Keras on a mini-batch that it takes in microbatches.

    Args:
        model: The model.
        num_microbatches: M.
    """

    def __init__(self, model: keras.Model, num_microbatches: int) -> None:
        super().__init__(name=model.name)
        self.model, self.num_microbatches = model, num_microbatches

    @classmethod
    def of(cls, model: keras.Model, num_microbatches: int) -> keras.Model:
        """Returns a model that is compiled like the one that it is of."""
        made = cls(model, num_microbatches)
        made.compile(**keras_internals.compiled.compile_arguments(model))
        return made

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the outputs of all rows."""
        flat, made = keras.tree.flatten(inputs), []
        for rows in _microbatches(_num_rows(inputs), self.num_microbatches):
            piece = [None if x is None else x[rows] for x in flat]
            x = keras.tree.pack_sequence_as(inputs, piece)
            made.append(self.model(x, training=bool(training)))
        return keras.tree.map_structure(lambda *x: tf.concat(x, axis=0), *made)

    @property
    def losses(self) -> list[tf.Tensor]:
        """The losses that layers add, the mean over microbatches of each."""
        added = super().losses
        of_weights = sum(x.regularizer is not None for x in self.trainable_variables)
        count = len(added) - of_weights
        means = [loss / self.num_microbatches for loss in added[:count]]
        return [*means, *added[count:]]


def _num_rows(inputs: Any) -> int:
    """Returns the number of examples of a mini-batch."""
    return next(x for x in keras.tree.flatten(inputs) if x is not None).shape[0]


def _microbatches(num_rows: int, num_microbatches: int) -> list[slice]:
    """Returns the rows of each microbatch that has some."""
    cut = np.array_split(np.arange(num_rows), num_microbatches)
    return [slice(rows[0], rows[-1] + 1) for rows in cut if rows.size]


@dataclasses.dataclass(frozen=True)
class _Step:
    """The results of a model for a mini-batch.

    Attributes:
        outputs: Its outputs in inference, by name.
        loss: The loss of a training step.
        gradients: The gradient of each weight, by path.
        state: The value of every other variable after the step.
    """

    outputs: Mapping[str, np.ndarray]
    loss: float
    gradients: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, model: keras.Model, batch: tuple[Any, ...]) -> _Step:
        """Runs a model."""
        outputs = keras.tree.flatten(
            model.predict(batch[0], _num_rows(batch[0]), verbose=0)
        )
        data = tf.data.Dataset.from_tensors(batch)
        history = model.fit(data, verbose=0, shuffle=False).history
        trained = {id(x) for x in model.trainable_variables}
        kept = keras_internals.optimizers.optimizer_slots(model.optimizer)
        if not int(keras.ops.convert_to_numpy(_recorder(model).iterations)):
            raise ValueError(
                "Gradients are compared. Received a model in float16, one of whose "
                "gradients is not finite, so that its optimizer skips the step. Verify "
                "it in float32 or bfloat16."
            )
        return cls(
            {f"output {i}": _array(x) for i, x in enumerate(outputs)},
            float(history["loss"][0]),
            {x.path: _array(kept[x][0]) for x in model.trainable_variables},
            {
                x.path: _array(x)
                for x in model_copies.state(model)
                if id(x) not in trained
            },
        )


def _recorder(model: keras.Model) -> _Recorder:
    """Returns the optimizer that records, which may be inside another."""
    found: _Recorder = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return found


def _array(values: Any) -> np.ndarray:
    """Returns values in the widest type of their kind."""
    array = keras.ops.convert_to_numpy(values)
    return array if array.dtype.kind in "iub" else array.astype("float64")


def _compared(ours: _Step, plain: _Step) -> Iterator[Comparison]:
    """Yields each tensor of one step beside that of another, in the same order."""
    for kind, name in (
        ("output", "outputs"),
        ("gradient", "gradients"),
        ("state", "state"),
    ):
        mine, theirs = getattr(ours, name), getattr(plain, name)
        floats = [x for x in theirs.values() if x.dtype.kind not in "iub"]
        most = max(map(_size, floats), default=0.0)
        pairs = zip(mine.values(), theirs.items(), strict=True)
        for value, (path, expected) in pairs:
            yield Comparison(kind, path, _deviation(value, expected, _LEAST * most))
        if kind == "output":
            yield Comparison("loss", "loss", _relative(ours, plain))


def _size(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _deviation(values: Any, expected: Any, least: float = 0.0) -> float:
    """Returns the largest difference, over the largest entry that is expected."""
    values, expected = np.asarray(values), np.asarray(expected)
    if values.shape != expected.shape:
        return float("inf")
    if values.dtype.kind in "iub":
        return float(not np.array_equal(values, expected))
    scale = max(_size(expected), least) or 1.0
    difference = np.abs(values.astype("float64") - expected)
    same = np.isnan(values) & np.isnan(expected) | (values == expected)
    return float(np.max(np.where(same, 0.0, difference), initial=0.0)) / scale


def _relative(ours: _Step, plain: _Step) -> float:
    return _deviation(np.float64(ours.loss), np.float64(plain.loss))


def _computes_in(model: keras.Model) -> str:
    """Returns the narrowest type that a layer computes in."""
    inner = keras_internals.layers.inner_layers(model)
    computing = [x for x in inner if x.weights and not isinstance(x, keras.Model)]
    types = {x.compute_dtype for x in computing} or {keras.config.floatx()}
    return max(types, key=lambda name: _TOLERANCES[name])


def _causes(
    model: keras.Model, batch: tuple[Any, ...], num_microbatches: int, tolerance: float
) -> list[Cause]:
    """Returns the layers whose results depend on the microbatches.

    Each call is run on the same inputs, those of the mini-batch, at once and one
    microbatch after another.
    """
    source = source_model.make_source(model)
    captured = source.capture(source.inputs, {})
    inputs = source.flatten_inputs(captured, batch[0], {}).values()
    values: dict[TensorKey, tf.Tensor] = {
        TensorKey(number): tf.convert_to_tensor(x)
        for number, x in zip(captured.graph.input_ids, inputs, strict=True)
        if x is not None
    }
    rows = _microbatches(_num_rows(batch[0]), num_microbatches)
    known = {id(x): x.value for x in model_copies.state(model)}
    causes: dict[str, Cause] = {}
    for i, call in enumerate(captured.graph.calls):
        one = _OneCall(captured.graph, i)
        given = {key: values[key] for key in values if key.value_id in call.input_ids}
        whole, after = one.run(given, known)
        before, made = known, []
        for some in rows:
            piece = {key: x[some] for key, x in given.items()}
            results, before = one.run(piece, before)
            made.append(results)
        joined = {
            key: tf.concat([x[key] for x in made], axis=0)
            for key in whole
            if made[0][key].shape.rank
        }
        output = max(
            (_deviation(x, whole[key]) for key, x in joined.items()), default=0
        )
        moved = max((_deviation(before[v], after[v]) for v in after), default=0.0)
        why = _why(call.layer, output > tolerance, moved > tolerance)
        if why is not None:
            name = call.layer.name
            causes.setdefault(name, Cause(name, why, output or moved))
        values |= whole
        known = {**known, **after}
    return list(causes.values())


def _why(layer: Any, differs: bool, moves: bool) -> str | None:
    """Returns the reason for which results of a layer depend on the microbatches."""
    draws = bool(keras_internals.layers.seed_states(layer))
    if differs:
        return "draws random numbers" if draws else "mixes examples"
    return "moves statistics" if moves and not draws else None


class _OneCall:
    """A call of a model, to be run by itself."""

    def __init__(self, graph: CallGraph, index: int) -> None:
        self._segment = graph.segment(slice(index, index + 1))
        trained, others = layer_variables(self._segment.layers)
        self._variables, self._others = [*trained, *others], others

    def run(
        self, given: Mapping[TensorKey, tf.Tensor], known: Mapping[int, tf.Tensor]
    ) -> tuple[dict[TensorKey, tf.Tensor], dict[int, tf.Tensor]]:
        """Returns its outputs, and the values of other variables than weights."""
        interpreter = Interpreter(self._segment, list(given), training=True)
        pairs = [(v, known.get(id(v), v.value)) for v in self._variables]
        with TracingScope(pairs, None) as scope:
            made = interpreter.run(list(given.values()))
        outputs = {key: x for key, x in made.items() if x is not None}
        return outputs, {id(v): scope.get_current_value(v) for v in self._others}
