"""Data made by the program: dates, reversed strings, images of overlapping shapes.

Discs, rectangles and triangles lie one over another on a darker background, each of a
brightness and with stripes of its own, under noise. So the brightness of a pixel does
not tell one shape from another: that is seen by outlines, at some distance. All of it
is a function of a seed and a number.
"""

from __future__ import annotations

import datetime
import string
from random import Random

import numpy as np

from trainer.data.text_pairs import MadePairs, Pair
from trainer.hyperparams import HyperparameterError, field

# Not `strftime`, whose words depend on the machine's language.
_DAYS = (
    *("Monday", "Tuesday", "Wednesday", "Thursday"),
    *("Friday", "Saturday", "Sunday"),
)
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)

# Between dots the day comes first, between slashes the month.
DATE_FORMATS = (
    "{day} {month} {year}",
    "{month} {day}, {year}",
    "{weekday}, {day} {month} {year}",
    "{weekday}, {month} {nth}, {year}",
    "the {nth} of {month} {year}",
    "{day} {mon} {year}",
    "{day:02}-{mon}-{year}",
    "{mon} {day} '{short:02}",
    "{day}.{number}.{year}",
    "{day:02}.{number:02}.{short:02}",
    "{number}/{day}/{year}",
    "{number:02}/{day:02}/{short:02}",
    "{year}{number:02}{day:02}",
)


def write_date(date: datetime.date, form: str) -> str:
    """Returns a date in one of the `DATE_FORMATS`.

    >>> date = datetime.date(2024, 3, 9)
    >>> for form in DATE_FORMATS[3:8]:
    ...     print(write_date(date, form))
    Saturday, March 9th, 2024
    the 9th of March 2024
    9 Mar 2024
    09-Mar-2024
    Mar 9 '24
    """
    month = _MONTHS[date.month - 1]
    return form.format(
        day=date.day,
        nth=_nth(date.day),
        number=date.month,
        month=month,
        mon=month[:3],
        year=date.year,
        short=date.year % 100,
        weekday=_DAYS[date.weekday()],
    )


def _nth(day: int) -> str:
    teens = day in (11, 12, 13)
    return f"{day}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"


class Dates(MadePairs):
    """Days of a range of years, each in a random format.

    A year of two digits is the only one of the range that ends in them.
    """

    first_year: int = field(default=1970, at_least=1000, help="First year.")
    last_year: int = field(default=2069, at_least=1000, help="Last year.")

    def validate(self) -> None:
        """Checks that two digits tell the years apart, and four are enough."""
        if not self.first_year <= self.last_year <= min(self.first_year + 99, 9999):
            raise HyperparameterError(
                f"last_year: expected first_year={self.first_year} or up to 99 years "
                f"later, at most 9999; received {self.last_year}."
            )

    @property
    def source_length(self) -> int:
        """Length of the longest format, in characters."""
        longest = datetime.date(2024, 9, 25)  # A Wednesday in September.
        return max(len(write_date(longest, form)) for form in DATE_FORMATS)

    @property
    def target_length(self) -> int:
        """Length of an ISO date, in characters."""
        return len("2024-03-09")

    def draw(self, random: Random) -> Pair:
        """Returns a random day in a random format, and as ISO 8601 has it."""
        first = datetime.date(self.first_year, 1, 1).toordinal()
        last = datetime.date(self.last_year, 12, 31).toordinal()
        date = datetime.date.fromordinal(random.randint(first, last))
        return Pair(write_date(date, random.choice(DATE_FORMATS)), date.isoformat())


_ALPHABET = string.ascii_lowercase + string.digits


class Reversals(MadePairs):
    """Strings of random small letters and digits, of all lengths in a range.

    >>> Reversals(shortest=3, longest=5).pair(0)
    Pair(source='jy1r', target='r1yj')
    """

    shortest: int = field(default=4, at_least=1, help="Minimum length in characters.")
    longest: int = field(default=12, at_least=1, help="Maximum length in characters.")

    def validate(self) -> None:
        """Checks that there are lengths to draw from."""
        if self.longest < self.shortest:
            raise HyperparameterError(
                f"longest: expected at least shortest={self.shortest}; "
                f"received {self.longest}."
            )

    @property
    def source_length(self) -> int:
        """Length of the longest string, in characters."""
        return self.longest

    @property
    def target_length(self) -> int:
        """Length of the longest string, in characters."""
        return self.longest

    def draw(self, random: Random) -> Pair:
        """Returns a random string with its reversal."""
        length = random.randint(self.shortest, self.longest)
        source = "".join(random.choices(_ALPHABET, k=length))
        return Pair(source, source[::-1])


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
