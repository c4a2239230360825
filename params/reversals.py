"""Random strings, to be written backwards."""

from __future__ import annotations

import string
from random import Random

from params.pairs import MadePairs, Pair
from trainer.hyperparams import HyperparameterError, field

_ALPHABET = string.ascii_lowercase + string.digits


class Reversals(MadePairs):
    """Strings of random small letters and digits, of all lengths in a range.

    >>> Reversals(shortest=3, longest=5).pair(0)
    Pair(source='jy1r', target='r1yj')
    """

    shortest: int = field(default=4, at_least=1, help="Fewest characters.")
    longest: int = field(default=12, at_least=1, help="Most characters.")

    def validate(self) -> None:
        """Checks that there are lengths to draw from."""
        if self.longest < self.shortest:
            raise HyperparameterError(
                f"longest: expected at least shortest={self.shortest}; "
                f"received {self.longest}."
            )

    @property
    def source_length(self) -> int:
        """How many characters the longest string has."""
        return self.longest

    @property
    def target_length(self) -> int:
        """How many characters the longest string has."""
        return self.longest

    def draw(self, random: Random) -> Pair:
        """Returns a random string with its reversal."""
        length = random.randint(self.shortest, self.longest)
        source = "".join(random.choices(_ALPHABET, k=length))
        return Pair(source, source[::-1])
