"""The state of a run besides its variables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfgpipe_trainer.errors import CheckpointError


@dataclasses.dataclass(kw_only=True)
class RunState:
    """The state of a run besides variables, with which it goes on as if never stopped.

    Attributes:
        best_step: The step of the best evaluation.
        best_value: The metric at that step.
        num_worse: Evaluations since.
        skipped: Steps left out because they were not finite.
        loss_sum: The sum of the losses since the last record of `metrics.jsonl`.
        num_losses: The number of these losses.
        metric_sums: The sums of the other metrics of the same steps, by name.
    """

    best_step: int | None = None
    best_value: float | None = None
    num_worse: int = 0
    skipped: list[int] = dataclasses.field(default_factory=list)
    loss_sum: float = 0.0
    num_losses: int = 0
    metric_sums: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> RunState:
        """Returns the notes of a checkpoint.

        Raises:
            CheckpointError: If they are not those of this version.
        """
        written = {"metric_sums": {}, **written}  # Format 2 had none.
        expected = [each.name for each in dataclasses.fields(cls)]
        if sorted(written) != sorted(expected):
            raise CheckpointError(
                f"Expected a checkpoint whose notes are {', '.join(expected)}; "
                f"received {', '.join(written) or 'none'}. Go on with the version that "
                "wrote it."
            )
        return cls(**written)

    def count(self, values: Mapping[str, float]) -> None:
        """Adds the loss and the metrics of a step to the sums.

        A step whose loss is not finite counts as none.
        """
        if not math.isfinite(values["loss"]):
            return
        if not self.num_losses:  # A checkpoint of format 2 may be amid a record.
            self.metric_sums = {name: 0.0 for name in values if name != "loss"}
        self.num_losses += 1
        self.loss_sum += values["loss"]
        for name in self.metric_sums:
            self.metric_sums[name] += values[name]

    def means(self) -> dict[str, float]:
        """Returns the mean loss, and metrics, since the last record."""
        sums = {"loss": self.loss_sum, **self.metric_sums}
        if not self.num_losses:
            return dict.fromkeys(sums, math.nan)
        return {name: value / self.num_losses for name, value in sums.items()}

    def start_record(self) -> None:
        """Begins the sums anew."""
        self.loss_sum, self.num_losses = 0.0, 0

    def is_over(self, patience: int | None) -> bool:
        """Returns whether a run ends here, as too long nothing was better."""
        return patience is not None and self.num_worse >= patience

    def written(self) -> dict[str, Any]:
        """Returns them as a checkpoint takes them."""
        return dataclasses.asdict(self)
