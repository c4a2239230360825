"""Language modelling: predict what follows, against a bigram model; draw text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from trainer.data import corpus
from trainer.data.batches import HostShard
from trainer.data.corpus import Corpus
from trainer.experiment import Experiment, Split
from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfgpipe.quantization import QuantizeConfig


def check_heads(*, width: int, num_heads: int) -> None:
    """Checks that heads share the width.

    Raises:
        HyperparameterError: If they cannot.
    """
    if width % num_heads:
        raise HyperparameterError(
            f"width: expected a multiple of num_heads={num_heads}; received {width}."
        )


class Transformer(Hyperparams):
    """A decoder-only transformer with learnt positions and norms before each block."""

    num_layers: int = field(default=4, at_least=1, help="Number of transformer blocks.")
    width: int = field(default=128, at_least=1, help="Embedding dimension (d_model).")
    num_heads: int = field(default=4, at_least=1, help="Number of attention heads.")
    mlp_width: int = field(
        default=512, at_least=1, help="Hidden dimension of the MLP (d_ff)."
    )
    context: int = field(
        default=128, at_least=1, help="Context length in tokens (bytes by default)."
    )
    dropout: float = field(
        default=0.0,
        at_least=0,
        less_than=1,
        help="Dropout rate.",
    )
    softmax: Literal["tied", "untied"] = field(
        default="untied", help="tied: the embedding table is the output layer."
    )

    def validate(self) -> None:
        """Checks that the heads share the width."""
        check_heads(width=self.width, num_heads=self.num_heads)


class Sampling(Hyperparams):
    """What to draw, and how boldly."""

    prompt: str = field(default="def ", help="Prompt.")
    prompts: str | None = field(
        default=None, help="Text file with a prompt a line, instead of `prompt`."
    )
    num_bytes: int = field(default=400, at_least=0, help="Number of bytes to sample.")
    temperature: float = field(default=0.8, at_least=0.01, help="Sampling temperature.")

    def read_prompts(self) -> list[str]:
        """Returns what the texts are to begin with, one text for each.

        Raises:
            HyperparameterError: If they are in a file that cannot be read, or is empty.
        """
        if self.prompts is None:
            return [self.prompt]
        try:
            text = Path(self.prompts).expanduser().read_text(encoding="utf-8")
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
        start: bytes = b"",
    ) -> list[str]:
        """Returns each prompt with what the model goes on with.

        The model always reads full windows, one for each prompt, so that its program is
        traced once. What stands after a text does not matter to a causal model.

        Args:
            model: Maps bytes to logits, `[rows, length]` to `[rows, length, 256]`.
            prompts: What the texts begin with.
            length: Bytes that it reads.
            seed: Seed of the draws; each text has its own.
            start: What the model always reads first, before the text.
        """
        randoms = [np.random.default_rng([seed, row]) for row in range(len(prompts))]
        texts = [list(prompt.encode()) or [ord("\n")] for prompt in prompts]
        room = length - len(start)
        for _ in range(self.num_bytes):
            windows = np.zeros([len(texts), length], np.int32)
            ends = []
            for window, text in zip(windows, texts, strict=True):
                read = [*start, *text[max(0, len(text) - room) :]]
                window[: len(read)] = read
                ends.append(len(read) - 1)
            logits = model.predict_on_batch(windows)[np.arange(len(texts)), ends]
            for text, random, row in zip(texts, randoms, logits, strict=True):
                text.append(self._drawn(row.astype(np.float64), random))
        return [_shown(bytes(text)) for text in texts]

    def _drawn(self, logits: np.ndarray, random: np.random.Generator) -> int:
        chances = np.exp((logits - logits.max()) / self.temperature)
        return int(random.choice(256, p=chances / chances.sum()))


class LanguageModel(Experiment):
    """A transformer that predicts the next byte of a text."""

    unit: ClassVar[str] = "byte"

    data: Corpus = field(default=Corpus(), help="Text.")
    model: Transformer = field(default=Transformer(), help="Network.")
    sampling: Sampling = field(default=Sampling(), help="Sampling at the end.")

    @property
    def tokens_per_step(self) -> int:
        """How many bytes a step reads; a byte is a token here.

        Of packed documents it counts the starts as well, and the padding.
        """
        return self.training.batch_size * self.model.context

    def network(self) -> keras.Model:
        """Returns the network, from bytes to logits."""
        from trainer.models import transformer

        try:
            return transformer.decoder_only(
                self.model,
                documents=self.data.documents,
                num_shards=self.pipelining.num_shards,
                sharding=self.pipelining.sharding,
            )
        except ValueError as error:
            raise HyperparameterError(f"model: {error}") from None

    def loss(self) -> keras.losses.Loss:
        """Returns the loss of logits, in nats per byte that is predicted."""
        import keras

        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=self._ignored
        )

    def quantize_rules(self) -> Mapping[type, QuantizeConfig]:
        """Returns how the transformer's own layers are quantized."""
        from trainer.models import transformer

        return transformer.quantize_rules()

    def batches(
        self, split: Split, *, first_step: int = 0, shard: HostShard | None = None
    ) -> tf.data.Dataset:
        """Returns batches of windows: random ones to train, even ones to validate.

        Windows of packed documents are fixed before; any others begin anywhere.
        """
        from trainer.data import corpus

        text = self._read(split)
        length, batch_size = self.model.context, self.training.batch_size
        stride = length + 1 if self._packs else 1
        if split == "validation":
            return corpus.even_windows(
                text,
                length=length,
                batch_size=batch_size,
                num_batches=self.evaluation.num_batches,
                stride=stride,
            )
        return corpus.random_windows(
            text,
            length=length,
            batch_size=batch_size,
            steps=range(first_step, self.training.num_steps),
            seed=self.seed,
            stride=stride,
            shard=shard,
        )

    def baselines(self) -> dict[str, float]:
        """Returns the loss of the bigram model, of the very bytes validated on."""
        log_probabilities = fit_bigrams(self._read("train"), ignored=self._ignored)
        pairs = list(self.batches("validation").as_numpy_iterator())
        inputs, targets = (np.concatenate(side) for side in zip(*pairs, strict=True))
        if self._ignored is not None:
            counted = targets != self._ignored
            inputs, targets = inputs[counted], targets[counted]
        return {"bigram": bigram_cross_entropy(log_probabilities, inputs, targets)}

    def check(self) -> None:
        """Reads the prompts."""
        self.sampling.read_prompts()

    def sample(self, model: keras.Model) -> list[str]:
        """Returns a text drawn from the model for each prompt."""
        return self.sampling.draw(
            model,
            self.sampling.read_prompts(),
            length=self.model.context,
            seed=self.seed,
            start=bytes([corpus.START]) if self._packs else b"",
        )

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
    def _packs(self) -> bool:
        return self.data.documents == "packed"

    @property
    def _ignored(self) -> int | None:
        """The byte that is not predicted: another document's start, or padding."""
        return corpus.START if self._packs else None

    def _read(self, split: Split) -> np.ndarray:
        """Returns text to cut windows from: `[num_bytes]`, packed or as it is."""
        if self._packs:
            documents = self.data.read_documents(split)
            text = corpus.pack(documents, size=self.model.context + 1).ravel()
        else:
            text = self.data.read(split)
        if len(text) <= self.model.context:
            raise HyperparameterError(
                f"data.files: expected more than model.context={self.model.context} "
                f"bytes for {split}; received {len(text)}. Give more text, or a "
                "smaller model.context."
            )
        return text


def fit_bigrams(text: np.ndarray, *, ignored: int | None = None) -> np.ndarray:
    """Returns the logarithms of P(next | previous), add-one smoothed.

    >>> probabilities = np.exp(fit(np.frombuffer(b"aab", np.uint8)))
    >>> print(f"{probabilities[ord('a'), ord('b')]:.6f} {(1 + 1) / (2 + 256):.6f}")
    0.007752 0.007752

    Args:
        text: Bytes. # [num_bytes] uint8
        ignored: A byte that is never to be predicted, if there is such.

    Returns:
        Logarithms. # [256 previous, 256 next]
    """
    pairs = text[:-1].astype(np.int32) * 256 + text[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 1
    if ignored is not None:
        counts[:, ignored] = 0
    with np.errstate(divide="ignore"):
        return np.log(counts / counts.sum(axis=1, keepdims=True))


def bigram_cross_entropy(
    log_probabilities: np.ndarray, previous: np.ndarray, following: np.ndarray
) -> float:
    """Returns the mean of -log P(following | previous), in nats per byte."""
    return float(-log_probabilities[previous, following].mean())


def _shown(text: bytes) -> str:
    """Returns a text without control characters, which would garble a terminal."""
    drawn = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in drawn)
