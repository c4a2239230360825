"""A language model over bytes, as an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from params import bigram, heads, packing
from params.corpus import Corpus
from params.experiment import Experiment, Split
from params.sampling import Sampling
from params.share import WHOLE, Share
from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfgpipe.quantization import QuantizeConfig


class Transformer(Hyperparams):
    """A decoder-only transformer with learnt positions and norms before each block."""

    num_layers: int = field(default=4, at_least=1, help="Blocks.")
    width: int = field(default=128, at_least=1, help="Numbers in a byte's vector.")
    num_heads: int = field(default=4, at_least=1, help="Heads of each attention.")
    mlp_width: int = field(
        default=512, at_least=1, help="Width inside each block's perceptron."
    )
    context: int = field(default=128, at_least=1, help="Bytes that the model reads.")
    dropout: float = field(
        default=0.0,
        at_least=0,
        less_than=1,
        help="Share of activations dropped in training.",
    )
    softmax: Literal["tied", "untied"] = field(
        default="untied", help="tied: the embedding's vectors give the logits as well."
    )

    def validate(self) -> None:
        """Checks that the heads share the width."""
        heads.check(width=self.width, num_heads=self.num_heads)


class LanguageModel(Experiment):
    """A transformer that predicts the next byte of a text."""

    unit: ClassVar[str] = "byte"

    data: Corpus = field(default=Corpus(), help="The text.")
    model: Transformer = field(default=Transformer(), help="The network.")
    sampling: Sampling = field(default=Sampling(), help="The text drawn at the end.")

    @property
    def tokens_per_step(self) -> int:
        """How many bytes a step reads; a byte is a token here.

        Of packed documents it counts the starts as well, and the padding.
        """
        return self.training.batch_size * self.model.context

    def network(self) -> keras.Model:
        """Returns the network, from bytes to logits."""
        from params import decoder_only

        try:
            return decoder_only.build(
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
        from params import transformer

        return transformer.quantize_rules()

    def build_dataset(
        self, split: Split, *, first_step: int = 0, share: Share = WHOLE
    ) -> tf.data.Dataset:
        """Returns batches of windows: random ones to train, even ones to validate.

        Windows of packed documents are fixed before; any others begin anywhere.
        """
        from params import windows

        text = self._read(split)
        length, batch_size = self.model.context, self.training.batch_size
        stride = length + 1 if self._packs else 1
        if split == "validation":
            return windows.even_windows(
                text,
                length=length,
                batch_size=batch_size,
                num_batches=self.evaluation.num_batches,
                stride=stride,
            )
        return windows.random_windows(
            text,
            length=length,
            batch_size=batch_size,
            steps=range(first_step, self.training.num_steps),
            seed=self.seed,
            stride=stride,
            share=share,
        )

    def baselines(self) -> dict[str, float]:
        """Returns the loss of the bigram model, of the very bytes validated on."""
        log_probabilities = bigram.fit(self._read("train"), ignored=self._ignored)
        pairs = list(self.build_dataset("validation").as_numpy_iterator())
        inputs, targets = (np.concatenate(side) for side in zip(*pairs, strict=True))
        if self._ignored is not None:
            counted = targets != self._ignored
            inputs, targets = inputs[counted], targets[counted]
        return {"bigram": bigram.cross_entropy(log_probabilities, inputs, targets)}

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
            start=bytes([packing.START]) if self._packs else b"",
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
        return packing.START if self._packs else None

    def _read(self, split: Split) -> np.ndarray:
        """Returns text to cut windows from: `[num_bytes]`, packed or as it is."""
        if self._packs:
            documents = self.data.read_documents(split)
            text = packing.windows(documents, size=self.model.context + 1).ravel()
        else:
            text = self.data.read(split)
        if len(text) <= self.model.context:
            raise HyperparameterError(
                f"data.files: expected more than model.context={self.model.context} "
                f"bytes for {split}; received {len(text)}. Give more text, or a "
                "smaller model.context."
            )
        return text
