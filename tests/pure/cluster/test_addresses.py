"""Lists of workers."""

from __future__ import annotations

import socket

import pytest

from tfgpipe.cluster import addresses
from tfgpipe.cluster.addresses import Address


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
