"""The cheapest choice of results to save, beside all choices there are."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tfgpipe.remat import AutoRemat, DeviceStages, ForwardGraph
from tfgpipe.remat.min_cut import cheapest_saved

pytestmark = pytest.mark.pure


def forward_graph(reads, wanted, sizes, cost, peak_bytes=len):
    """A graph whose operations a, b, ... make one tensor each."""
    used = {x for each in reads.values() for x in each} | set(wanted)
    return ForwardGraph(
        types=dict.fromkeys(reads, "Any"),
        reads={name: [f"{x}:0" for x in each] for name, each in reads.items()},
        results={name: [f"{name}:0"] if name in used else [] for name in reads},
        wanted=[f"{x}:0" for x in wanted],
        sizes={f"{name}:0": size for name, size in sizes.items()},
        cost=cost.__getitem__,
        peak_bytes=peak_bytes,
    )


def recomputed(graph, saved):
    """Returns the operations to run again."""
    again, pending = set(), [x for x in graph.wanted if x not in saved]
    while pending:
        name = pending.pop().removesuffix(":0")
        if name not in again:
            again.add(name)
            pending += [x for x in graph.reads[name] if x not in saved]
    return again


def price_of(graph, saved, price):
    again = recomputed(graph, saved)
    return price * sum(graph.sizes[x] for x in saved) + sum(map(graph.cost, again))


def random_graph(seed, size):
    draw = random.Random(seed)
    names = "abcdefghij"[:size]
    reads = {
        name: draw.sample(names[:i], draw.randint(0, min(i, 2)))
        for i, name in enumerate(names)
    }
    return forward_graph(
        reads,
        draw.sample(names, draw.randint(1, size)),
        {name: draw.randint(1, 9) * 100 for name in names},
        {name: draw.choice([0, 10, 400, 9000, 70_000]) for name in names},
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_cheaper(seed):
    """Of all subsets of at most nine tensors, up to rounding."""
    graph = random_graph(seed, 3 + seed % 7)
    tensors = [x for each in graph.results.values() for x in each]
    for price in (0.1, 1, 10, 100):
        best = min(
            price_of(graph, set(some), price)
            for n in range(len(tensors) + 1)
            for some in itertools.combinations(tensors, n)
        )
        found = price_of(graph, set(cheapest_saved(graph, price)), price)
        assert best <= found <= best + len(tensors)


def test_the_ends_save_all_and_nothing():
    graph = random_graph(3, 8)
    assert not AutoRemat(math.inf).saved(graph)
    costly = {name for name in graph.types if graph.cost(name) > len(graph.types)}
    assert not recomputed(graph, set(AutoRemat(0).saved(graph))) & costly


def blocks(count, size=100, inner=400, cost=1000):
    """Blocks in a row: of each a wide tensor inside, and a narrow one between."""
    reads, sizes, costs = {}, {}, {}
    before = []
    for i in range(count):
        wide, narrow = f"w{i}", f"n{i}"
        reads |= {wide: before, narrow: [wide]}
        sizes |= {wide: inner, narrow: size}
        costs |= {wide: cost, narrow: cost}
        before = [narrow]

    def peak_bytes(saved):
        held = most = 0
        for name in reads:  # As if between two saved narrow ones all is held.
            held = 0 if f"{name}:0" in saved else held + sizes[name]
            most = max(most, held)
        return most

    return forward_graph(reads, [*reads], sizes, costs, peak_bytes)


def device(graphs, in_flight, fixed_bytes=0.0, *, splits=False):
    each = dict.fromkeys(graphs, in_flight)
    begun = dict.fromkeys(graphs, 1)
    return DeviceStages(graphs, each, begun, splits, fixed_bytes)


def chosen_flops(policies, graphs):
    return [
        sum(map(graph.cost, recomputed(graph, set(policy.saved(graph)))))
        for policy, graph in zip(policies, graphs, strict=True)
    ]


def test_more_memory_is_less_recomputation():
    graph = blocks(8)
    done = []
    for limit in (2800, 4000, 6000, 9000, 13_000):
        (policy,) = AutoRemat(memory_limit=limit).for_stages(
            1, lambda: [device({0: graph}, in_flight=3)]
        )
        saved = policy.saved(graph)
        assert 3 * sum(graph.sizes[x] for x in saved) + graph.peak_bytes(saved) <= limit
        done += chosen_flops([policy], [graph])
    assert done == sorted(done, reverse=True)
    assert done[0] > done[2] > done[-1] == 0


def test_without_a_limit_a_device_takes_what_the_recomputed_stage_takes():
    graph = blocks(8)
    (policy,) = AutoRemat().for_stages(1, lambda: [device({0: graph}, in_flight=2)])
    saved = policy.saved(graph)
    held = 2 * sum(graph.sizes[x] for x in saved) + graph.peak_bytes(saved)
    assert held <= graph.peak_bytes(()) == 8 * 500
    (flops,) = chosen_flops([policy], [graph])
    assert flops <= 0.6 * 16_000


def test_equal_stages_with_fewer_in_flight_save_more():
    graph = blocks(6)
    policies = AutoRemat(memory_limit=5000).for_stages(
        2, lambda: [device({0: graph}, 4), device({1: graph}, 1)]
    )
    first, last = chosen_flops(policies, [graph] * 2)
    assert last < first


def test_each_device_saves_what_its_own_memory_holds():
    graph = blocks(6)
    devices = [device({0: graph}, 2), device({1: graph}, 2)]
    done = {}
    for limits in ((3000, 9000), (9000, 3000)):
        auto = AutoRemat(memory_limit=limits)
        done[limits] = chosen_flops(auto.for_stages(2, lambda: devices), [graph] * 2)
    first, last = done[3000, 9000]
    assert last < first
    assert done[9000, 3000] == [last, first]


def test_what_is_held_between_the_halves_of_a_backward_counts():
    graph, done = blocks(6), {}
    for splits in (False, True):
        each = device({0: graph}, in_flight=2, splits=splits)
        policies = AutoRemat(memory_limit=4000).for_stages(1, lambda each=each: [each])
        (saved,) = (policy.saved(graph) for policy in policies)
        again = [x for x in graph.wanted if x not in saved]
        done[splits] = sum(graph.sizes[x] for x in (*saved, *saved, *again))
    assert done[True] <= 4000 < done[False]


def test_too_little_memory_says_how_much_is_needed():
    devices = [device({0: blocks(4)}, in_flight=2, fixed_bytes=1000.0)]
    with pytest.raises(ValueError, match=r"needs .* Received memory_limit=1,200\."):
        AutoRemat(memory_limit=1200).for_stages(1, lambda: devices)
    unknown = [device({0: blocks(4)}, in_flight=2, fixed_bytes=None)]
    with pytest.raises(ValueError, match="drop_remainder=True"):
        AutoRemat(memory_limit=1e6).for_stages(1, lambda: unknown)
    AutoRemat().for_stages(1, lambda: unknown)


def test_its_limit_is_that_of_the_pipeline_unless_it_has_its_own():
    assert AutoRemat().within(9e9) == AutoRemat(memory_limit=9e9)
    assert AutoRemat(memory_limit=1e9).within(9e9).memory_limit == 1e9
    assert AutoRemat(flops_per_byte=3).within(9e9) == AutoRemat(flops_per_byte=3)
    with pytest.raises(ValueError, match="flops_per_byte"):
        AutoRemat(flops_per_byte=-1)
