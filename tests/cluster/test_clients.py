"""Clients that are replicas: what is refused before TensorFlow connects."""

from __future__ import annotations

import re

import pytest

from tests.cluster.fakes import answering, status
from tfgpipe.cluster import clients
from tfgpipe.cluster.addresses import Address
from tfgpipe.cluster.errors import ClusterError, WorkerUnavailable
from tfgpipe.cluster.health import Deadline

pytestmark = pytest.mark.pure

ADDRESSES = (Address("a", 4000), Address("b", 4000))


@pytest.mark.parametrize(
    ("workers", "index", "message"),
    [
        ("", 0, "Worker 1 at b:4000 was started without the list of all workers."),
        ("a:4000,c:4000", 1, "was started as worker 1 of a:4000,c:4000."),
        ("a:4000,b:4000", 0, "Start it again with --cluster=a:4000,b:4000 --index=1."),
    ],
)
def test_a_worker_with_another_list_is_refused(
    workers: str, index: int, message: str
) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        clients.check_list(1, ADDRESSES, status(workers=workers, index=index))
    clients.check_list(1, ADDRESSES, status(workers="a:4000,b:4000", index=1))


def test_a_client_that_does_not_come_is_named() -> None:
    told = status(clients={"0": "10.0.0.7:1"}, num_replicas=2)
    with answering(told) as address:
        clients.wait_for_clients(address, [0], Deadline(5))
        with pytest.raises(
            WorkerUnavailable, match="The client of replica 1 is not there after 1 s"
        ):
            clients.wait_for_clients(address, range(2), Deadline(1))
