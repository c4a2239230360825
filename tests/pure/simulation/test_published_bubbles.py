"""Bubbles beside those that the authors of zero bubble schedules have published.

Qi et al. 2024 ("Zero Bubble Pipeline Parallelism", arXiv 2401.10241): times of passes
in milliseconds are those of table 6, bubbles those of table 5.
"""

from __future__ import annotations

import pytest

from tfgpipe import Costs, simulate
from tfgpipe.schedules import SchedulePolicy, interleaved, one_f_one_b, zero_bubble
from tfgpipe.schedules.named.interleaved import Interleaved

# Devices, stages on each when interleaved; microbatches, F, B, W, transfer; bubbles of
# 1F1B, interleaved, ZB-H1.
PUBLISHED = [
    (8, 3, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585),
    (8, 3, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242),
    (8, 3, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674),
    (8, 4, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323),
    (8, 4, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045),
    (8, 4, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554),
    (16, 3, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104, 0.1397),
    (16, 3, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852, 0.1088),
    (16, 3, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445, 0.0576),
    (32, 2, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1493, 0.1421),
    (32, 2, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1164, 0.1106),
    (32, 2, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0624, 0.0594),
]


@pytest.mark.parametrize(
    "case", PUBLISHED, ids=lambda case: "-".join(map(str, case[:3]))
)
def test_bubbles_are_the_published_ones(case):
    P, v, M, F, B, W, transfer, of_1f1b, of_interleaved, of_zero_bubble = case
    busy = M * (F + B + W)

    def step(policy: SchedulePolicy, v: int) -> float:
        costs = Costs(
            forward=F / v,
            backward=(B + W) / v,
            backward_input=B / v,
            backward_weight=W / v,
            latency=transfer,
        )
        schedule = policy(v * P, M, num_devices=P)
        return simulate(schedule, costs).timeline.step_time

    assert 1 - busy / step(one_f_one_b, 1) == pytest.approx(of_1f1b, abs=6e-5)
    assert 1 - busy / step(zero_bubble, 1) == pytest.approx(of_zero_bubble, abs=6e-5)
    # Of the 2 (v - 1) ways from the last device back to the first theirs does not count
    # one. Ours wait for all; groups of 2 P microbatches, if they fit, for none.
    ours = step(interleaved, v)
    one_way = P * transfer
    assert 1 - busy / (ours - one_way) == pytest.approx(of_interleaved, abs=6e-5)
    if M % (2 * P) == 0:
        hidden = step(Interleaved(group_size=2 * P), v)
        assert ours - hidden == pytest.approx(2 * (v - 1) * one_way)
        assert 1 - busy / hidden < of_interleaved
