"""Language modelling: predict what follows, against a bigram model; draw text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfgpipe_params.lm import tokenizer_training, tokenizers
from tfgpipe_params.lm.corpus import Corpus
from tfgpipe_params.lm.sizes import Transformer
from tfgpipe_params.lm.tokenizers import BYTES, Tokenizer
from tfgpipe_trainer import files
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.config import Evaluation, Pipelining
from tfgpipe_trainer.experiment import Experiment, Split
from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    import tfgpipe
    from tfgpipe.quantization import QuantizeConfig


class Sampling(Hyperparams):
    """Texts that are drawn from the model, and the temperature."""

    prompt: str = field(default="def ", help="Prompt.")
    prompts: str | None = field(
        default=None, help="Text file with a prompt a line, instead of `prompt`."
    )
    num_bytes: int = field(default=400, at_least=0, help="Number of bytes to sample.")
    temperature: float = field(default=0.8, at_least=0.01, help="Sampling temperature.")

    def read_prompts(self) -> list[str]:
        """Returns the prompts, one for each text.

        Raises:
            HyperparameterError: If they are in a file that cannot be read, or is empty.
        """
        if self.prompts is None:
            return [self.prompt]
        try:
            path = files.to_path(self.prompts, name="sampling.prompts")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise HyperparameterError(
                "sampling.prompts: expected a text file that can be read; received "
                f"{self.prompts!r}: {error}"
            ) from None
        prompts = [line for line in text.splitlines() if line]
        if not prompts:
            raise HyperparameterError(
                "sampling.prompts: expected a file of prompts, one a line; received "
                f"{self.prompts!r}, which has none."
            )
        return prompts

    def draw(
        self,
        model: keras.Model,
        prompts: Sequence[str],
        *,
        length: int,
        seed: int,
        start: Sequence[int] = (),
        tokenizer: Tokenizer = BYTES,
    ) -> list[str]:
        """Returns each prompt with what the model goes on with.

        The model always reads full windows, one for each prompt, so that its program is
        traced once. What stands after a text does not matter to a causal model.

        Args:
            model: Maps tokens to logits, `[rows, length]` to
                `[rows, length, vocabulary_size]`.
            prompts: The beginnings of the texts.
            length: Tokens that it reads.
            seed: Seed of the draws; each text has its own.
            start: The token that the model always reads first, before the text.
            tokenizer: The tokenizer; no token beyond its vocabulary is drawn.

        Raises:
            HyperparameterError: If a prompt has no tokens.
        """
        randoms = [np.random.default_rng([seed, row]) for row in range(len(prompts))]
        texts = encode_prompts(prompts, tokenizer)
        ends_at = [len(tokenizer.decode(text)) + self.num_bytes for text in texts]
        size = tokenizer.vocabulary_size
        room = length - len(start)
        # Each is a byte or more, unless a token stands for nothing.
        for _ in range(self.num_bytes):
            short = [
                len(tokenizer.decode(text)) < end
                for text, end in zip(texts, ends_at, strict=True)
            ]
            if not any(short):
                break
            windows = np.zeros([len(texts), length], np.int32)
            ends = []
            for window, text in zip(windows, texts, strict=True):
                read = [*start, *text[max(0, len(text) - room) :]]
                window[: len(read)] = read
                ends.append(len(read) - 1)
            logits = model.predict_on_batch(windows)[np.arange(len(texts)), ends]
            for text, random, row, draws in zip(
                texts, randoms, logits, short, strict=True
            ):
                if draws:
                    text.append(self._drawn(row[:size].astype(np.float64), random))
        return [_shown(tokenizer.decode(text)) for text in texts]

    def _drawn(self, logits: np.ndarray, random: np.random.Generator) -> int:
        chances = np.exp((logits - logits.max()) / self.temperature)
        return int(random.choice(len(logits), p=chances / chances.sum()))


def encode_prompts(prompts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the tokens of prompts; an empty one is a line end.

    Raises:
        HyperparameterError: If one has none, or cannot be written in such tokens.
    """
    encoded = tokenizer.encode([prompt.encode() or b"\n" for prompt in prompts])
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not len(ids):
            raise HyperparameterError(
                "sampling.prompt: expected a text of one token or more; received "
                f"{prompt!r}, of which the tokenizer makes none."
            )
    return [ids.tolist() for ids in encoded]


class LanguageModel(Experiment):
    """A transformer that predicts the next token of a text, by default a byte."""

    # All windows of a large text would take longer than the steps between.
    evaluation: Evaluation = Evaluation(max_batches=32)
    data: Corpus = field(default=Corpus(), help="Text.")
    model: Transformer = field(default=Transformer(), help="Network.")
    sampling: Sampling = field(default=Sampling(), help="Sampling at the end.")

    @property
    def corpus(self) -> Corpus:
        """The text, in tokens of the tokenizer that is used."""
        return self.data

    @property
    def unit(self) -> str:  # type: ignore[override]
        """A byte, or with a tokenizer a token."""
        return "byte" if self.corpus.tokenizer is None else "token"

    @property
    def units_per_step(self) -> int:
        """Number of tokens that a step reads.

        Of packed documents it counts the starts as well, and the padding.
        """
        return self.training.batch_size * self.model.context

    def network(self) -> keras.Model:
        """Returns the network, from tokens to logits."""
        return self._network(predicts=False)

    def _network(self, *, predicts: bool) -> keras.Model:
        from tfgpipe_params.lm import transformer

        try:
            return transformer.decoder_only(
                self.model,
                vocabulary_size=self._vocabulary_size,
                start=self._start,
                num_shards=self.pipelining.num_shards,
                sharding=self.pipelining.tp_collective,
                vocabulary=self._split_vocabulary(),
                predicts=predicts,
            )
        except ValueError as error:
            raise HyperparameterError(f"model: {error}") from None

    def _split_vocabulary(self) -> tfgpipe.layers.SplitVocabulary | None:
        """Returns the vocabulary in parts, if it is to be."""
        if not self.model.split_vocabulary:
            return None
        import tfgpipe

        tied = self.model.softmax == "tied"
        return tfgpipe.layers.SplitVocabulary(
            self._vocabulary_size,
            self.model.width,
            num_parts=self.pipelining.num_stages,
            embeddings_initializer="uniform" if tied else "glorot_uniform",
            use_bias=not tied,
        )

    def pipeline(self, network: keras.Model) -> tfgpipe.PipelinedModel:
        """Returns a network as a pipeline, whose vocabulary may be on all devices."""
        vocabulary = self._split_vocabulary()
        if vocabulary is None:
            return super().pipeline(network)
        import tfgpipe

        devices = tfgpipe.devices.default_devices()[: self.pipelining.num_stages]
        return self.pipelining.build(
            network,
            num_stages=None,
            **vocabulary.stages(
                network,
                devices=devices,
                balance=self.pipelining.balance,
                batch_size=self.training.batch_size,
            ),
        )

    def for_inference(self, plain: keras.Model) -> keras.Model:
        """Returns a network from tokens to logits with the weights of a trained one."""
        if not self.model.split_vocabulary:
            return plain
        with self.precision.scope():
            predicting = self._network(predicts=True)
        predicting.set_weights(plain.get_weights())
        return predicting

    def validate(self) -> None:
        """Checks that a vocabulary can be in parts."""
        super().validate()
        if not self.model.split_vocabulary:
            return
        pipelining = self.pipelining
        for name, received, expected in (
            ("data.documents", self.corpus.documents, "joined"),
            ("precision.quantize", self.precision.quantize, "none"),
            ("pipelining.num_replicas", pipelining.num_replicas, 1),
            ("pipelining.num_shards", pipelining.num_shards, 1),
            ("pipelining.layers_per_stage", pipelining.layers_per_stage, None),
            ("pipelining.schedule", pipelining.schedule, Pipelining().schedule),
        ):
            if received != expected:
                raise HyperparameterError(
                    f"{name}: expected {expected}, as model.split_vocabulary has parts "
                    f"of one softmax on the devices of a pipeline; received {received}."
                )
        if pipelining.num_stages < 2:
            raise HyperparameterError(
                "pipelining.num_stages: expected 2 or more, the parts of "
                f"model.split_vocabulary; received {pipelining.num_stages}."
            )

    def loss(self) -> keras.losses.Loss:
        """Returns the loss of logits, in nats per token that is predicted."""
        import keras

        if self.model.split_vocabulary:
            from tfgpipe.tensor_parallel import OutputLoss

            return OutputLoss()
        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=self._start
        )

    def quantize_rules(self) -> Mapping[type, QuantizeConfig]:
        """Returns the configurations of the transformer's own layers."""
        from tfgpipe_params.lm import transformer

        return transformer.quantize_rules()

    def batches(
        self, split: Split, *, first_step: int = 0, shard: HostShard | None = None
    ) -> tf.data.Dataset:
        """Returns batches of windows: random ones to train, even ones to validate.

        Windows of packed documents are fixed before, and each comes once in an epoch;
        any others begin anywhere. With a vocabulary in parts targets are inputs, too.
        """
        found = self._windows(split, first_step=first_step, shard=shard)
        if not self.model.split_vocabulary:
            return found
        return found.map(lambda x, y: ((x, y), y))

    def _windows(
        self, split: Split, *, first_step: int = 0, shard: HostShard | None = None
    ) -> tf.data.Dataset:
        """Returns batches of windows, and of what follows each token."""
        from tfgpipe_params.lm import corpus
        from tfgpipe_trainer import batches

        text, length = self._read(split), self.model.context
        size, packed = self.training.batch_size, self.corpus.documents == "packed"
        windows = corpus.Windows(
            text, length=length, stride=length + 1 if packed else 1
        )
        if split == "validation":
            count = self.evaluation.max_batches
            if count is None and not packed:  # Windows side by side cover the text.
                count = math.ceil(self._num_windows(text) / size)
            return batches.validation_batches(
                windows, batch_size=size, num_batches=count
            )
        steps = range(first_step, self.training.num_steps)
        if packed:
            return batches.training_batches(
                windows, batch_size=size, steps=steps, seed=self.seed, shard=shard
            )
        return corpus.random_windows(
            text,
            length=length,
            batch_size=size,
            steps=steps,
            seed=self.seed,
            shard=shard,
        )

    def num_validation_examples(self) -> int:
        """Returns the number of windows that cover the validation split."""
        return self._num_windows(self._read("validation"))

    def _num_windows(self, text: np.ndarray) -> int:
        length = self.model.context
        if self._start is None:
            return math.ceil((len(text) - 1) / length)
        return len(text) // (length + 1)

    def baselines(self) -> dict[str, float]:
        """Returns the loss of the bigram model, of the very tokens validated on."""
        inputs, targets = self._validation_pairs()
        if self._start is not None:
            counted = targets != self._start
            inputs, targets = inputs[counted], targets[counted]
        bigram = bigram_cross_entropy(
            self._read("train"),
            inputs,
            targets,
            vocabulary_size=self._vocabulary_size,
            ignored=self._start,
        )
        return {"bigram": bigram}

    def report_units(self) -> dict[str, float]:
        """Returns the bytes of a token, on average of the very tokens validated on."""
        if self.corpus.tokenizer is None:
            return {}
        tokenizer = self.corpus.load_tokenizer()
        _, targets = self._validation_pairs()
        ids = targets[targets < tokenizer.vocabulary_size]
        return {"byte": len(tokenizer.decode(ids.tolist())) / len(ids)}

    def _validation_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all inputs and targets validated on, `[rows, length]` each."""
        pairs = list(self._windows("validation").as_numpy_iterator())
        inputs, targets = (np.concatenate(side) for side in zip(*pairs, strict=True))
        return inputs, targets

    def check(self) -> None:
        """Reads the prompts."""
        encode_prompts(self.sampling.read_prompts(), self.corpus.load_tokenizer())

    def file_hashes(self) -> dict[str, str]:
        """Returns the SHA-256 of the tokenizer's file, if there is one."""
        name = self.corpus.tokenizer
        return {} if name is None else {"data.tokenizer": tokenizers.digest(name)}

    def train_tokenizer(self) -> str:
        """Trains a tokenizer on the training split, and says how good it is."""
        return tokenizer_training.write(self.corpus)

    def sample(self, model: keras.Model) -> list[str]:
        """Returns a text drawn from the model for each prompt."""
        return self.sampling.draw(
            self.of_tokens(model),
            self.sampling.read_prompts(),
            length=self.model.context,
            seed=self.seed,
            start=self.first_tokens,
            tokenizer=self.corpus.load_tokenizer(),
        )

    def of_tokens(self, model: keras.Model) -> Any:
        """Returns a model whose `predict_on_batch` maps tokens to logits."""
        if self.model.split_vocabulary:
            return self.for_inference(getattr(model, "unpipelined", lambda: model)())
        return model

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """The tokens that each text begins with: the start of packed documents."""
        return () if self._start is None else (self._start,)

    def decode(self, model: keras.Model, folder: Path) -> str:
        """Writes texts drawn from the model, and returns the first.

        That of one prompt is `sample.txt`; those of several are `sample-1.txt` and on.
        """
        samples = self.sample(model)
        for number, sample in enumerate(samples, start=1):
            suffix = f"-{number}" if len(samples) > 1 else ""
            (folder / f"sample{suffix}.txt").write_text(sample, encoding="utf-8")
        return f"A sample:\n\n{samples[0]}"

    @property
    def _start(self) -> int | None:
        """The id that starts packed documents, and pads; it is not predicted."""
        if self.corpus.documents == "joined":
            return None
        return self.corpus.load_tokenizer().start

    @property
    def _vocabulary_size(self) -> int:
        """Number of ids, the start of documents included."""
        size = self.corpus.load_tokenizer().vocabulary_size
        return size if self._start is None else max(size, self._start + 1)

    def _read(self, split: Split) -> np.ndarray:
        """Returns text to cut windows from: `[num_tokens]`, packed or as it is."""
        text = self.corpus.read_tokens(split, window=self.model.context + 1)
        if len(text) <= self.model.context:
            raise HyperparameterError(
                f"data.files: expected more than model.context={self.model.context} "
                f"{self.unit}s for {split}; received {len(text)}. Give more text, or a "
                "smaller model.context."
            )
        return text


_BLOCK = 1 << 20


def bigram_cross_entropy(
    text: np.ndarray,
    previous: np.ndarray,
    following: np.ndarray,
    *,
    vocabulary_size: int,
    ignored: int | None = None,
) -> float:
    """Returns the mean of -log P(following | previous), in nats per token.

    P is add-one smoothed. Only the pairs that are asked for are counted, as a table of
    all would have `vocabulary_size` squared entries.

    >>> text = np.frombuffer(b"aab", np.uint8)
    >>> loss = bigram_cross_entropy(text, text[1:2], text[2:], vocabulary_size=256)
    >>> print(f"{np.exp(-loss):.6f} {(1 + 1) / (2 + 256):.6f}")
    0.007752 0.007752

    Args:
        text: Tokens to count. # [num_tokens]
        previous: Tokens.
        following: The token after each, of the same shape.
        vocabulary_size: Tokens are below it.
        ignored: A token that is never to be predicted, if there is such.
    """
    size = vocabulary_size
    asked, indices = np.unique(
        previous.astype(np.int64) * size + following, return_inverse=True
    )
    counts, totals = np.zeros(len(asked), np.int64), np.zeros(size, np.int64)
    for first in range(0, len(text) - 1, _BLOCK):
        block = text[first : first + _BLOCK + 1].astype(np.int64)
        before, after = block[:-1], block[1:]
        if ignored is not None:
            before, after = before[after != ignored], after[after != ignored]
        totals += np.bincount(before, minlength=size)
        pairs, occurrences = np.unique(before * size + after, return_counts=True)
        _, ours, theirs = np.intersect1d(
            asked, pairs, assume_unique=True, return_indices=True
        )
        counts[ours] += occurrences[theirs]
    seen = counts[indices].reshape(previous.shape) + 1
    possible = totals[previous] + size - (ignored is not None)
    return float(-np.log(seen / possible).mean())


def _shown(text: bytes) -> str:
    """Returns a text without control characters, which would garble a terminal."""
    drawn = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in drawn)
