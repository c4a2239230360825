"""Settings of a pipeline on the devices here, each with its predicted step.

A setting is K, M, a schedule and a rematerialisation policy; its cut is the best by the
times of layers. These are measured layer by layer, for each M, and corrected by the
stages of pipelines that have run: see `tuning`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfgpipe import partition, schedules
from tfgpipe._util import argument_checks
from tfgpipe.costs import PassCost
from tfgpipe.devices import default_devices
from tfgpipe.partition import PipelineConfig, Plan, balances
from tfgpipe.simulation import Costs, best_schedule, find_schedule, simulate

# Options of which several values may be given, to choose from.
CHOSEN = ("num_stages", "num_microbatches", "schedule", "remat")
# Of schedules that take as long the first is preferred.
_SCHEDULES = tuple(dict.fromkeys(("1f1b", *schedules.NAMES)))
# With so many microbatches a device, a bubble is less than an eighth of the step.
_MOST_A_DEVICE = 8


@dataclasses.dataclass(frozen=True)
class Choices:
    """Values of options to choose from.

    Attributes:
        given: The values of those of `CHOSEN` that are given.
        fixed: The other options.
        batch: The mini-batch, as a dataset has it.
        num_examples: Number of its examples.
    """

    given: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any]
    batch: tuple[Any, ...]
    num_examples: int

    @classmethod
    def of(cls, options: Mapping[str, Any], batch: Any) -> Choices:
        """Returns the choices that options give, after checking them.

        Raises:
            TypeError: If an option has another name.
            ValueError: If a value is wrong, or the mini-batch.
        """
        names = {x.name for x in dataclasses.fields(PipelineConfig)}
        names -= {"balance", "partition"}
        others = {name: x for name, x in options.items() if name not in names}
        argument_checks.check_argument_names(others)
        if others:
            raise TypeError(
                f"There is no argument {', '.join(map(repr, others))} to tune with. "
                f"Expected {', '.join(sorted(names))}."
            )
        given = {
            name: value if isinstance(value, list | tuple) else [value]
            for name, value in options.items()
            if name in CHOSEN
        }
        fixed = {name: x for name, x in options.items() if name not in CHOSEN}
        for name, values in {**given, **{n: [x] for n, x in fixed.items()}}.items():
            for value in values:  # A wrong one is reported before anything is timed.
                PipelineConfig(**{"num_microbatches": 1, name: value})
        if not isinstance(batch, tuple) or not 1 <= len(batch) <= 3:
            raise ValueError(
                "`batch` is a tuple `(x, y)`, `(x, y, sample_weight)`, or `(x,)`. "
                f"Received {type(batch).__name__}."
            )
        while batch[-1] is None and len(batch) > 1:
            batch = batch[:-1]  # A dataset has no such element.
        rows = {len(x) for x in keras.tree.flatten(batch) if x is not None}
        if len(rows) != 1:
            raise ValueError(
                "All arrays of a mini-batch have a row for each example. Received "
                f"arrays of {sorted(rows)} rows."
            )
        return cls(given, fixed, batch, rows.pop())

    def configs(self, num_devices: int) -> Iterator[list[PipelineConfig]]:
        """Yields settings, each as a list of those that differ in `remat` alone.

        Of such a list the first that fits into memory is the fastest, unless the
        policies are given.

        Args:
            num_devices: The number of devices that there are.
        """
        powers = [
            2**i
            for i in range(self.num_examples.bit_length())
            if 2**i <= _MOST_A_DEVICE * num_devices and self.num_examples % 2**i == 0
        ]
        counts = {2**i for i in range(num_devices.bit_length())}
        K = sorted({*counts, num_devices, 2 * num_devices})
        for M in self.given.get("num_microbatches", powers):
            for num_stages in self.given.get("num_stages", K):
                for schedule in self.given.get("schedule", _SCHEDULES):
                    yield [
                        PipelineConfig(
                            **self.fixed,
                            num_stages=num_stages,
                            num_microbatches=M,
                            schedule=schedule,
                            remat=policy,
                        )
                        for policy in self.given.get("remat", ("none", "auto"))
                    ]


class LayerTimes:
    """Times of a model's layers by the number of microbatches, corrected by trials.

    Args:
        model: The model.
        x: The inputs of a mini-batch.
    """

    def __init__(self, model: keras.Model, x: Any) -> None:
        self._model = model
        self._x = x
        # By M, and by the policy if it says which results are saved.
        self._plans: dict[tuple[int, Any], Plan] = {}

    def plan(self, config: PipelineConfig) -> Plan:
        """Returns a plan of one stage with the times of all calls."""
        M, policy = config.num_microbatches, config.remat
        key = M, policy if policy.saves_results else None
        if key not in self._plans:
            self._plans[key] = partition.plan(
                self._model,
                sample=self._x,
                device=(config.devices or default_devices())[0],
                num_stages=1,
                num_microbatches=M,
                balance="time",
                remat=policy,
                transfer_dtype=config.transfer_dtype,
            )
        return self._plans[key]

    def correct(self, setting: Setting, measured: Costs) -> None:
        """Corrects the times of calls by those of their stages.

        Args:
            setting: A setting that was timed.
            measured: Seconds of its stages.
        """
        predicted = setting.costs
        factors: list[tuple[float, float]] = []
        for k, num_calls in enumerate(setting.plan.calls_per_stage):
            forward = _ratio(measured.seconds("forward", k), predicted, "forward", k)
            both = sum(measured.seconds(x, k) for x in ("backward", "recompute"))
            again = forward * predicted.seconds("recompute", k)
            backward = _ratio(max(both - again, both / 2), predicted, "backward", k)
            factors += [(forward, backward)] * num_calls
        for key, plan in self._plans.items():
            if key[0] == setting.config.num_microbatches:
                self._plans[key] = _scaled(plan, factors)


def _ratio(measured: float, predicted: Costs, name: str, k: int) -> float:
    """Returns a measured time over the predicted one, or 1 if that is zero."""
    seconds = predicted.seconds(name, k)
    return measured / seconds if seconds else 1.0


def _scaled(plan: Plan, factors: Sequence[tuple[float, float]]) -> Plan:
    """Returns a plan with factors on the forward and the backward of each call."""
    layers = []
    for layer, (forward, backward) in zip(plan.profile.layers, factors, strict=True):
        cost = layer.seconds
        again = None if cost.recompute is None else cost.recompute * forward
        seconds = PassCost(cost.forward * forward, cost.backward * backward, again)
        layers.append(dataclasses.replace(layer, seconds=seconds))
    profile = dataclasses.replace(plan.profile, layers=tuple(layers))
    return dataclasses.replace(plan, profile=profile)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting with its best cut.

    Attributes:
        config: The setting, with its cut.
        plan: The plan of the cut.
        costs: Seconds of its stages.
        overhead: Seconds of a step beside its actions, such as updates.
    """

    config: PipelineConfig
    plan: Plan
    costs: Costs
    overhead: float = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        """All by which two trials differ."""
        plan = self.plan
        return plan.settings.schedule.orders, self.config.remat, plan.calls_per_stage

    @property
    def num_devices(self) -> int:
        """P."""
        return self.plan.settings.schedule.num_devices

    @functools.cached_property
    def predicted(self) -> float:
        """Predicted seconds of a step."""
        order = self.plan.settings.schedule
        return simulate(order, self.costs).timeline.step_time + self.overhead

    @property
    def bound_by_work(self) -> float:
        """Seconds that a device takes for its share of the passes, at least."""
        K, M = self.plan.settings.num_stages, self.plan.settings.num_microbatches
        names = ("forward", "backward", "recompute")
        work = sum(self.costs.seconds(name, k) for name in names for k in range(K))
        return M * work / self.num_devices + self.overhead

    @property
    def lower_bound(self) -> float:
        """Seconds that a step of these stages takes at least, in any order."""
        order = self.plan.settings.schedule
        found = best_schedule(
            self.costs, order.placement, order.num_microbatches, effort=0
        )
        return found.lower_bound + self.overhead


def simplest(settings: Sequence[Setting]) -> Setting | None:
    """Returns the fastest setting, or that of fewer actions which takes 1% longer."""
    fastest = min((x.predicted for x in settings), default=0.0)
    near = [x for x in settings if x.predicted <= 1.01 * fastest]
    return min(near, key=lambda x: len(x.plan.settings.schedule.slots), default=None)


class Settings:
    """All settings for a model and the devices here.

    Args:
        choices: The options.
        times: Times of the layers.
    """

    def __init__(self, choices: Choices, times: LayerTimes) -> None:
        self._choices, self._times = choices, times
        # By the number of devices.
        self._overheads: dict[int, float] = {}

    def correct(self, setting: Setting, measured: Costs, seconds: float) -> None:
        """Corrects times by a setting that was timed.

        Args:
            setting: The setting.
            measured: Seconds of the stages.
            seconds: Seconds of a step.
        """
        self._times.correct(setting, measured)
        order = setting.plan.settings.schedule
        passes = simulate(order, measured).timeline.step_time
        self._overheads[setting.num_devices] = max(seconds - passes, 0.0)

    def all(self) -> list[Setting]:
        """Returns all settings that fit, each with its best cut.

        Raises:
            ValueError: If none does.
        """
        available = self._num_devices
        found, missing, refused = [], math.inf, None
        for configs in self._choices.configs(available):
            for config in configs:
                K = config.num_stages or 1
                P = config.schedule.choose_num_devices(K, available)
                if available < P:
                    continue
                times = self._times.plan(config)
                try:
                    found.append(self._setting(times, config, P))
                except ValueError as error:
                    refused = error
                    missing = min(missing, _missing_bytes(times, config, P))
                    continue
                if "remat" not in self._choices.given:
                    break  # The first that fits recomputes least.
        if not found:
            memory = (
                f"The leanest lacks {missing:,.0f} bytes on one device. "
                if 0 < missing < math.inf
                else ""
            )
            raise ValueError(
                f"No setting can be run on {available} devices. {memory}Received "
                f"{dict(self._choices.given)}, {dict(self._choices.fixed)}. Give more "
                "choices, or leave them out."
            ) from refused
        return found

    def in_best_order(self, setting: Setting) -> Setting | None:
        """Returns a setting in the order that a search finds, if one may be chosen."""
        config = dataclasses.replace(
            setting.config, schedule=find_schedule("auto"), partition=None
        )
        if "schedule" in self._choices.given:
            return None
        try:
            times = self._times.plan(config)
            return self._setting(times, config, setting.num_devices)
        except ValueError:
            return None

    def least_seconds(self) -> float:
        """Returns a lower bound on the step of all settings, in any order."""
        least = math.inf
        for setting in sorted(self.all(), key=lambda x: x.bound_by_work):
            if setting.bound_by_work >= least:
                break
            least = min(least, setting.lower_bound)
        return least

    @functools.cached_property
    def _num_devices(self) -> int:
        """The number of devices for stages; those in shards have several."""
        names = self._choices.fixed.get("devices") or default_devices()
        (config, *_), *_ = self._choices.configs(1)
        shards = len(self._times.plan(config).profile.shards)
        return len(names) // shards

    def _setting(
        self, times: Plan, config: PipelineConfig, num_devices: int
    ) -> Setting:
        """Returns a setting with its best cut; raises ValueError if there is none.

        Args:
            times: A plan with the times of the calls.
            config: The setting.
            num_devices: P.
        """
        plan = times.under(config, num_devices)
        # Of other numbers of devices none is known, and they are worth a trial.
        overhead = self._overheads.get(num_devices, 0.0)
        chosen: dict[str, Any] = {"partition": plan.calls_per_stage}
        if plan.settings.order is not config.schedule:
            chosen["schedule"] = plan.settings.schedule  # As found for the costs.
        if config.devices is not None:
            chosen["devices"] = config.devices[: num_devices * len(plan.profile.shards)]
        config = dataclasses.replace(config, **chosen)
        return Setting(config, plan, plan.costs, overhead)


def _missing_bytes(times: Plan, config: PipelineConfig, num_devices: int) -> float:
    """Returns the bytes that a device lacks; infinity if that is not the reason."""
    if config.memory_limit is None:
        return math.inf
    try:
        free = dataclasses.replace(config, memory_limit=None)
        plan = dataclasses.replace(times, quantity=balances.find("memory"))
        lean = plan.under(free, num_devices)
    except ValueError:
        return math.inf
    limited = dataclasses.replace(lean.settings, memory_limit=config.memory_limit)
    need, limit = dataclasses.replace(lean, settings=limited).fullest
    return need - limit
