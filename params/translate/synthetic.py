"""Pairs of texts made by the program: dates in words, strings written backwards."""

from __future__ import annotations

import datetime
import string
from random import Random

from tfgpipe_params.translate.text_pairs import Pair, SyntheticPairs
from tfgpipe_trainer.hyperparams import HyperparameterError, field

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


class Dates(SyntheticPairs):
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


class Reversals(SyntheticPairs):
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
