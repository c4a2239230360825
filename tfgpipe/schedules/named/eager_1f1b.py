"""Eager 1F1B: forwards earlier, to hide transfers."""

from __future__ import annotations

import dataclasses

from tfgpipe.schedules.named.one_f_one_b import OneFOneB


@dataclasses.dataclass(frozen=True)
class EagerOneFOneB(OneFOneB):
    """1F1B whose forwards come one period earlier for each stage that follows.

    Zhuang et al. 2023 ("On Optimizing the Communication of Model Parallelism",
    section 4). The bubble is that of 1F1B, (K - 1) / (M + K - 1), but activations
    arrive before they are needed, which hides their transfers. Stage k holds
    min(2 (K - k) - 1, M) microbatches for that. For K=4, M=8, one stage a device:

        stage 0  F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 .. B2 .. B3 .. B4 .. B5 .. B6 .. B7
        stage 1  .. F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 .. B4 .. B5 .. B6 .. B7 ..
        stage 2  .. .. F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .. B6 .. B7 .. ..
        stage 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .. .. ..

    """

    name = "eager_1f1b"

    def num_warmup(self, height: int) -> int:
        """Returns nearly twice as many as in 1F1B."""
        return 2 * height - 1
