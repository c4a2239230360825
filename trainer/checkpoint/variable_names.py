"""All that decides how a run goes on, under names that no partition changes.

Weights, the state of layers and of random seeds, the optimizer's slots and counts.
Keras numbers the layers of a process as they are made, and puts what encloses a layer
before its name; neither says anything about the layer, so here neither is in a name:

    pipelined_model/pipelined_layer/block_7/dense_15/kernel    in Keras
    block_1/dense_1/kernel                                     here, its second block's
    optimizer/block_1/dense_1/kernel/momentum                  and its slot

so the same name is found unpipelined, in another partition or process. Numbers are
given in the order of the layers. An optimizer's hyperparameters, as a constant learning
rate, are no state of a run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe_trainer.devices import host_device

State = dict[str, keras.Variable]

# What belongs to the optimizer has names that begin so.
OPTIMIZER = "optimizer/"


def weights(model: keras.Model) -> State:
    """Returns the variables of a model that is built, by name."""
    variables = list({id(v): v for v in model.variables}.values())
    paths = [tuple(v.path.split("/")) for v in variables]
    enclosing = _num_enclosing([path for path in paths if not is_seed(path[0])])
    kept = [path if is_seed(path[0]) else path[enclosing:] for path in paths]
    return dict(zip(renumbered(kept), variables, strict=True))


def moved_layers(model: keras.Model) -> dict[str, str]:
    """Returns layers that are counted otherwise here than by Keras, with that name.

    The upper half of a network, `layer_6` and `layer_7`, is `layer` and `layer_1` here.
    """
    moved = {}
    for name, variable in weights(model).items():
        parts, path = name.split("/"), variable.path.split("/")
        for end, own in enumerate(path[-len(parts) : -1], start=1):
            if _number(parts[end - 1]) != _number(own):
                moved["/".join(parts[:end])] = own
    return moved


def num_siblings(names: Iterable[str], layer: str) -> int:
    """Counts the layers among names whose name differs by its number alone."""
    base = re.escape(re.sub(r"_\d+$", "", layer))
    found = (re.match(rf"{base}(_\d+)?/", name) for name in names)
    return len({match[0] for match in found if match})


def _number(part: str) -> int:
    match = re.search(r"_(\d+)$", part)
    return int(match[1]) if match else 0


def all_variables(model: keras.Model) -> State:
    """Returns the `weights` and the optimizer's variables, by name."""
    named = weights(model)
    # A slot is called after the whole path of its weight.
    stems = {v.path.replace("/", "_"): name for name, v in named.items()}
    found: State = dict(named)
    for variable in model.optimizer.variables:
        own = variable.path.partition("/")[2]
        last = own.split("/")[-1]
        if last != "learning_rate":
            name = _slot(last, stems) or own
            found[_unused(f"{OPTIMIZER}{name}", found)] = variable
    return found


def _slot(text: str, stems: Mapping[str, str]) -> str | None:
    """Returns the name of a slot, or None for what is not of one weight."""
    parts = text.split("_")
    for end in range(len(parts) - 1, 0, -1):  # The longest first.
        weight = stems.get("_".join(parts[:end]))
        if weight is not None:
            return f"{weight}/{'_'.join(parts[end:])}"
    return None


def averages(state: State) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns each weight whose average the optimizer keeps, with that."""
    pairs = []
    for name, variable in state.items():
        if name.startswith(OPTIMIZER) and name.endswith("/average"):
            weight = name.removeprefix(OPTIMIZER).removesuffix("/average")
            pairs.append((state[weight], variable))
    return pairs


@contextlib.contextmanager
def ema_weights(model: keras.Model) -> Iterator[None]:
    """Puts the averages of weights in their place, if the optimizer keeps them."""
    pairs = averages(all_variables(model))
    own = [keras.ops.convert_to_numpy(weight) for weight, _ in pairs]
    for weight, average in pairs:
        weight.assign(average)
    try:
        yield
    finally:
        for (weight, _), value in zip(pairs, own, strict=True):
            weight.assign(value)


def snapshot(state: State) -> dict[str, tf.Tensor]:
    """Returns copies of all values, on the host, that later steps do not change."""
    with tf.device(host_device()):
        return {
            name: tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(v.value))
            for name, v in state.items()
        }


def renumbered(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns paths as names, with numbers that count what is beside each other.

    >>> renumbered([("dense_7", "kernel"), ("dense_7", "bias"), ("dense_9", "kernel")])
    ['dense/kernel', 'dense/bias', 'dense_1/kernel']
    """
    given: dict[str, dict[str, str]] = {}
    numbers: dict[tuple[str, str], int] = {}
    names: dict[str, None] = {}  # A list, in which to look up.
    for path in paths:
        name = ""
        for part in path[:-1]:
            siblings = given.setdefault(name, {})
            if part not in siblings:
                base = re.sub(r"_\d+$", "", part)
                number = numbers.get((name, base), 0)
                numbers[name, base] = number + 1
                siblings[part] = f"{base}_{number}" if number else base
            name += f"{siblings[part]}/"
        names[_unused(name + path[-1], names)] = None
    return list(names)


def is_seed(name: str) -> bool:
    """Returns whether a name, or a path, is of a random seed."""
    return "seed_generator" in name


def _num_enclosing(paths: Sequence[tuple[str, ...]]) -> int:
    """Counts the parts at the beginning of all paths that name enclosing layers."""
    num = 0
    while paths and all(len(path) > num + 2 for path in paths):
        if len({path[num] for path in paths}) > 1:
            break
        num += 1
    return num


def _unused(name: str, used: Mapping[str, Any]) -> str:
    """Returns a name, numbered if it is used already."""
    number = 1
    unused = name
    while unused in used:
        number += 1
        unused = f"{name}#{number}"
    return unused
