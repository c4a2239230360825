"""Balances: the cost of stages whose largest a partition minimises, as values.

| name | cost of a stage | adds up over layers |
|---|---|---|
| `params` | numbers in its weights | yes |
| `flops` | FLOPs of a microbatch: forward, backward, recomputation | with even remat |
| `time` | seconds of the same, measured | with even remat |
| `memory` | bytes, with the microbatches that the schedule has in flight | no |

A balance of one's own is a function of the cost of a layer.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from tfgpipe._util import Choice, choices, readable_count
from tfgpipe.costs import LayerCost, PassCost

if TYPE_CHECKING:
    from tfgpipe.costs import tables
    from tfgpipe.partition.profiles import CallProfile, PlanSettings


@dataclasses.dataclass(frozen=True)
class Balance(Choice, abc.ABC):
    """A cost of stages, whose largest value the partition minimises.

    A balance of one's own is a frozen dataclass, given as `balance`:

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Activations(tfgpipe.Balance):
    ...     name = "activations"
    ...     def layer_cost(self, layer):
    ...         return layer.tensors.saved
    >>> model = keras.Sequential([keras.Input((8,))])
    >>> for units in (64, 8, 8, 8):
    ...     model.add(keras.layers.Dense(units))
    >>> options = {"num_stages": 2, "num_microbatches": 4}
    >>> tfgpipe.plan(model, balance=Activations(), **options).calls_per_stage
    (1, 3)

    To be saved with a model, it is registered with
    `keras.saving.register_keras_serializable`.

    Attributes:
        name: Name in tables and saved models. Of the class.
        column: Title of the work of stages in the table of a plan. Of the class.
        needs_trace: True if costs are more than the number of weights, so that layers
            are traced. Of the class.
        is_measured: True if layers are timed on a device. Of the class.
        is_memory: True if the cost is that which `memory_limit` is a limit on. Of the
            class.
        slack: Relative difference below which bottlenecks are the same; fewer bytes
            between stages then decide. Of the class.
    """

    column: ClassVar[str] = "FLOPs"
    needs_trace: ClassVar[bool] = True
    is_measured: ClassVar[bool] = False
    is_memory: ClassVar[bool] = False
    slack: ClassVar[float] = 0.0

    @abc.abstractmethod
    def layer_cost(self, layer: LayerCost) -> float:
        """Returns the cost of a layer on one microbatch, without recomputation.

        Args:
            layer: Weights, FLOPs, seconds and bytes of the layer, for one microbatch.
        """

    def recomputed_cost(self, layer: LayerCost) -> float:
        """Returns the cost that each recomputation of a layer adds: none by default."""
        del layer
        return 0.0

    def work_text(self, *, cost: float, flops: float) -> str:
        """Returns an entry of the column, of one stage.

        Args:
            cost: The cost of a stage.
            flops: FLOPs of a stage.
        """
        del cost
        return readable_count(flops)

    def call_costs(self, profile: CallProfile, settings: PlanSettings) -> list[float]:
        """Returns the cost of each call.

        Where costs of calls do not add up to those of a stage, it is that of a call
        amid the first stage.
        """
        again = settings.load.recomputed(0, 2 * len(profile.layers))[0]
        return [
            self.layer_cost(x) + again * self.recomputed_cost(x) for x in profile.layers
        ]

    def stage_cost(
        self, profile: CallProfile, settings: PlanSettings, k: int, span: slice
    ) -> float:
        """Returns the cost of stage k of some calls, on its device."""
        layers = profile.layers[span]
        counts = settings.load.recomputed(k, len(layers))
        again = zip(counts, map(self.recomputed_cost, layers), strict=True)
        work = sum(map(self.layer_cost, layers)) + sum(n * cost for n, cost in again)
        return work / settings.speed(k)

    def solver_costs(
        self, profile: CallProfile, settings: PlanSettings
    ) -> Sequence[float] | Sequence[tables.Floats]:
        """Returns the cost of each call; or of stages, where they do not add up.

        That is for each stage the cost of the calls [s, e), at index [s, e].
        """
        load, layers = settings.load, profile.layers
        recomputed = [*map(self.recomputed_cost, layers)]
        speeds = [*map(settings.speed, range(settings.num_stages))]
        is_additive = load.is_additive or not any(recomputed)
        if is_additive and len({*speeds}) == 1:
            return self.call_costs(profile, settings)
        from tfgpipe.costs import tables  # With NumPy.

        once = tables.range_sums([*map(self.layer_cost, layers)])

        def cost(key: Any) -> tables.Floats:
            work = once + tables.weighted_range_sums(
                recomputed, lambda n: load.recomputed(key[-1], n)
            )
            return work / key[0]

        # Stages of which as much is recomputed cost the same on devices as fast.
        each = [*zip(speeds, load.recomputed_fractions, strict=True)]
        return tables.StageTables([(*x, each.index(x)) for x in each], cost)


@dataclasses.dataclass(frozen=True)
class ParameterBalance(Balance):
    """Numbers in weights, which no trace is needed for."""

    name = "params"
    needs_trace = False

    def layer_cost(self, layer: LayerCost) -> float:
        """Returns the number of weights."""
        return layer.weights.count


@dataclasses.dataclass(frozen=True)
class WorkBalance(Balance):
    """Forward, backward and recomputation: FLOPs."""

    name = "flops"

    def passes(self, layer: LayerCost) -> PassCost:
        """Returns the cost of the passes of a layer."""
        return layer.flops

    def layer_cost(self, layer: LayerCost) -> float:
        """Returns the cost of both passes."""
        return self.passes(layer).forward + self.passes(layer).backward

    def recomputed_cost(self, layer: LayerCost) -> float:
        """Returns the cost of a recomputation."""
        return self.passes(layer).again


@dataclasses.dataclass(frozen=True)
class TimeBalance(WorkBalance):
    """The same in measured seconds, of which small differences are noise."""

    name = "time"
    column = "ms"
    is_measured = True
    slack = 0.005

    def passes(self, layer: LayerCost) -> PassCost:
        """Returns the measured seconds."""
        return layer.seconds

    def work_text(self, *, cost: float, flops: float) -> str:
        """Returns milliseconds."""
        del flops
        return f"{1e3 * cost:.3g}"


@dataclasses.dataclass(frozen=True)
class MemoryBalance(WorkBalance):
    """Bytes on the fullest device of a stage; its calls share its time by FLOPs."""

    name = "memory"
    is_memory = True

    def stage_cost(
        self, profile: CallProfile, settings: PlanSettings, k: int, span: slice
    ) -> float:
        """Returns the bytes of a stage."""
        return profile.stage_memory(settings, k, span.start, span.stop)

    def solver_costs(
        self, profile: CallProfile, settings: PlanSettings
    ) -> Sequence[tables.Floats]:
        """Returns a table of bytes for each stage."""
        return profile.stage_memory_tables(settings)


# The name of a balance.
Name = Literal["params", "flops", "time", "memory"]
NAMES: tuple[Name, ...] = get_args(Name)
"""The names of all balances."""

# An argument `balance`.
BalanceLike: TypeAlias = Name | Balance

flops = WorkBalance()
time = TimeBalance()
_BALANCES: dict[str, Balance] = {
    x.name: x for x in (ParameterBalance(), flops, time, MemoryBalance())
}


def find(balance: Any) -> Balance:
    """Returns the balance of a name, or the balance itself.

    Raises:
        ValueError: If it is neither.
    """
    return choices.find(
        "balance", balance, Balance, _BALANCES, public="tfgpipe.Balance"
    )
