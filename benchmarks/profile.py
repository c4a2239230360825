"""Where the time of a training step goes, device by device.

    python -m benchmarks.profile --workload=transformer --microbatches=1,2,4,8,16,32

Times the actions of real steps, and divides each device's step into

* `forward`, `recompute`, `backward`: running stage functions (a recomputation is part
  of its backward, and is assumed to take as long as the forward did);
* `accumulate`: gradient accumulation, including deferred matrix products. It is part of
  the backward's stage function, so it is timed separately, on tensors of the same
  sizes, and subtracted;
* `executor`: an action is ready, its device idle, and it has not started yet;
* `transfer`: the same, while it waits for a tensor from another device;
* `idle`: waiting for an action of another device, the bubble;
* `update`: the optimizer's update of the weights, timed separately;
* `other`: the rest of the step: reading and splitting the mini-batch, metrics, Python.

`explained` is all but `other`, relative to the step. Milliseconds, each the mean over
`--steps` steps; `--remat` and `--schedules` take several, with commas.
"""

from __future__ import annotations

import argparse
import collections
import os
from typing import get_args

from benchmarks import tables
from benchmarks.worker import Profile, Remat, Schedule, Side, Worker
from tfgpipe.schedules import Action
from tfgpipe.simulation import Span, Timeline

KINDS = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
}
COLUMNS = (
    "forward",
    "recompute",
    "backward",
    "accumulate",
    "executor",
    "transfer",
    "idle",
    "update",
    "other",
)


def divide(profile: Profile) -> list[dict[str, float]]:
    """Returns for each device how long a step did what, in seconds.

    Args:
        profile: One step, with the time of its actions.
    """
    timeline = profile.timeline
    shares = [_actions(timeline, p) for p in range(timeline.schedule.num_devices)]
    for share, accumulate, update in zip(
        shares, profile.accumulate, profile.update, strict=True
    ):
        share["accumulate"] = min(accumulate, share["backward"])
        share["backward"] -= share["accumulate"]
        share["update"] = update
        share["other"] = profile.seconds - sum(share.values())
    return [{name: share[name] for name in COLUMNS} for share in shares]


def _actions(timeline: Timeline, device: int) -> dict[str, float]:
    """Divides what lies between the first action of all and the last."""
    share: dict[str, float] = collections.defaultdict(float)
    ends = _ends(timeline)
    place = timeline.schedule.placement
    free = timeline.start
    mine = [span for span in timeline.spans if span.device == device]
    for span in sorted(mine, key=lambda span: span.start):
        needs = timeline.schedule.dependencies(_action(timeline, span))
        arrivals = {ends[action]: place[action.stage] for action in needs}
        last = max(arrivals, default=free)
        ready = min(max(free, last), span.start)
        share["idle"] += ready - free
        waits_for_another = last > free and arrivals[last] != device
        share["transfer" if waits_for_another else "executor"] += span.start - ready
        share[KINDS[span.kind.name]] += span.duration
        free = span.end
    share["idle"] += timeline.end - free
    return share


def _ends(timeline: Timeline) -> dict[Action, float]:
    ends: dict[Action, float] = {}
    for span in timeline.spans:
        if span.kind.is_pass:
            ends[Action(span.kind, span.stage, span.microbatch)] = span.end
    return ends


def _action(timeline: Timeline, span: Span) -> Action:
    """Returns the action that a span is of; a recomputation's is its backward."""
    if span.kind.is_pass:
        return Action(span.kind, span.stage, span.microbatch)
    order = timeline.schedule.orders[span.device]
    return next(
        action
        for action in order
        if (action.stage, action.microbatch) == (span.stage, span.microbatch)
        and action.kind.recomputes
    )


def measure(side: Side, *, steps: int, warmup: int = 2) -> list[tables.Row]:
    """Profiles one side and returns a row for each device."""
    with Worker(side) as worker:
        for _ in range(warmup):
            worker.profile()
        profiles = [worker.profile() for _ in range(steps)]
    divided = [divide(profile) for profile in profiles]
    seconds = sum(profile.seconds for profile in profiles) / steps
    rows = []
    for device in range(side.num_devices or side.num_stages or 1):
        mean = {
            name: sum(step[device][name] for step in divided) / steps
            for name in COLUMNS
        }
        rows.append(
            {
                "workload": side.workload,
                "schedule": side.schedule,
                "remat": side.remat,
                "M": side.num_microbatches,
                "device": device,
                "step": 1e3 * seconds,
                **{name: 1e3 * value for name, value in mean.items()},
                "explained": 1 - mean["other"] / seconds,
            }
        )
    return rows


def main() -> None:
    """Profiles what the flags describe and prints a table."""

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description="Divides a training step's time.")
    parser.add_argument(
        "--workload", choices=("mlp", "transformer"), default="transformer"
    )
    parser.add_argument("--microbatches", type=names, default=["4", "8", "16"])
    parser.add_argument("--schedules", type=names, default=list(get_args(Schedule)))
    parser.add_argument("--remat", type=names, default=["none", "stage"])
    parser.add_argument("--devices", type=int, default=2, help="P, one core each")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    rows: list[tables.Row] = []
    for remat in flags.remat:
        for schedule in flags.schedules:
            for num_microbatches in map(int, flags.microbatches):
                if schedule != "gpipe" and num_microbatches < flags.devices:
                    continue  # These keep every device busy from the start.
                rows += measure(
                    _side(flags, schedule, remat, num_microbatches), steps=flags.steps
                )
                print(tables.draw(rows[-flags.devices :]), flush=True)
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


def _side(
    flags: argparse.Namespace, schedule: Schedule, remat: Remat, num_microbatches: int
) -> Side:
    return Side(
        workload=flags.workload,
        num_stages=flags.devices * (2 if schedule == "interleaved" else 1),
        num_devices=flags.devices,
        num_microbatches=num_microbatches,
        schedule=schedule,
        remat=remat,
        executor="serial",
        cores=tuple(sorted(os.sched_getaffinity(0))[: flags.devices]),
    )


if __name__ == "__main__":
    main()
