"""Pipeline schedules: the order of forward and backward actions on each device.

A schedule is a value. The named ones are made by policies, values as well, each in a
file of `tfgpipe.schedules.named`; so is one of one's own.

With `F` a forward, `B` a backward and one column a time slot, the dots are the
*bubble*, in which a device waits. K is the number of stages, M of microbatches, P of
devices, and v = K / P of stages on each device.

| name | bubble, share of the step | microbatches in flight at stage k |
|---|---|---|
| `gpipe` | (K - 1) / (M + K - 1) | M |
| `1f1b` | (K - 1) / (M + K - 1) | min(K - k, M) |
| `interleaved` | (P - 1) / (v M + P - 1) | more than 1F1B's, of smaller stages |
| `zero_bubble` | (K - 1) / (3 M + K - 1), if F, B and W take equally long | min(K, M) |
| `looped_bfs` | (P - 1) / (v M + P - 1) | M |
| `eager_1f1b` | (K - 1) / (M + K - 1) | min(2 (K - k) - 1, M) |

If F, B and W take equally long, with two stages (or v) on each of P > 2 devices, and M
a multiple of P of at least 2 P:

| name | bubble, passes of a stage | microbatches of a stage in flight on a device |
|---|---|---|
| `interleaved_zb` | P - 1 | v P |
| `zbv` | P - 1 | 2 P |
| `v_half` | 3 P - 5, 3 P - 4 for odd P | 2 floor(P / 2 + 1) |
| `v_min` | 4 P - 5 | 2 floor((P + 4) / 3) |
| `dualpipe_v` | P - 1 | 2 P + 1 |
"""

from tfgpipe.schedules import kinds
from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.gather import Gather
from tfgpipe.schedules.kinds import ActionKind
from tfgpipe.schedules.offload import Offload
from tfgpipe.schedules.policy import SchedulePolicy
from tfgpipe.schedules.registry import (
    NAMES,
    Name,
    find,
    gpipe,
    interleaved,
    make,
    one_f_one_b,
)
from tfgpipe.schedules.schedule import Action, Schedule, draw

__all__ = [
    "NAMES",
    "Action",
    "ActionKind",
    "DataFlow",
    "Gather",
    "Name",
    "Offload",
    "Schedule",
    "SchedulePolicy",
    "draw",
    "find",
    "gpipe",
    "interleaved",
    "kinds",
    "make",
    "one_f_one_b",
]
