"""One text made of another by an encoder-decoder, decoded greedily."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tfgpipe_params.translate import text_pairs
from tfgpipe_params.translate.sizes import EncoderDecoder
from tfgpipe_params.translate.text_pairs import END, PADDING, START, Pairs
from tfgpipe_trainer.batches import ArrayExamples, Examples
from tfgpipe_trainer.experiment import Experiment, Split
from tfgpipe_trainer.hyperparams import HyperparameterError, field

if TYPE_CHECKING:
    import keras

    from tfgpipe_params.translate.text_pairs import PairArrays


class Translation(Experiment):
    """An encoder-decoder that learns pairs of texts."""

    unit: ClassVar[str] = "character"

    model: EncoderDecoder = field(default=EncoderDecoder(), help="Network.")
    num_decoded: int = field(
        default=256, at_least=1, help="Maximum number of validation pairs to decode."
    )

    @property
    @abc.abstractmethod
    def data(self) -> Pairs:
        """The pairs: a hyperparameter of each experiment."""

    @property
    def units_per_step(self) -> int:
        """Number of characters that a step predicts, padding among them."""
        return self.training.batch_size * self._target_length

    def network(self) -> keras.Model:
        """Returns the network, from sources and shifted targets to logits."""
        from tfgpipe_params.translate import network

        if self.pipelining.num_shards > 1:
            raise HyperparameterError(
                "pipelining.num_shards: expected 1, as no layer of an encoder-decoder "
                f"is sharded; received {self.pipelining.num_shards}. Try more "
                "pipelining.num_stages."
            )
        return network.encoder_decoder(
            self.model,
            vocabulary_size=self.data.alphabet.size,
            source_length=self.data.source_length,
            target_length=self._target_length,
        )

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns the share of characters that are right."""
        import keras

        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]

    def examples(self, split: Split) -> Examples:
        """Returns the pairs of a split, `((source, shifted), target)`."""
        rows = self._rows(split)
        return ArrayExamples(((rows.source, rows.shifted), rows.target))

    def baselines(self) -> dict[str, float]:
        """Returns the loss of the characters' frequencies in the training's targets."""
        counts = np.bincount(
            self._rows("train").target.ravel(), minlength=self.data.alphabet.size
        )
        counts = counts.astype(float) + 1
        counts[text_pairs.PADDING] = 0  # It is never predicted.
        with np.errstate(divide="ignore"):
            log_probabilities = np.log(counts / counts.sum())
        batches = self.batches("validation").as_numpy_iterator()
        targets = np.concatenate([target for _, target in batches])
        counted = targets[targets != text_pairs.PADDING]
        return {"unigram": float(-log_probabilities[counted].mean())}

    def decode(self, model: keras.Model, folder: Path) -> str:
        """Writes `translations.tsv`: what the model makes of validation sources.

        Returns:
            A few of them, and the share that is exactly right.
        """
        size, length = self.training.batch_size, self._target_length
        pairs = self.batches("validation").unbatch().take(self.num_decoded).batch(size)
        table = [
            tuple(text_pairs.decode_text(text, self.data.alphabet) for text in row)
            for (source, _), target in pairs.as_numpy_iterator()
            for row in zip(
                source, target, greedy_decode(model, source, length=length), strict=True
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

    def _rows(self, split: Split) -> PairArrays:
        from tfgpipe_params.translate import text_pairs

        pairs = self.data.read(split)
        if len(pairs) < self.training.batch_size:
            raise HyperparameterError(
                "data: expected enough pairs for a batch of "
                f"training.batch_size={self.training.batch_size} for {split}, which "
                f"has about a tenth or nine of them; received {len(pairs)}. Give more "
                "pairs, or a smaller training.batch_size."
            )
        return text_pairs.encode_pairs(
            pairs,
            source_length=self.data.source_length,
            target_length=self._target_length,
            alphabet=self.data.alphabet,
        )


def greedy_decode(model: keras.Model, source: np.ndarray, *, length: int) -> np.ndarray:
    """Returns the model's translations, `[batch_size, length]`, zeros after the end.

    The model always reads a full target, so that its program is traced once. What
    stands after the characters written does not matter to a causal decoder.

    Args:
        model: Maps a source and a shifted target to logits, `[batch_size, length,
            vocabulary_size]`.
        source: `[batch_size, source_length]`
        length: Largest number of characters that it writes.
    """
    written = np.full([len(source), length + 1], PADDING, np.int32)
    written[:, 0] = START
    running = np.ones(len(source), bool)
    for place in range(length):
        read = [source, written[:, :-1]]
        logits = model.predict(read, batch_size=len(source), verbose=0)[:, place]
        written[:, place + 1] = np.where(running, logits.argmax(axis=-1), PADDING)
        running &= ~np.isin(written[:, place + 1], (END, PADDING))
        if not running.any():
            break
    return written[:, 1:]
