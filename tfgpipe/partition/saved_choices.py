"""Choices in saved models: names, or configurations of values that have none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import keras

from tfgpipe import remat as remat_lib
from tfgpipe.capture import source_model
from tfgpipe.partition import balances
from tfgpipe.schedules import (
    Action,
    DataFlow,
    Gather,
    Offload,
    Schedule,
    SchedulePolicy,
    kinds,
)
from tfgpipe.simulation import ScheduleName, find_schedule
from tfgpipe.stage import Codec, codecs

# Of no name, since it has no default.
keras.saving.register_keras_serializable("tfgpipe")(remat_lib.NamesRemat)

_Save: TypeAlias = Callable[[Any], Any]


def save_choice(find: Callable[[Any], Any], names: Sequence[str]) -> _Save:
    """Returns a function that returns the name of a choice, or its configuration.

    Args:
        find: Returns the value of a name.
        names: All names.
    """

    def save(value: Any) -> Any:
        named: Any = find(value.name) if value.name in names else None
        if named == value:
            return value.name
        if type(named) is type(value):  # With other arguments.
            return {"name": value.name, "arguments": value.get_config()}
        return keras.saving.serialize_keras_object(value)

    return save


save_balance = save_choice(balances.find, balances.NAMES)
save_remat = save_choice(remat_lib.find, remat_lib.NAMES)
_save_codec = save_choice(codecs.find, get_args(codecs.TransferDtype))
_ORDERS = list(get_args(ScheduleName))
for _insertion in (Offload, Gather):
    _ORDERS += [name + _insertion.suffix for name in _ORDERS]
_save_policy = save_choice(find_schedule, _ORDERS)
# By argument, what finds the value of a name.
_FIND: Mapping[str, Callable[[Any], Any]] = {
    "balance": balances.find,
    "remat": remat_lib.find,
    "transfer_dtype": codecs.find,
    "schedule": find_schedule,
}


def save_codec(codec: Codec) -> Any:
    """Returns the name of a codec, None for no compression, or its configuration."""
    return None if codec == codecs.find(None) else _save_codec(codec)


def save_dtype(dtype: Any) -> Any:
    """Returns the configuration of a dtype policy, or None for none."""
    if dtype is None:
        return None
    return keras.dtype_policies.serialize(keras.dtype_policies.get(dtype))


def save_schedule(schedule: SchedulePolicy | Schedule) -> Any:
    """Returns the name of a policy, or the configuration of a policy or schedule."""
    if isinstance(schedule, SchedulePolicy):
        return _save_policy(schedule)
    actions = [[vars(action) for action in order] for order in schedule.orders]
    used = {action["kind"] for order in actions for action in order}
    return {
        **{x.name: getattr(schedule, x.name) for x in dataclasses.fields(schedule)},
        "flow": schedule.flow and [list(stages) for stages in schedule.flow.sources],
        "orders": [[{**x, "kind": x["kind"].name} for x in order] for order in actions],
        "kinds": {
            kind.name: keras.saving.serialize_keras_object(kind)
            for kind in used.difference(kinds.KINDS)
        },
    }


def _load_schedule(config: Mapping[str, Any]) -> Schedule:
    own = {
        name: keras.saving.deserialize_keras_object(kind)
        for name, kind in config.get("kinds", {}).items()
    }
    orders = tuple(
        tuple(Action(**{**x, "kind": own.get(x["kind"], x["kind"])}) for x in order)
        for order in config["orders"]
    )
    flow = config.get("flow")
    values = {name: value for name, value in config.items() if name != "kinds"}
    flow = flow and DataFlow(tuple(map(tuple, flow)))
    return Schedule(**{**values, "orders": orders, "flow": flow})


def load_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a saved pipeline, of `layers` and `PipelineConfig`."""
    layers = source_model.from_config(config["layers"])
    return {**load_options(config), "layers": layers}


def load_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a saved configuration, and what else there is."""
    loaded = dict(config)
    for name, find in _FIND.items():
        value = loaded.get(name)
        if isinstance(value, Mapping) and "arguments" in value:
            loaded[name] = find(value["name"]).with_config(value["arguments"])
        elif isinstance(value, Mapping) and "orders" in value:
            loaded[name] = _load_schedule(value)
        elif isinstance(value, Mapping):
            loaded[name] = keras.saving.deserialize_keras_object(value)
    return loaded
