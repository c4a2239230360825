"""The hosts that train together, each with a replica in a process of its own.

The first of them, the chief, writes the run's folder and says how it goes. The others
make the same steps, each with its rows of every batch; what they write goes with them.
All read the run's checkpoints, so all must see its folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfgpipe import cluster
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.config import Pipelining
from tfgpipe_trainer.errors import DivergedError, StoppedError, UsageError
from tfgpipe_trainer.hyperparams import HyperparameterError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


_VARIABLE = "TF_CONFIG"


@dataclasses.dataclass(frozen=True)
class Hosts:
    """This host among those of a run.

    Attributes:
        index: Its number, from 0.
        count: Number of hosts.
    """

    index: int = 0
    count: int = 1

    @property
    def is_chief(self) -> bool:
        """True for the host that writes and prints."""
        return self.index == 0

    @property
    def shard(self) -> HostShard:
        """The rows of each batch that this host trains on."""
        return HostShard(self.index, self.count)

    def check(self, pipelining: Pipelining) -> None:
        """Checks that there is a host for each replica.

        Raises:
            HyperparameterError: If not, or if a replica is more than stages.
        """
        if self.count == 1:
            return
        wanted = {"num_replicas": self.count, "num_shards": 1, "shard_replicas": "none"}
        for name, value in wanted.items():
            received = getattr(pipelining, name)
            if received != value:
                raise HyperparameterError(
                    f"pipelining.{name}: expected {value} for {self.count} hosts, each "
                    f"of which has one replica, of stages alone; received {received}."
                )

    @contextlib.contextmanager
    def chief_stdout(self) -> Iterator[None]:
        """Silences stdout on all hosts but the chief."""
        if self.is_chief:
            yield
            return
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield

    def report_exit(self) -> contextlib.AbstractContextManager[None]:
        """Reports to other hosts at the end whether they can go on without this one.

        What ends all of them at the same step they find out by themselves.
        """
        if self.count == 1:
            return contextlib.nullcontext()
        return cluster.report_exit(accepted=(StoppedError, DivergedError))

    @contextlib.contextmanager
    def output_dir(self, folder: Path) -> Iterator[Path]:
        """Yields the folder that this host writes to: the run's, or a temporary one."""
        if self.is_chief:
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix="tfgpipe-host-") as own:
            yield Path(own)


ALONE = Hosts()


def find_hosts(listed: str, index: int | None) -> Hosts:
    """Returns this host, by flags or else by the variable `TF_CONFIG`.

    Where flags say it, the variable is set, which TensorFlow reads.

    Args:
        listed: `"HOST:PORT,HOST:PORT"`, or empty.
        index: The number of this one, from 0, or None.

    Raises:
        UsageError: If they are wrong.
    """
    if not listed:
        if index is not None:
            raise UsageError(
                "Expected --hosts=HOST:PORT,..., which --host_index=I is of."
            )
        return _configured(os.environ.get(_VARIABLE, ""))
    try:
        workers = [str(address) for address in cluster.parse_addresses(listed)]
    except ValueError as error:
        raise UsageError(f"--hosts: {error}") from None
    if index is None or not 0 <= index < len(workers):
        raise UsageError(
            f"Expected --host_index=I, from 0 to {len(workers) - 1}, which of --hosts "
            f"this is; received {'none' if index is None else index}."
        )
    os.environ[_VARIABLE] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    )
    return Hosts(index, len(workers))


def _configured(text: str) -> Hosts:
    if not text:
        return ALONE
    try:
        config = json.loads(text)
        tasks = {kind: own for kind, own in config.get("cluster", {}).items() if own}
        task = config.get("task", {"type": "worker", "index": 0})
        if not all(
            isinstance(own, list) and all(isinstance(each, str) for each in own)
            for own in tasks.values()
        ):
            raise ValueError("its cluster has something else than lists of addresses")
        if sum(map(len, tasks.values())) < 2:
            return ALONE
        if [*tasks] != ["worker"]:
            raise ValueError(
                f"its cluster has {' and '.join(tasks)}, not workers alone"
            )
        workers = tasks["worker"]
        if task["type"] != "worker" or str(task["index"]) not in map(
            str, range(len(workers))
        ):
            raise ValueError(f"its task is {task}")
    except (
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        raise UsageError(
            f"Expected {_VARIABLE} to list workers, and to say which this is, as "
            '{"cluster": {"worker": ["10.0.0.5:4000", "10.0.0.6:4000"]}, '
            '"task": {"type": "worker", "index": 0}}; '
            f"received {text!r}: {error}."
        ) from None
    return Hosts(int(task["index"]), len(workers))


class Coordinator:
    """All hosts, each of which calls this at the same places: a call waits for all.

    Args:
        model: A model of theirs, whose strategy connects them.
        hosts: This host and their number; one alone agrees with itself.
    """

    def __init__(self, model: keras.Model, hosts: Hosts = ALONE) -> None:
        self.hosts = hosts
        self._strategy = model.distribute_strategy
        self._sum: Callable[[tf.Tensor], tf.Tensor] | None = None

    def any(self, *said: bool) -> tuple[bool, ...]:
        """Returns of several things whether a host says so."""
        if self.hosts.count == 1:
            return said
        return tuple(number > 0 for number in self._sums(said))

    def with_chief(self, number: int) -> int:
        """Returns the number that the chief gives."""
        if self.hosts.count == 1:
            return number
        return self._sums([number if self.hosts.is_chief else 0])[0]

    def training(
        self, build: Callable[[HostShard], tf.data.Dataset]
    ) -> tf.data.Dataset:
        """Returns the batches to train on, of which each host reads its own rows.

        Args:
            build: Makes those of a host's rows.
        """
        shard = self.hosts.shard
        if self.hosts.count == 1:
            return build(shard)
        return self._strategy.distribute_datasets_from_function(lambda _: build(shard))

    def validation(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the batches to validate on, which every host reads and cuts alike."""
        import tensorflow as tf

        if self.hosts.count == 1:
            return dataset
        options = tf.data.Options()
        policies = tf.data.experimental.AutoShardPolicy
        options.experimental_distribute.auto_shard_policy = policies.DATA
        return dataset.with_options(options)

    def _sums(self, numbers: Sequence[int]) -> list[int]:
        import tensorflow as tf

        def on_replica(own: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(own))

        if self._sum is None:
            self._sum = tf.function(
                lambda own: self._strategy.run(on_replica, args=(own,)),
                reduce_retracing=True,
            )
        own = tf.constant(list(map(int, numbers)), tf.int64)
        return [int(number) for number in self._sum(own).numpy()]
