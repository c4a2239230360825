"""A decoder on some positions: the calls of each stage, on its device.

    tokens     all positions ──▶ embedding ──▶ the newest ──▶ block ──▶ block ──▶ logits
    [B, L]                                                    k, v      k, v      [B, V]
                                                              [B, L, N, H] each

A layer that has a cache is called on all positions once, and stores keys and values.
From then on it is called on the newest position alone, and so is all that comes after
the first of them. What comes before is computed of all positions each time, so layers
that count positions, or number documents, are as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import functions, keras_internals
from tfgpipe.capture import Call, CallGraph, Value
from tfgpipe.runtime import cached_calls
from tfgpipe.runtime.cached_calls import Cache, Positions
from tfgpipe.runtime.pipeline import Pipeline
from tfgpipe.stage import Stage

Values = dict[int, tf.Tensor]
# By stage and call. # [B, L, N, H] each
Caches = list[list[Cache]]


class Decoder:
    """The stages of a pipeline, with the values that their variables have now.

    Args:
        pipeline: The pipeline.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._whole = whole_values(pipeline.captured.graph)
        # By stage and by what they are called on, so that parts of one size share them.
        self._runs: dict[tuple[int, bool, int], Any] = {}
        self._weights = []
        for stage, device in zip(
            pipeline.stages, pipeline.strategy.primary_devices, strict=True
        ):
            with tf.device(device):
                self._weights.append([tf.identity(v.value) for v in stage.variables])

    def logits(self, values: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Returns the logits of the position of a step, `[B, V]`."""
        return values[self._pipeline.captured.graph.output_ids[0]][:, -1]

    def plain(self, tokens: tf.Tensor) -> Values:
        """Returns all values of the model, which stores nothing.

        Args:
            tokens: The tokens. # [B, L]
        """
        return self._run(tokens, Positions(None, tokens.shape[1], stores=False))[0]

    def prefill(self, tokens: tf.Tensor, length: int) -> Caches:
        """Returns the keys and values of all positions.

        Args:
            tokens: The tokens. # [B, T]
            length: L, the number of positions that there will be.
        """
        return self._run(tokens, Positions(None, length))[1]

    def step(
        self, tokens: tf.Tensor, caches: Caches, index: tf.Tensor
    ) -> tuple[Values, Caches]:
        """Returns the values of one position, and all keys and values now.

        Args:
            tokens: The tokens. # [B, L]
            caches: Keys and values.
            index: The position.
        """
        return self._run(tokens, Positions(index, tokens.shape[1]), caches)

    def _run(
        self, tokens: tf.Tensor, positions: Positions, caches: Caches | None = None
    ) -> tuple[Values, Caches]:
        pipeline, stored = self._pipeline, []
        values = _inputs(pipeline, tokens)
        devices = pipeline.strategy.primary_devices
        for k, stage in enumerate(pipeline.stages):
            run = self._stage_run(k, positions)
            given = {i: values[i] for i in stage.segment.input_ids}
            cache = caches[k] if caches else []
            with tf.device(devices[k]), keras_internals.calls.without_autocast():
                found, cache = run(self._weights[k], given, cache, positions.index)
            values |= found
            stored.append(cache)
        return values, stored

    def _stage_run(self, k: int, positions: Positions) -> Any:
        """Returns the function of a stage, compiled where its pipeline compiles."""
        pipeline = self._pipeline
        run = _StageRun(
            pipeline.stages[k], positions.length, positions.stores, self._whole
        )
        device = pipeline.strategy.primary_devices[k]
        if tf.executing_eagerly() or not pipeline.options.on(device).compiles_functions:
            return run
        key = k, positions.index is None, positions.length
        if key not in self._runs:
            # Logits of a prompt are computed only if they are returned.
            later = (x.segment.input_ids for x in pipeline.stages[k + 1 :])
            read = {i for ids in later for i in ids}
            if positions.index is not None:
                read.update(pipeline.captured.graph.output_ids)
            self._runs[key] = functions.compiled(dataclasses.replace(run, read=read))
        return self._runs[key]


def tokens_id(pipeline: Pipeline) -> int:
    """Returns the id of the input that is tokens."""
    specs = pipeline.captured.specs
    ids = pipeline.captured.graph.input_ids
    return next(i for i in ids if not is_padding_mask(specs[i]))


def is_padding_mask(spec: keras.KerasTensor) -> bool:
    """Returns whether an input is the padding mask, as keras-hub names it."""
    return "padding_mask" in spec.name


@dataclasses.dataclass(frozen=True, eq=False)
class _StageRun:
    """The calls of a stage on some positions.

    Attributes:
        stage: The stage.
        length: L, the number of positions that are stored.
        stores: False to call layers as they are.
        whole: Ids of the values that are of all positions even so.
        read: Ids of the values to return; None for all.
    """

    stage: Stage
    length: int
    stores: bool
    whole: frozenset[int]
    read: Collection[int] | None = None

    def __call__(
        self,
        weights: Sequence[tf.Tensor],
        values: Values,
        caches: Sequence[Cache],
        index: tf.Tensor | None,
    ) -> tuple[Values, list[Cache]]:
        """Returns the results of the calls, and all keys and values now.

        Args:
            weights: Values of the stage's variables.
            values: Arguments of the calls.
            caches: Keys and values of earlier positions.
            index: The first position.
        """
        with keras.StatelessScope(
            state_mapping=zip(self.stage.variables, weights, strict=True)
        ):
            values, stored = self._run(dict(values), caches, index)
        if self.read is not None:
            values = {i: x for i, x in values.items() if i in self.read}
        return values, stored

    def _run(
        self, values: Values, caches: Sequence[Cache], index: tf.Tensor | None
    ) -> tuple[Values, list[Cache]]:
        positions = Positions(index, self.length, self.stores)
        stored: list[Cache] = []
        for call in self.stage.segment.calls:
            args, kwargs = self._arguments(call, values, index)
            if positions.stores and cached_calls.has_cache(call):
                cache = caches[len(stored)] if caches else []
                outputs, cache = cached_calls.run(call, args, kwargs, positions, cache)
                stored.append(cache)
            else:
                outputs = call.layer(*args, **kwargs)
            values.update(
                zip(call.output_ids, keras.tree.flatten(outputs), strict=True)
            )
        return values, stored

    def _arguments(
        self, call: Call, values: Mapping[int, tf.Tensor], index: tf.Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_whole = self.whole.issuperset(call.output_ids)

        def of(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            x = values[leaf.id]
            if is_whole or leaf.id not in self.whole:
                return x
            return _at(x, index)

        args, kwargs = keras.tree.map_structure(of, (call.args, dict(call.kwargs)))
        if isinstance(call.layer, keras.layers.Layer):
            kwargs["training"] = False
        return args, kwargs


def _at(x: tf.Tensor, index: tf.Tensor | None) -> tf.Tensor:
    """Returns the position at an index of what is `[B, L, ...]`, as `[B, 1, ...]`.

    Numbers of positions, such as ids and masks, stay whole: attention compares them.
    """
    if index is None or not x.dtype.is_floating or x.shape.rank < 3:
        return x
    return tf.gather(x, index[None], axis=1)


def _inputs(pipeline: Pipeline, tokens: tf.Tensor) -> Values:
    """Returns the inputs of a model for tokens that are all to be looked at."""
    captured, chosen = pipeline.captured, tokens_id(pipeline)
    values = {}
    for i in captured.graph.input_ids:
        given = tokens if i == chosen else tf.ones_like(tokens)
        values[i] = tf.cast(given, captured.specs[i].dtype)
    return values


def whole_values(graph: CallGraph) -> frozenset[int]:
    """Returns ids of the values that are computed of all positions each time."""
    whole = set(graph.input_ids)
    for call in graph.calls:
        if not cached_calls.has_cache(call) and whole.issuperset(call.input_ids):
            whole.update(call.output_ids)
    return frozenset(whole)
