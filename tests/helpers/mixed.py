"""An experiment on a mixture, for programs to name."""

from __future__ import annotations

from typing import Any

from tfgpipe_params import template
from tfgpipe_trainer.batches import Mixture


class Mixed(template.Mine):
    """The template with two sources."""

    def examples(self, split: Any) -> Mixture:
        """Returns three of one to one of the other."""
        x, y = super().examples(split)
        return Mixture([(x[:100], y[:100]), (x[100:], y[100:])], weights=[3, 1])
