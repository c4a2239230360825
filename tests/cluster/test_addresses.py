"""Lists of workers."""

from __future__ import annotations

import socket

import pytest

from tfgpipe.cluster import addresses
from tfgpipe.cluster.addresses import Address

pytestmark = pytest.mark.pure


def test_a_list_is_text_or_a_sequence() -> None:
    both = (Address("a.example", 4000), Address("10.0.0.6", 4000))
    assert addresses.parse_addresses("a.example:4000, 10.0.0.6:4000") == both
    assert addresses.parse_addresses(["a.example:4000", "10.0.0.6:4000"]) == both
    assert both[0].health_port == 4001


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ("", "such as 10.0.0.5:4000, of a port from 1024 to 65534; received ''"),
        ("10.0.0.5", "received '10.0.0.5'"),
        ("10.0.0.5:x", "received '10.0.0.5:x'"),
        ("10.0.0.5:80", "received '10.0.0.5:80'"),
        (":4000", "received ':4000'"),
        ([], "A cluster needs a worker. Received an empty list."),
        ("a:4000,a:4000", "Received a:4000 and a:4000. Leave a port between."),
        ("a:4000,a:4001", "Each worker has two ports of its own"),
        ("127.0.0.1:4000,10.0.0.5:4000", "Received 127.0.0.1:4000, which other hosts"),
        ("10.0.0.5:4000,localhost:4000", "Received localhost:4000, which other hosts"),
    ],
)
def test_a_wrong_list_is_refused(workers: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        addresses.parse_addresses(workers)


def test_free_ports_come_in_pairs_of_their_own() -> None:
    ports = addresses.free_ports(4)
    assert len({p for port in ports for p in (port, port + 1)}) == 8
    assert not any(addresses.is_taken(p) for p in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        assert addresses.is_taken(ports[0])


def test_replicas_have_the_workers_next_to_each_other() -> None:
    found = [addresses.replica_workers(6, replica, 3) for replica in range(3)]
    assert [list(workers) for workers in found] == [[0, 1], [2, 3], [4, 5]]
    assert addresses.replica_workers(3, 0, 1) == range(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 0, 2), "Received 3 workers for 2 replicas"),
        ((2, 0, 4), "Received 2 workers for 4 replicas"),
        ((2, 0, 0), "Received 2 workers for 0 replicas"),
        ((4, 2, 2), "The indices of 2 replicas are 0 to 1. Received replica=2"),
        ((4, -1, 2), "Received replica=-1"),
    ],
)
def test_workers_that_replicas_cannot_share_are_refused(
    arguments: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        addresses.replica_workers(*arguments)


@pytest.mark.parametrize("wrong", [None, 4000, [4000]])
def test_what_names_no_workers_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="Workers are named by `host:port`"):
        addresses.parse_addresses(wrong)  # type: ignore[arg-type]
