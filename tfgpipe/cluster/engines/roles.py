"""The processes of one job, and which of them this is, by the environment.

TensorFlow's `TF_CONFIG` says it, which Kubeflow's TFJob and Vertex AI set, and Slurm's
own variables do: see `slurm`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfgpipe.cluster.addresses import parse_addresses

TF_CONFIG = "TF_CONFIG"

_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.5:4000", "10.0.0.6:4000"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@dataclasses.dataclass(frozen=True)
class Role:
    """This process among all of a job.

    Attributes:
        workers: The address of each, `"host:port"`, in an order that all know.
        index: The index of this one.

    Raises:
        ValueError: If the addresses are wrong, or there is no such index.
    """

    workers: tuple[str, ...]
    index: int

    def __post_init__(self) -> None:
        """Checks addresses and index."""
        if len(self.workers) > 1:
            parse_addresses(self.workers)
        if not 0 <= self.index < len(self.workers):
            raise ValueError(
                f"expected an index from 0 to {len(self.workers) - 1}; received "
                f"{self.index}"
            )

    def among_first(self, number: int) -> Role | None:
        """Returns the role among the first processes; None for a single one."""
        return Role(self.workers[:number], self.index) if number > 1 else None

    @property
    def tf_config(self) -> str:
        """The value of `TF_CONFIG` that says the same, of workers alone."""
        task = {"type": "worker", "index": self.index}
        return json.dumps({"cluster": {"worker": [*self.workers]}, "task": task})


def from_tf_config(text: str) -> Role | None:
    """Returns the role that a value of `TF_CONFIG` says, or None for a single process.

    A chief is the first of the workers.

    >>> text = '{"cluster": {"chief": ["a:4000"], "worker": ["b:4000"]}, "task": '
    >>> from_tf_config(text + '{"type": "worker", "index": 0}}')
    Role(workers=('a:4000', 'b:4000'), index=1)

    Raises:
        ValueError: If it says something else.
    """
    if not text:
        return None
    try:
        config = json.loads(text)
        tasks = {kind: own for kind, own in config.get("cluster", {}).items() if own}
        task = config.get("task", {"type": "worker", "index": 0})
        if not all(map(_is_list_of_addresses, tasks.values())):
            raise ValueError("its cluster has something else than lists of addresses")
        if sum(map(len, tasks.values())) < 2:
            return None
        kinds = [kind for kind in ("chief", "master", "worker") if kind in tasks]
        if len(kinds) < len(tasks):
            raise ValueError(
                f"its cluster has {' and '.join(tasks)}, not a chief and workers alone"
            )
        kind, index = task["type"], str(task["index"])
        if kind not in kinds or index not in map(str, range(len(tasks[kind]))):
            raise ValueError(f"its task is {task}")
        before = sum(len(tasks[each]) for each in kinds[: kinds.index(kind)])
        listed = tuple(address for each in kinds for address in tasks[each])
        return Role(listed, before + int(index))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"Expected {TF_CONFIG} to list workers, and to say which this is, as "
            f"{_EXAMPLE}; received {text!r}: {error}."
        ) from None


def tf_config_role(environment: Mapping[str, str] | None = None) -> Role | None:
    """Returns the role of this process by `TF_CONFIG`, or None for a single process.

    Args:
        environment: Defaults to that of this process.

    Raises:
        ValueError: If `TF_CONFIG` says something else.
    """
    variables = os.environ if environment is None else environment
    return from_tf_config(variables.get(TF_CONFIG, ""))


def _is_list_of_addresses(own: Any) -> bool:
    return isinstance(own, Sequence) and all(isinstance(each, str) for each in own)
