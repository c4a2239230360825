"""Images of overlapping shapes, made by the program.

Discs, rectangles and triangles lie one over another on a darker background, each of a
brightness and with stripes of its own, under noise. So the brightness of a pixel does
not tell one shape from another: that is seen by outlines, at some distance. All of it
is a function of a seed and a number.
"""

from __future__ import annotations

import numpy as np

SHAPES = ("background", "disc", "rectangle", "triangle")
# Which numbers are drawn: for training, or for validation.
_STREAMS = {"train": 0, "validation": 1}
# Least and most brightness: of the background, of shapes.
_DARK, _BRIGHT = (0.1, 0.4), (0.5, 0.9)


def draw_shapes(
    step: int, *, rows: slice, size: int, num_shapes: int, seed: int, stream: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns images and the classes of their pixels.

    Args:
        step: The step.
        rows: The range of images of the step.
        size: Height and width of an image.
        num_shapes: Most shapes in an image, at least one.
        seed: The seed.
        stream: `"train"` or `"validation"`, which have no image in common.

    Returns:
        `[num_rows, size, size, 1]` of type float32, mostly between 0 and 1, and
        `[num_rows, size, size]` of type int32, numbers of `SHAPES`.
    """
    places = (np.arange(size) + 0.5) / size
    y, x = np.meshgrid(places, places, indexing="ij")
    numbers = range(rows.start, rows.stop)
    pixels = np.empty((len(numbers), size, size, 1), np.float32)
    classes = np.zeros((len(numbers), size, size), np.int32)
    for row, number in enumerate(numbers):
        # Each image has draws of its own, so it does not depend on who makes it.
        counter = [0, 0, number, _STREAMS[stream]]
        rng = np.random.Generator(np.random.Philox(key=[seed, step], counter=counter))
        image = _stripes(rng, y, x, *_DARK)
        for _ in range(rng.integers(1, num_shapes + 1)):
            kind = int(rng.integers(1, len(SHAPES)))
            inside = _INSIDE[kind - 1](rng, y, x)
            image = np.where(inside, _stripes(rng, y, x, *_BRIGHT), image)
            classes[row][inside] = kind
        noise = 0.05 * rng.standard_normal((size, size))
        pixels[row, ..., 0] = image + noise
    return pixels, classes


def _stripes(
    rng: np.random.Generator, y: np.ndarray, x: np.ndarray, least: float, most: float
) -> np.ndarray:
    """Returns a brightness with fainter stripes in some direction, of some width."""
    brightness, angle, phase = rng.uniform([least, 0, 0], [most, np.pi, 2 * np.pi])
    waves = rng.uniform(3, 10)
    along = np.cos(angle) * x + np.sin(angle) * y
    return brightness + 0.1 * np.sin(2 * np.pi * waves * along + phase)


def _disc(rng: np.random.Generator, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    (cy, cx), radius = rng.uniform(0.15, 0.85, 2), rng.uniform(0.15, 0.3)
    return (y - cy) ** 2 + (x - cx) ** 2 < radius**2


def _rectangle(rng: np.random.Generator, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    (cy, cx), (height, width) = rng.uniform(0.15, 0.85, 2), rng.uniform(0.12, 0.3, 2)
    u, v = _turned(rng.uniform(0, np.pi), y - cy, x - cx)
    return (abs(u) < height) & (abs(v) < width)


def _triangle(rng: np.random.Generator, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the mask of a triangle around a random point."""
    (cy, cx), distance = rng.uniform(0.15, 0.85, 2), rng.uniform(0.1, 0.18)
    start = rng.uniform(0, 2 * np.pi)
    inside = np.ones_like(y, bool)
    for side in range(3):
        u, _ = _turned(start + side * 2 * np.pi / 3, y - cy, x - cx)
        inside &= u < distance
    return inside


def _turned(
    angle: float, y: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return np.cos(angle) * y + np.sin(angle) * x, np.cos(angle) * x - np.sin(angle) * y


_INSIDE = (_disc, _rectangle, _triangle)
