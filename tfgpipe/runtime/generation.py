"""Generation: tokens one after another, with what attention needs of those before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpipe._compat.keras_internals import calls as keras_calls
from tfgpipe._util import stage_spans
from tfgpipe.runtime.decoder import (
    Caches,
    Decoder,
    is_padding_mask,
    tokens_id,
    whole_values,
)
from tfgpipe.runtime.pipeline import Pipeline

# From logits to tokens. # [B, V] to [B]
Sampler = Callable[[tf.Tensor], tf.Tensor]
_MANTISSA_BITS = {tf.bfloat16: 7, tf.float16: 10, tf.float32: 23, tf.float64: 52}
# Prompts of so many more tokens share a function.
_BUCKET = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Generator:
    """Generates tokens with the stages of a pipeline.

    Attributes:
        pipeline: A pipeline of a decoder: a model of `[B, L]` tokens, and maybe their
            padding mask, with logits `[B, L, V]`, in which no position sees a later.

    Raises:
        ValueError: If the model has other inputs or outputs, stores nothing, or has
            replicas, or if a position by itself, with what is stored of those before,
            has other values than among all.
    """

    pipeline: Pipeline
    _functions: dict[Hashable, Any] = dataclasses.field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        _check_model(self.pipeline)
        _check_positions(self.pipeline)

    def generate(
        self,
        prompts: Any,
        *,
        max_length: int | None,
        sampler: Any,
        stop_token_ids: Sequence[int] | None,
        preprocessor: Any,
        num_microbatches: int,
    ) -> Any:
        """Returns prompts with what comes after them: see `PipelinedModel.generate`.

        Args:
            prompts: Lists of tokens; with a preprocessor what it takes.
            max_length: L, or None.
            sampler: The sampler.
            stop_token_ids: Tokens that end an example, or None.
            preprocessor: A preprocessor of keras-hub, or None.
            num_microbatches: Number of parts of the mini-batch.

        Raises:
            ValueError: If the prompts, their length or the sampler are not such.
        """
        length = self._length_for(max_length)
        if preprocessor is not None:
            made = preprocessor.generate_preprocess(prompts, sequence_length=length)
            tokens, given = (np.asarray(made[x]) for x in ("token_ids", "padding_mask"))
            if stop_token_ids is None:
                stop_token_ids = (preprocessor.tokenizer.end_token_id,)
        elif length is None:
            raise ValueError(
                "A model of any length needs `max_length`, the number of positions of "
                "prompt and answer. Received None."
            )
        else:
            tokens, given = _tokens_of(prompts, length)
        stops = tuple(stop_token_ids or ())
        tokens = self._function(given, sampler, stops, num_microbatches)(tokens, given)
        is_stop = np.isin(tokens, stops) & ~given
        is_after = np.cumsum(is_stop, axis=1) - is_stop > 0
        if preprocessor is None:
            return np.where(is_after, 0, tokens)
        return preprocessor.generate_postprocess(
            {"token_ids": tokens, "padding_mask": ~is_after}
        )

    def _length_for(self, max_length: int | None) -> int | None:
        known = _length(self.pipeline)
        if known is not None and max_length not in (None, known):
            raise ValueError(
                "`max_length` is the number of positions of prompt and answer. "
                f"Received {max_length} for a model of length {known}. Leave it out."
            )
        return known or max_length

    def _function(
        self,
        given: np.ndarray,
        sampler: Any,
        stops: tuple[int, ...],
        num_microbatches: int,
    ) -> Callable[..., tf.Tensor]:
        """Returns the function for such prompts, which is traced once."""
        rows, length = given.shape
        longest = -(-given.sum(axis=1).max() // _BUCKET) * _BUCKET
        run = _Loop(
            self.pipeline,
            _sampler_of(sampler),
            stops,
            min(num_microbatches, rows),
            _length(self.pipeline) or min(length, int(longest)),
        )
        # The sampler is kept, so that no other has its id.
        key = rows, length, id(sampler), run.stops, run.num_microbatches, run.prefill
        made = self._functions.setdefault(
            key, (sampler, tf.function(run, autograph=False))
        )
        return made[1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Loop:
    """The loop over positions.

    All examples go on from the first position that one of them lacks, until each has a
    stop or there is no position left. A microbatch goes through the stages while others
    do; the tokens of all are chosen together, as of a mini-batch that is whole.

    Attributes:
        pipeline: The pipeline.
        sampler: Function from the logits of a position to tokens.
        stops: Tokens that end an example.
        num_microbatches: Number of parts of the mini-batch.
        prefill: Number of positions that are computed at once, before the loop.
    """

    pipeline: Pipeline
    sampler: Sampler
    stops: tuple[int, ...]
    num_microbatches: int
    prefill: int

    def __call__(self, tokens: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
        """Returns tokens in the place of those that are not given.

        Args:
            tokens: Tokens. # [B, L]
            given: A mask of those that are given. # [B, L]
        """
        decoder, (rows, length) = Decoder(self.pipeline), tokens.shape
        parts = np.array_split(range(rows), self.num_microbatches)
        spans = stage_spans([len(part) for part in parts])
        prompts = tokens[:, : self.prefill]
        caches = [decoder.prefill(prompts[span], length) for span in spans]

        def goes_on(index: tf.Tensor, _: tf.Tensor, ended: tf.Tensor, *__: Any) -> Any:
            return (index < length) & ~tf.reduce_all(ended)

        def generate_next(
            index: tf.Tensor, tokens: tf.Tensor, ended: tf.Tensor, caches: list[Caches]
        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, list[Caches]]:
            steps = [
                decoder.step(tokens[span], cache, index - 1)
                for span, cache in zip(spans, caches, strict=True)
            ]
            logits = tf.concat([decoder.logits(values) for values, _ in steps], axis=0)
            new = tf.cast(self.sampler(logits), tokens.dtype)
            is_given = tf.gather(given, index, axis=1)
            new = tf.where(is_given, tf.gather(tokens, index, axis=1), new)
            here = tf.range(length)[None, :] == index
            tokens = tf.where(here, new[:, None], tokens)
            for stop in self.stops:
                ended |= (new == stop) & ~is_given
            return index + 1, tokens, ended, [caches for _, caches in steps]

        start = tf.reduce_min(tf.reduce_sum(tf.cast(given, tf.int32), axis=1))
        ended = tf.zeros([rows], tf.bool)
        return tf.while_loop(goes_on, generate_next, (start, tokens, ended, caches))[1]


def _length(pipeline: Pipeline) -> int | None:
    """Returns the number of positions, if the model takes no other."""
    return pipeline.captured.specs[tokens_id(pipeline)].shape[1]


def _check_model(pipeline: Pipeline) -> None:
    """Raises ValueError if a model is no decoder of tokens."""
    captured = pipeline.captured
    inputs = [captured.specs[i] for i in captured.graph.input_ids]
    outputs = [captured.specs[i].shape for i in captured.graph.output_ids]
    tokens = [x for x in inputs if not is_padding_mask(x)]
    if len(tokens) != 1 or [len(x) for x in (tokens[0].shape, *outputs)] != [2, 3]:
        raise ValueError(
            "`generate` is for models with one input, tokens `[B, L]`, and maybe a "
            "padding mask; and with one output, logits `[B, L, V]`. Received inputs "
            f"{', '.join(x.name for x in inputs)} and outputs of shapes {outputs}. "
            "Pipeline such a model."
        )
    if whole_values(captured.graph).issuperset(captured.graph.output_ids):
        raise ValueError(
            "`generate` stores keys and values of earlier positions. Received a model "
            "in which no layer takes them or is attention of Keras: layers are such if "
            "their `call` has arguments `cache` and `cache_update_index`, or others "
            "that end so, or if there is a `MultiHeadAttention` or a "
            "`GroupQueryAttention` inside. Use one of these."
        )
    if pipeline.strategy.mesh.num_replicas > 1:
        raise ValueError(
            "`generate` runs one copy of a pipeline. Received a pipeline of "
            f"{pipeline.strategy.mesh.num_replicas} replicas. Load its weights into "
            "one without replicas."
        )


def _check_positions(pipeline: Pipeline) -> None:
    """Compares a position by itself with all at once, on random tokens.

    Raises:
        ValueError: If they differ. The first layer that differs is named.
    """
    decoder, graph = Decoder(pipeline), pipeline.captured.graph
    length = _length(pipeline) or 8
    vocabulary_size = pipeline.captured.specs[graph.output_ids[0]].shape[-1]
    random = np.random.default_rng(0)
    tokens = random.integers(vocabulary_size, size=(2, length), dtype=np.int32)
    place = length // 2
    tokens[1, :place] = tokens[0, :place]
    plain = decoder.plain(tf.constant(tokens[:1]))
    # Stored are keys and values of other tokens from there on.
    caches = decoder.prefill(tf.constant(tokens[1:]), length)
    tokens[1, place] = tokens[0, place]
    step, _ = decoder.step(tf.constant(tokens[1:]), caches, tf.constant(place))
    for call in graph.calls:
        for i in call.output_ids:
            if keras_calls.get_mask(plain[i]) is not None:
                raise ValueError(
                    "`generate` takes every token that it generates for one. Received "
                    f"a model in which a mask reaches '{call.layer.name}', such as "
                    "that of an `Embedding` with `mask_zero=True`. Make it without."
                )
            if not _is_close(plain[i], step[i], place, length):
                raise ValueError(
                    "`generate` computes one position at a time, from keys and values "
                    "of those before. Received a model whose layer "
                    f"'{call.layer.name}' then returns other values than for all "
                    "positions: it looks at later positions, mixes positions in "
                    "another way than Keras' attention layers, or counts them. Put "
                    "what counts positions before the first attention, make attention "
                    "causal, or give the layer arguments `cache` and "
                    "`cache_update_index`."
                )


def _is_close(plain: tf.Tensor, step: tf.Tensor, place: int, length: int) -> bool:
    """Returns whether a value of one position is that among all, to rounding."""
    if not plain.dtype.is_floating:
        return True
    if plain.shape[1:2] != [length]:
        return plain.shape == step.shape
    expected = np.asarray(tf.cast(plain, tf.float64))[:, place]
    actual = np.asarray(tf.cast(step, tf.float64))
    actual = actual[:, place if actual.shape[1:2] == (length,) else -1]
    if expected.shape != actual.shape:
        return False
    tolerance = 10 * 2 ** (-0.75 * _MANTISSA_BITS[plain.dtype])
    return bool(np.abs(actual - expected).max() <= tolerance * np.abs(expected).max())


def _tokens_of(prompts: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens `[B, L]`, and which of them are given."""
    rows = [np.asarray(row) for row in prompts]
    sizes = [row.size for row in rows]
    numbers = rows and all(
        x.ndim == 1 and np.issubdtype(x.dtype, np.integer) for x in rows
    )
    if not numbers or min(sizes) < 1 or max(sizes) > length:
        raise ValueError(
            "Prompts are lists of tokens, one at least in each, and no more than "
            f"`max_length`. Received {len(rows)} prompts of lengths {sizes[:8]} for "
            f"max_length={length}. For texts, give a `preprocessor` as well."
        )
    tokens = np.zeros((len(rows), length), np.int32)
    given = np.arange(length)[None] < np.array(sizes)[:, None]
    tokens[given] = np.concatenate(rows)
    return tokens, given


def _sampler_of(sampler: Any) -> Sampler:
    """Returns a function from logits to tokens."""
    if sampler == "greedy":
        return lambda logits: tf.argmax(logits, axis=-1)
    error = ValueError(
        'A sampler is "greedy", a sampler of keras-hub that chooses one token after '
        "another, which beam and contrastive search do not, or a function from logits "
        f"`[B, V]` to tokens `[B]`. Received {sampler!r}."
    )
    if hasattr(sampler, "get_next_token"):

        def choose(logits: tf.Tensor) -> tf.Tensor:
            try:
                return sampler.get_next_token(sampler.compute_probabilities(logits))
            except NotImplementedError:
                raise error from None

        return choose
    if callable(sampler):
        return sampler
    raise error
