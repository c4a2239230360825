"""What a run remembers beside its values, in each checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainer.errors import CheckpointError


@dataclasses.dataclass(kw_only=True)
class Notes:
    """What has happened so far that decides how a run goes on.

    Attributes:
        best_step: The step of the best evaluation.
        best_value: What it measured.
        num_worse: Evaluations since.
        skipped: Steps left out because they were not finite.
    """

    best_step: int | None = None
    best_value: float | None = None
    num_worse: int = 0
    skipped: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Notes:
        """Returns the notes of a checkpoint.

        Raises:
            CheckpointError: If they are not those of this version.
        """
        expected = [each.name for each in dataclasses.fields(cls)]
        if sorted(written) != sorted(expected):
            raise CheckpointError(
                "Expected a checkpoint whose notes, in its about.json, are "
                f"{', '.join(expected)}; received {', '.join(written) or 'none'}. Go "
                "on with the version that wrote it."
            )
        return cls(**written)

    def is_over(self, patience: int | None) -> bool:
        """Returns whether a run ends here, as too long nothing was better."""
        return patience is not None and self.num_worse >= patience

    def written(self) -> dict[str, Any]:
        """Returns them as a checkpoint takes them."""
        return dataclasses.asdict(self)
