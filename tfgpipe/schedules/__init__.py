"""Pipeline schedules: the order of forward and backward actions on each device.

With `F` a forward, `B` a backward and one column a time slot, the dots are the
*bubble*, in which a device waits. K is the number of stages, M of microbatches, P of
devices, and v = K / P of stages on each device.

| name | bubble, share of the step | microbatches in flight at stage k |
|---|---|---|
| `gpipe` | (K - 1) / (M + K - 1) | M |
| `1f1b` | (K - 1) / (M + K - 1) | min(K - k, M) |
| `interleaved` | (P - 1) / (v M + P - 1) | more than 1F1B's, of smaller stages |
| `zero_bubble` | (K - 1) / (3 M + K - 1), if F, B and W take equally long | min(K, M) |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.schedules import kinds as kinds
    from tfgpipe.schedules.kinds import ActionKind as ActionKind
    from tfgpipe.schedules.named import NAMES as NAMES
    from tfgpipe.schedules.named import Name as Name
    from tfgpipe.schedules.named import gpipe as gpipe
    from tfgpipe.schedules.named import interleaved as interleaved
    from tfgpipe.schedules.named import make as make
    from tfgpipe.schedules.named import one_f_one_b as one_f_one_b
    from tfgpipe.schedules.named import zero_bubble as zero_bubble
    from tfgpipe.schedules.passes import insert_before as insert_before
    from tfgpipe.schedules.schedule import Action as Action
    from tfgpipe.schedules.schedule import Schedule as Schedule
    from tfgpipe.schedules.schedule import action_labels as action_labels
    from tfgpipe.schedules.schedule import draw as draw

__all__, __getattr__, __dir__ = lazy_exports(__name__)
