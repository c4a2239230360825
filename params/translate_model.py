"""A transformer that makes one text of another, as an experiment."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from params import characters, heads
from params.experiment import Experiment, Split
from params.pairs import Pairs
from params.share import WHOLE, Share
from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from params.pair_batches import Rows


class EncoderDecoder(Hyperparams):
    """An encoder-decoder transformer, learnt positions, norms before each block."""

    num_encoder_layers: int = field(default=2, at_least=1, help="Encoder's blocks.")
    num_decoder_layers: int = field(default=2, at_least=1, help="Decoder's blocks.")
    width: int = field(default=64, at_least=1, help="Numbers in a character's vector.")
    num_heads: int = field(default=4, at_least=1, help="Heads of each attention.")
    mlp_width: int = field(
        default=256, at_least=1, help="Width inside each block's perceptron."
    )
    dropout: float = field(
        default=0.0,
        at_least=0,
        less_than=1,
        help="Share of activations dropped in training.",
    )

    def validate(self) -> None:
        """Checks that the heads share the width."""
        heads.check(width=self.width, num_heads=self.num_heads)


class Translation(Experiment):
    """An encoder-decoder that learns pairs of texts."""

    unit: ClassVar[str] = "character"

    model: EncoderDecoder = field(default=EncoderDecoder(), help="The network.")
    num_decoded: int = field(
        default=256, at_least=1, help="Validation pairs to decode at the end, at most."
    )

    @property
    @abc.abstractmethod
    def data(self) -> Pairs:
        """The pairs: a hyperparameter of each experiment."""

    @property
    def tokens_per_step(self) -> int:
        """How many characters a step predicts, were all targets as long as can be."""
        return self.training.batch_size * self._target_length

    def network(self) -> keras.Model:
        """Returns the network, from sources and shifted targets to logits."""
        from params import encoder_decoder

        if self.pipelining.num_shards > 1:
            raise HyperparameterError(
                "pipelining.num_shards: expected 1, as no layer of an encoder-decoder "
                f"is sharded; received {self.pipelining.num_shards}. Try more "
                "pipelining.num_stages."
            )
        return encoder_decoder.build(
            self.model,
            vocabulary_size=self.data.alphabet.size,
            source_length=self.data.source_length,
            target_length=self._target_length,
        )

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns the share of characters that are right."""
        import keras

        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]

    def build_dataset(
        self, split: Split, *, first_step: int = 0, share: Share = WHOLE
    ) -> tf.data.Dataset:
        """Returns batches of pairs: random ones to train, the first to validate."""
        from params import pair_batches

        rows, batch_size = self._rows(split), self.training.batch_size
        if split == "validation":
            return pair_batches.first_batches(
                rows,
                batch_size=batch_size,
                num_batches=self.evaluation.num_batches,
            )
        return pair_batches.random_batches(
            rows,
            batch_size=batch_size,
            steps=range(first_step, self.training.num_steps),
            seed=self.seed,
            share=share,
        )

    def baselines(self) -> dict[str, float]:
        """Returns the loss of the characters' frequencies in the training's targets."""
        counts = np.bincount(
            self._rows("train").target.ravel(), minlength=self.data.alphabet.size
        )
        counts = counts.astype(float) + 1
        counts[characters.PADDING] = 0  # It is never predicted.
        with np.errstate(divide="ignore"):
            log_probabilities = np.log(counts / counts.sum())
        batches = self.build_dataset("validation").as_numpy_iterator()
        targets = np.concatenate([target for _, target in batches])
        counted = targets[targets != characters.PADDING]
        return {"unigram": float(-log_probabilities[counted].mean())}

    def decode(self, model: keras.Model, folder: Path) -> str:
        """Writes `translations.tsv`: what the model makes of validation sources.

        Returns:
            A few of them, and the share that is exactly right.
        """
        from params import greedy

        size, length = self.training.batch_size, self._target_length
        batches = self.build_dataset("validation").take(
            max(1, self.num_decoded // size)
        )
        table = [
            tuple(characters.decode(text, self.data.alphabet) for text in row)
            for (source, _), target in batches.as_numpy_iterator()
            for row in zip(
                source, target, greedy.decode(model, source, length=length), strict=True
            )
        ]
        lines = ["\t".join(row) for row in [("source", "wanted", "received"), *table]]
        path = folder / "translations.tsv"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        right = sum(wanted == received for _, wanted, received in table)
        shown = [
            f"{source} -> {received}"
            + ("" if wanted == received else f"  (wanted {wanted})")
            for source, wanted, received in table[:8]
        ]
        return "\n".join(
            [
                "Translations:",
                "",
                *shown,
                "",
                f"{right / len(table):.1%} of {len(table)} exactly right.",
            ]
        )

    @property
    def _target_length(self) -> int:
        return self.data.target_length + 1  # The end, or the start.

    def _rows(self, split: Split) -> Rows:
        from params import pair_batches

        pairs = self.data.read(split)
        if len(pairs) < self.training.batch_size:
            raise HyperparameterError(
                "data: expected enough pairs for a batch of "
                f"training.batch_size={self.training.batch_size} for {split}, which "
                f"has about a tenth or nine of them; received {len(pairs)}. Give more "
                "pairs, or a smaller training.batch_size."
            )
        return pair_batches.rows(
            pairs,
            source_length=self.data.source_length,
            target_length=self._target_length,
            alphabet=self.data.alphabet,
        )
