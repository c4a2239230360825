"""Kinds of actions, as values that say all that others need to know of them.

A schedule orders actions, the executor runs them, the simulator times them, and
pictures draw them. None of these knows the kinds by name: they read the fields of
`ActionKind`, and ask its methods. So a kind of one's own is a value as well. A pass
over schedules inserts its actions (see `tfgpipe.schedules.insert_before`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, repr=False)
class ActionKind:
    """A kind of actions: what they are called, wait for, send, free and cost.

    Kinds are equal if their names are.

    Attributes:
        name: Name in saved models, traces and messages.
        letter: Letter in drawings.
        label: Name in legends.
        color: Color in pictures, `#RRGGBB`.
        is_pass: True if every schedule has it, for each stage and microbatch.
        is_backward: True if it needs gradients, and so comes after the loss.
        sends: Direction of its results: 1 to later stages, -1 to earlier ones, 0 to
            none.
        in_flight: Change in the number of microbatches in flight at its stage, from
            forward to the end of the backward: 1, -1 or 0.
        in_backward: Change in the number of microbatches between the halves of their
            backwards at its stage: 1, -1 or 0.
        adds_gradients: True if it adds to the gradients of weights.
        recomputes: True if it begins with rematerialisation.
        is_copy: True if it copies a microbatch, or weights, to or from other memory,
            while its device goes on. One that frees memory begins as soon as it can,
            and the action behind it waits for its end; one that takes memory begins at
            its place.
        gathers: True if it gathers the weights of its stage.
    """

    name: str
    letter: str = dataclasses.field(compare=False)
    label: str = dataclasses.field(compare=False)
    color: str = dataclasses.field(compare=False)
    is_pass: bool = dataclasses.field(default=False, compare=False, kw_only=True)
    is_backward: bool = dataclasses.field(default=False, compare=False, kw_only=True)
    sends: int = dataclasses.field(default=0, compare=False, kw_only=True)
    in_flight: int = dataclasses.field(default=0, compare=False, kw_only=True)
    in_backward: int = dataclasses.field(default=0, compare=False, kw_only=True)
    adds_gradients: bool = dataclasses.field(default=False, compare=False, kw_only=True)
    recomputes: bool = dataclasses.field(default=False, compare=False, kw_only=True)
    is_copy: bool = dataclasses.field(default=False, compare=False, kw_only=True)
    gathers: bool = dataclasses.field(default=False, compare=False, kw_only=True)

    def needs(self, schedule: Any, action: Any) -> tuple[Any, ...]:
        """Returns the actions whose results an action of this kind needs.

        Args:
            schedule: The `tfgpipe.Schedule`.
            action: The `tfgpipe.Action`.
        """
        del schedule
        return (action.of(FORWARD),) if self.is_backward else ()

    def run(self, step: Any, action: Any) -> None:
        """Runs an action of this kind in a step.

        Args:
            step: The `tfgpipe.runtime.Executor` of the step. It has the tensors that a
                stage holds of its microbatches, `saved(k)`, and adds operations to the
                device's order, `emit(action, tensors, function)`.
            action: The action.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `run`.")

    def seconds(self, costs: Any, k: int) -> float:
        """Returns the time of an action of this kind on stage k.

        Args:
            costs: The `tfgpipe.Costs` of the stages.
            k: The stage.
        """
        del costs, k
        return 0.0

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make the kind again."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ActionKind:
        """Makes a kind from what `get_config` returned."""
        return cls(**config)

    def __lt__(self, other: ActionKind) -> bool:
        return self.name < other.name

    def __repr__(self) -> str:
        return repr(self.name)

    def __str__(self) -> str:
        return self.name


class _Pass(ActionKind):
    """A pass of a microbatch through a stage, or a part of one."""

    def run(self, step: Any, action: Any) -> None:
        """Runs the stage function of this name."""
        step.run_pass(action)

    def seconds(self, costs: Any, k: int) -> float:
        """Returns the cost of this name."""
        return float(costs.seconds(self.name, k))


class _Forward(_Pass):
    def needs(self, schedule: Any, action: Any) -> tuple[Any, ...]:
        """Returns the forwards of the stages that send this one their outputs."""
        return tuple(action.at(k) for k in schedule.sources(action.stage))


class _Backward(_Pass):
    def needs(self, schedule: Any, action: Any) -> tuple[Any, ...]:
        """Returns the own forward, and the backwards that send gradients.

        Instead of the forward it may be the copy that has brought the microbatch back.
        """
        k, m = action.stage, action.microbatch
        later = (schedule.backward(target, m)[0] for target in schedule.targets(k))
        return (schedule.brought(k, m), *later)


class _BackwardWeight(_Pass):
    def needs(self, schedule: Any, action: Any) -> tuple[Any, ...]:
        """Returns the other half of the backward."""
        return (action.of(BACKWARD_INPUT),)


class _Copy(ActionKind):
    """A copy of what a stage holds of a microbatch, to the host or back."""

    def needs(self, schedule: Any, action: Any) -> tuple[Any, ...]:
        """Returns the forward, or what took the microbatch away."""
        del schedule
        return (action.of(FORWARD if self.in_flight < 0 else OFFLOAD),)

    def run(self, step: Any, action: Any) -> None:
        """Copies the tensors that backwards read."""
        step.copy_saved(action, to_host=self.in_flight < 0)

    def seconds(self, costs: Any, k: int) -> float:
        """Returns the time on the way between device and host."""
        return float(costs.host_seconds(k))


class _Gather(ActionKind):
    """A gather of the weights of a stage that are in slices on replicas."""

    def needs(self, schedule: Any, action: Any) -> tuple[Any, ...]:
        """Returns nothing: weights are there from the beginning."""
        del schedule, action
        return ()

    def run(self, step: Any, action: Any) -> None:
        """Gathers the weights."""
        step.gather_weights(action)

    def seconds(self, costs: Any, k: int) -> float:
        """Returns the time in which the slices of other replicas arrive."""
        return float(costs.gather_seconds(k))


# Colors that the color-blind tell apart (Okabe and Ito 2008).
FORWARD = _Forward(
    *("forward", "F", "forward", "#0072B2"), is_pass=True, sends=1, in_flight=1
)
RECOMPUTE = _Pass("recompute", "r", "recompute", "#E69F00", is_backward=True)
BACKWARD = _Backward(
    *("backward", "B", "backward", "#009E73"),
    is_pass=True,
    is_backward=True,
    sends=-1,
    in_flight=-1,
    adds_gradients=True,
    recomputes=True,
)
BACKWARD_INPUT = _Backward(
    *("backward_input", "B", "input gradient", "#F0E442"),
    is_pass=True,
    is_backward=True,
    sends=-1,
    in_backward=1,
    recomputes=True,
)
BACKWARD_WEIGHT = _BackwardWeight(
    *("backward_weight", "W", "weight gradient", "#CC79A7"),
    is_pass=True,
    is_backward=True,
    in_flight=-1,
    in_backward=-1,
    adds_gradients=True,
)

OFFLOAD = _Copy("offload", "O", "to host", "#56B4E9", in_flight=-1, is_copy=True)
RELOAD = _Copy(
    *("reload", "R", "from host", "#D55E00"),
    is_backward=True,
    in_flight=1,
    is_copy=True,
)

# By kind of the pass that waits for it.
GATHERS: dict[ActionKind, ActionKind] = {
    kind: _Gather(
        *(f"gather_{kind.name}", "G", "gather", "#999999"),
        is_backward=kind.is_backward,
        is_copy=True,
        gathers=True,
    )
    for kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
}

# Those of this library, in the order in which a microbatch has them. `RECOMPUTE` is
# part of the backward's action, and apart in timelines alone.
KINDS = (
    *(GATHERS[FORWARD], FORWARD, OFFLOAD, RELOAD),
    *(GATHERS[BACKWARD], GATHERS[BACKWARD_INPUT], RECOMPUTE),
    *(BACKWARD, BACKWARD_INPUT, GATHERS[BACKWARD_WEIGHT], BACKWARD_WEIGHT),
)


def sort(kinds: Iterable[ActionKind]) -> list[ActionKind]:
    """Returns each kind once, in the order in which a microbatch has them."""
    found = set(kinds)
    known = [kind for kind in KINDS if kind in found]
    return [*known, *sorted(found.difference(known))]


def find(kind: str | ActionKind) -> ActionKind:
    """Returns the kind of a name, or the kind itself.

    Raises:
        ValueError: If there is none of this name.
    """
    if isinstance(kind, ActionKind):
        return kind
    for known in KINDS:
        if known.name == kind:
            return known
    names = ", ".join(repr(known.name) for known in KINDS if known.is_pass)
    raise ValueError(
        f"An action has a kind, one of {names}, or a `tfgpipe.schedules.ActionKind` of "
        f"its own. Received {kind!r}."
    )
