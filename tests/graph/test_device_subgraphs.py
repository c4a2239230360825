"""Taking a computation on several devices apart, for whatever graph."""

from __future__ import annotations

import graphlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpipe.graph import device_subgraphs, partitioner

pytestmark = pytest.mark.pure


@st.composite
def computations(draw):
    """Returns a graph in an order in which it can run, devices, and what copies."""
    number = draw(st.integers(1, 20))
    graph, devices, copies = {}, {}, []
    for i in range(number):
        before = draw(st.lists(st.integers(0, max(i - 1, 0)), max_size=3 * bool(i)))
        kinds = draw(st.lists(st.sampled_from(["{}:0", "^{}"]), min_size=3, max_size=3))
        inputs = [kind.format(f"n{j}") for j, kind in zip(before, kinds, strict=False)]
        graph[f"n{i}"] = ("given:0", *inputs)
        devices[f"n{i}"] = draw(st.integers(0, 2))
        if draw(st.booleans()):
            copies.append(f"n{i}")
    return graph, devices, copies


@settings(max_examples=300, deadline=None)
@given(computations())
def test_any_computation_is_taken_apart_so_that_it_can_run(computation):
    graph, devices, copies = computation
    split = device_subgraphs.split_by_device(graph, devices, copies=copies)
    everything_is_in_one_piece_on_its_device(split, graph, devices)
    there_is_all_that_is_needed_before(split, graph)
    pieces_do_not_wait_for_one_another(split, graph)
    moves_are_copies_of_something_elsewhere(split, graph, devices, copies)


def everything_is_in_one_piece_on_its_device(split, graph, devices):
    assert sorted(n for p in split for n in p.operations) == sorted(graph)
    for piece in split:
        assert {devices[name] for name in piece.operations} == {piece.device}


def there_is_all_that_is_needed_before(split, graph):
    there = set()
    for name in (name for piece in split for name in piece.operations):
        before = {partitioner.op_name(x) for x in graph[name]} & set(graph)
        assert before <= there
        there.add(name)


def pieces_do_not_wait_for_one_another(split, graph):
    number = {name: i for i, piece in enumerate(split) for name in piece.operations}
    waits = {i: set() for i in range(len(split))}
    for name, inputs in graph.items():
        for x in map(partitioner.op_name, inputs):
            if x in graph and number[x] != number[name]:
                waits[number[name]].add(number[x])
    graphlib.TopologicalSorter(waits).prepare()  # Raises if they go round.


def moves_are_copies_of_something_elsewhere(split, graph, devices, copies):
    for piece in split:
        if piece.is_copy:
            (name,) = piece.operations
            inputs = {partitioner.op_name(x) for x in graph[name]} & set(graph)
            assert name in copies
            assert inputs
            assert all(devices[x] != piece.device for x in inputs)


def test_one_device_is_one_piece():
    graph = {"a": (), "b": ("a",), "c": ("a", "^b")}
    (piece,) = device_subgraphs.split_by_device(
        graph, dict.fromkeys(graph, 1), copies=["b"]
    )
    assert piece == device_subgraphs.DeviceSubgraph(1, ("a", "b", "c"))


def test_chunks_that_go_around_are_pieces_of_their_own():
    """A ring of two: each multiplies its chunk, and then that of the other.

    The second product need not wait for the first, nor the move for any.
    """
    graph, devices = {}, {}
    for device in range(2):
        graph[f"chunk{device}"] = ("given",)
        graph[f"first{device}"] = (f"chunk{device}", "weight")
        devices.update({f"chunk{device}": device, f"first{device}": device})
    for device in range(2):
        graph[f"moved{device}"] = (f"chunk{1 - device}",)
        graph[f"second{device}"] = (f"moved{device}", "weight")
        devices.update({f"moved{device}": device, f"second{device}": device})
    split = device_subgraphs.split_by_device(
        graph, devices, copies=["moved0", "moved1"]
    )
    assert split == [
        device_subgraphs.DeviceSubgraph(0, ("chunk0", "first0")),
        device_subgraphs.DeviceSubgraph(1, ("chunk1", "first1")),
        device_subgraphs.DeviceSubgraph(0, ("moved0",), is_copy=True),
        device_subgraphs.DeviceSubgraph(1, ("moved1",), is_copy=True),
        device_subgraphs.DeviceSubgraph(0, ("second0",)),
        device_subgraphs.DeviceSubgraph(1, ("second1",)),
    ]
