"""Images changed a little in training, in a way that the seed and the step decide."""

from __future__ import annotations

from typing import Literal

import numpy as np

from trainer.hyperparams import Hyperparams, field


class Augmentation(Hyperparams):
    """What is done to images in training, each row by draws of its own."""

    shift: int = field(
        default=0, at_least=0, help="Most pixels that images are moved, each way."
    )
    flip: Literal["none", "horizontal"] = field(
        default="none", help="horizontal: every other image, left for right."
    )

    def apply(
        self, pixels: np.ndarray, *, rows: slice, batch_size: int, seed: int, step: int
    ) -> np.ndarray:
        """Returns images changed, `[num_rows, height, width, channels]`.

        Args:
            pixels: The images, of the same shape.
            rows: Which rows of the batch they are.
            batch_size: Rows of the whole batch.
            seed: The seed.
            step: The step.
        """
        # The counter keeps these draws apart from those of `params.order`.
        bits = np.random.Philox(key=[seed, step], counter=[0, 0, 0, 1])
        draws = bits.random_raw(3 * batch_size).reshape(3, batch_size)[:, rows]
        if self.flip == "horizontal":
            flipped = draws[0] % 2 == 1
            pixels = np.where(flipped[:, None, None, None], pixels[:, :, ::-1], pixels)
        if self.shift:
            pixels = self._moved(pixels, *(draws[1:] % (2 * self.shift + 1)))
        return pixels

    def _moved(
        self, pixels: np.ndarray, down: np.ndarray, right: np.ndarray
    ) -> np.ndarray:
        """Returns images moved, what comes in from outside being zero."""
        _, height, width, _ = pixels.shape
        around = (self.shift, self.shift)
        margin = np.pad(pixels, [(0, 0), around, around, (0, 0)])
        moved = np.empty_like(pixels)
        for row, (i, j) in enumerate(zip(down, right, strict=True)):
            moved[row] = margin[row, i : i + height, j : j + width]
        return moved
