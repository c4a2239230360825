"""A parser of command lines with an exit status of its own for wrong arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Ends with status 1 for wrong arguments, since 2 has another meaning here."""

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong and ends with status 1."""
        self.exit(1, f"{message}\nTry `{self.prog} --help`.\n")
