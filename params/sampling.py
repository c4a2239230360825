"""Text drawn byte by byte from a language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras


class Sampling(Hyperparams):
    """What to draw, and how boldly."""

    prompt: str = field(default="def ", help="What the text begins with.")
    prompts: str | None = field(
        default=None, help="A text file, each line a prompt, in place of `prompt`."
    )
    num_bytes: int = field(default=400, at_least=0, help="Bytes to draw after it.")
    temperature: float = field(
        default=0.8, at_least=0.01, help="Below 1 the likely bytes are drawn more."
    )

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


def _shown(text: bytes) -> str:
    """Returns a text without control characters, which would garble a terminal."""
    drawn = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in drawn)
