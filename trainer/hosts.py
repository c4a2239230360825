"""The hosts that train together, each with a replica, or with a part of its stages.

The first of them, the chief, writes the run's folder and says how it goes. Those of
other replicas make the same steps, each with its rows of every batch; what they write
goes with them. All read the run's checkpoints, so all must see its folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tfgpipe import cluster
from tfgpipe.cluster import engines
from tfgpipe.cluster.engines import Role
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.config import Pipelining
from tfgpipe_trainer.errors import DivergedError, StoppedError, UsageError
from tfgpipe_trainer.hyperparams import HyperparameterError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Hosts:
    """This process among those of a run, each with a replica.

    Attributes:
        index: Its number, from 0.
        count: Number of processes with a replica.
        role: This process among those with the stages of all replicas, where each
            replica has some: a worker on each of them, and the first of a replica's its
            client as well.
    """

    index: int = 0
    count: int = 1
    role: Role | None = None

    @property
    def is_chief(self) -> bool:
        """True for the host that writes and prints."""
        return self.index == 0

    @property
    def is_client(self) -> bool:
        """True unless this process has nothing but a part of a replica's stages."""
        return self.role is None or self.role.index % self._num_workers == 0

    @property
    def workers(self) -> str:
        """The addresses of workers, if there are any."""
        return ",".join(self.role.workers) if self.role else ""

    @property
    def shard(self) -> HostShard:
        """The rows of each batch that this host trains on."""
        return HostShard(self.index, self.count)

    @property
    def _num_workers(self) -> int:
        """The number of workers of a replica."""
        return len(self.role.workers) // self.count if self.role else 1

    def check(self, pipelining: Pipelining) -> None:
        """Checks that replicas and their stages can be on these hosts.

        Raises:
            HyperparameterError: If not.
        """
        for name, value in {"num_shards": 1, "shard_replicas": "none"}.items():
            received = getattr(pipelining, name)
            if self.count > 1 and received != value:
                raise HyperparameterError(
                    f"pipelining.{name}: expected {value} for {self.count} replicas on "
                    f"hosts of their own, of stages alone; received {received}."
                )
        each = pipelining.num_devices // self.count
        if each % self._num_workers:
            raise HyperparameterError(
                f"pipelining.num_stages: expected stages on a multiple of "
                f"{self._num_workers} devices, as a replica has so many processes; "
                f"received stages on {each}."
            )

    def start_worker(self, pipelining: Pipelining) -> None:
        """Starts the worker of this process, a client, if it has one."""
        if self.role is not None:
            engines.start_worker(self.role, **self._of_worker(pipelining))

    def run_worker(self, pipelining: Pipelining) -> int:
        """Runs the worker of this process, no client; returns its exit status."""
        assert self.role is not None
        return engines.run_worker(self.role, **self._of_worker(pipelining))

    def _of_worker(self, pipelining: Pipelining) -> dict[str, int]:
        assert self.role is not None
        devices = pipelining.num_devices // len(self.role.workers)
        return {"devices": devices, "num_replicas": self.count}

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


def find_role(listed: str, index: int | None, *, engine: str = "") -> Role | None:
    """Returns this process among those of a run, or None if it is alone.

    Args:
        listed: `"HOST:PORT,HOST:PORT"`, or empty for what `TF_CONFIG` says.
        index: The number of this one, from 0, or None.
        engine: `"slurm"`, or empty.

    Raises:
        UsageError: If they are wrong.
    """
    if index is not None and not listed:
        raise UsageError("Expected --hosts=HOST:PORT,... with --host_index=I.")
    try:
        if engine:
            role = engines.slurm_role()
            return role if len(role.workers) > 1 else None
        if not listed:
            return engines.tf_config_role()
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        workers = tuple(map(str, cluster.parse_addresses(listed)))
    except ValueError as error:
        raise UsageError(f"--hosts: {error}") from None
    if index is None or not 0 <= index < len(workers):
        raise UsageError(
            f"Expected --host_index=I, from 0 to {len(workers) - 1}, which of --hosts "
            f"this is; received {'none' if index is None else index}."
        )
    return Role(workers, index)


class Fitted(NamedTuple):
    """Replicas and stages on the hosts that there are.

    Attributes:
        num_hosts: The number of hosts that take part, the first.
        num_replicas: D on these.
        num_stages: K on these.
    """

    num_hosts: int
    num_replicas: int
    num_stages: int


def fit(pipelining: Pipelining, number: int, *, batch_size: int) -> Fitted:
    """Returns the replicas and stages that fit on the hosts there are.

    Where these are fewer than `num_hosts`, replicas are left out, or stages if not one
    fits. Batches stay as they are, so a run goes on as it would have.

    >>> print(*fit(Pipelining(num_stages=2, num_hosts=2), 1, batch_size=8))
    1 1 1

    Args:
        pipelining: The replicas and stages for `num_hosts`, if it is given.
        number: The number of hosts there are.
        batch_size: Rows of a batch, which replicas share evenly.

    Raises:
        HyperparameterError: If there are more hosts.
    """
    D, K = pipelining.num_replicas, pipelining.num_stages
    wanted = pipelining.num_hosts or number
    if number > wanted:
        raise HyperparameterError(
            f"pipelining.num_hosts: expected at least {number}, which there are; "
            f"received {wanted}."
        )
    if number == wanted:
        return Fitted(number, D, K)
    each = max(1, wanted // D)  # Hosts of a replica.
    if number < each:
        v = pipelining.resolved_stages_per_device
        return Fitted(number, 1, max(v, K * number // each // v * v))
    fits = range(1, number // each + 1)
    replicas = max(count for count in fits if batch_size % count == 0)
    return Fitted(replicas * each, replicas, K)


def of_role(role: Role | None, pipelining: Pipelining) -> Hosts:
    """Returns the hosts of a run, which are its replicas, or parts of them.

    As many as replicas are these, and TensorFlow reads of them in `TF_CONFIG`; a
    multiple of the replicas has their stages.

    Raises:
        HyperparameterError: If they are neither, or replicas cannot be on them.
    """
    if role is None:
        return ALONE
    number, num_replicas = len(role.workers), pipelining.num_replicas
    if number % num_replicas:
        raise HyperparameterError(
            f"pipelining.num_replicas: expected {number}, the number of hosts, or a "
            f"divisor of it, each replica with as many of them; received "
            f"{num_replicas}."
        )
    if number == num_replicas:
        os.environ[engines.TF_CONFIG] = role.tf_config
        found = Hosts(role.index, number)
    else:
        os.environ.pop(engines.TF_CONFIG, None)
        found = Hosts(role.index * num_replicas // number, num_replicas, role)
    found.check(pipelining)
    return found


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
        if self.hosts.count == 1 or self.hosts.role is not None:
            return build(shard)
        return self._strategy.distribute_datasets_from_function(lambda _: build(shard))

    def validation(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the batches to validate on, which every host reads and cuts alike."""
        import tensorflow as tf

        if self.hosts.count == 1:
            return dataset
        if self.hosts.role is not None:
            return dataset.map(self._own_rows)
        options = tf.data.Options()
        policies = tf.data.experimental.AutoShardPolicy
        options.experimental_distribute.auto_shard_policy = policies.DATA
        return dataset.with_options(options)

    def _own_rows(self, *batch: Any) -> Any:
        """Returns this host's rows of a batch, the last of which may be smaller."""
        import keras
        import tensorflow as tf

        index, count = self.hosts.index, self.hosts.count

        def rows(x: tf.Tensor) -> tf.Tensor:
            size = tf.shape(x)[0]
            return x[size * index // count : size * (index + 1) // count]

        return keras.tree.map_structure(rows, batch if len(batch) > 1 else batch[0])

    def _sums(self, numbers: Sequence[int]) -> list[int]:
        import tensorflow as tf

        def on_replica(own: tf.Tensor) -> tf.Tensor:
            return self._strategy.sum_over_replicas(tf.identity(own))

        if self._sum is None:
            self._sum = tf.function(
                lambda own: self._strategy.run(on_replica, args=(own,)),
                reduce_retracing=True,
            )
        own = tf.constant(list(map(int, numbers)), tf.int64)
        with cluster.collective_step():
            return [int(number) for number in self._sum(own).numpy()]
