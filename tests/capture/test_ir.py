"""Networks of calls and their parts, on a graph small enough to write down."""

from __future__ import annotations

import pytest

from tfgpipe.capture.ir import Call, CallGraph, Segment, Value

pytestmark = pytest.mark.pure


def call(layer, reads, makes):
    return Call(layer, tuple(map(Value, reads)), {}, tuple(reads), tuple(makes))


# The skip 1 -> 4 of the module's picture, a value (3) read twice, an unused input (9).
CALLS = (
    call("a", [0], [1]),
    call("b", [1], [2]),
    call("c", [2], [3]),
    call("d", [3, 1], [4, 5]),
    call("a", [4, 3], [6]),
)
NETWORK = CallGraph(CALLS, input_ids=(0, 9), output_ids=(6, 1, 6))


@pytest.mark.parametrize(
    ("span", "reads", "makes"),
    [
        (slice(0, 5), (0,), (1, 6)),
        (slice(0, 1), (0,), (1,)),
        (slice(1, 3), (1,), (3,)),
        (slice(3, 4), (3, 1), (4,)),
        (slice(4, 5), (4, 3), (6,)),
        (slice(1, 4), (1,), (3, 4)),
    ],
)
def test_a_part_reads_what_others_make_and_makes_what_others_need(span, reads, makes):
    assert NETWORK.segment(span) == Segment(CALLS[span], reads, makes)


def test_a_part_has_each_layer_once():
    assert NETWORK.segment(slice(0, 5)).layers == ("a", "b", "c", "d")


def test_received_bytes_count_each_value_once_and_inputs_not():
    sizes = {number: 10**number for number in range(10)}
    received = NETWORK.received_bytes(sizes)
    for start in range(5):
        for end in range(5 + 1):
            reads = NETWORK.segment(slice(start, max(start, end))).input_ids
            expected = sum(sizes[number] for number in reads if number not in (0, 9))
            assert received[start][end] == expected
