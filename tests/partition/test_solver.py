"""The cut into stages, against brute force, which tries every cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tfgpipe._util import stage_spans
from tfgpipe.partition.given import Partition
from tfgpipe.partition.solver import best_partition
from tfgpipe.simulation import imbalance

pytestmark = pytest.mark.pure

# Costs with many ties: equal ones, weightless ones, and none that rounding can tell.
COSTS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=12
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A sequence to cut, small enough for brute force."""

    costs: list[int]
    num_stages: int

    @property
    def cuts(self):
        num_calls = len(self.costs)
        for ends in itertools.combinations(range(1, num_calls), self.num_stages - 1):
            bounds = [0, *ends, num_calls]
            yield tuple(b - a for a, b in itertools.pairwise(bounds))

    def heaviest(self, cut):
        # Weightless calls cost one each when all are.
        costs = self.costs if any(self.costs) else [1] * len(self.costs)
        return max(sum(costs[span]) for span in stage_spans(cut))

    def squares(self, cut):
        return sum(sum(self.costs[span]) ** 2 for span in stage_spans(cut))


def entries(table, cut):
    return [int(table[span.start, span.stop]) for span in stage_spans(cut)]


def starts(cut):
    return list(itertools.accumulate(cut))[:-1]


@st.composite
def problems(draw):
    costs = draw(COSTS)
    return Problem(costs, draw(st.integers(1, min(5, len(costs)))))


@st.composite
def problems_with_a_table(draw, largest=9):
    problem = draw(problems())
    size = len(problem.costs) + 1
    return problem, draw(
        arrays(np.int64, (size, size), elements=st.integers(0, largest))
    )


@given(problems())
def test_no_cut_has_a_lighter_heaviest_stage(problem):
    cut = best_partition(problem.costs, num_stages=problem.num_stages)
    assert len(cut) == problem.num_stages
    assert sum(cut) == len(problem.costs)
    assert all(type(count) is int and count >= 1 for count in cut)
    assert problem.heaviest(cut) == min(map(problem.heaviest, problem.cuts))


@given(problems())
def test_of_the_cuts_that_tie_the_evenest_wins(problem):
    cut = best_partition(problem.costs, num_stages=problem.num_stages)
    best = min((problem.heaviest(c), problem.squares(c)) for c in problem.cuts)
    assert (problem.heaviest(cut), problem.squares(cut)) == best


@given(problems_with_a_table())
def test_of_the_cuts_that_tie_the_fewest_bytes_come_before_the_evenest(problem_table):
    problem, received = problem_table

    def rank(cut):
        bytes_in = sum(entries(received, cut))
        return problem.heaviest(cut), bytes_in, problem.squares(cut)

    cut = best_partition(
        problem.costs, num_stages=problem.num_stages, received_bytes=received
    )
    assert rank(cut) == min(map(rank, problem.cuts))


@given(problems_with_a_table(), st.sampled_from([0.05, 0.25, 1.0, 100.0]))
def test_slack_is_spent_on_bytes_and_never_exceeded(problem_table, slack):
    problem, received = problem_table
    bound = min(map(problem.heaviest, problem.cuts)) * (1 + slack) + 1e-6

    def rank(cut):
        return sum(entries(received, cut)), problem.squares(cut)

    cut = best_partition(
        problem.costs,
        num_stages=problem.num_stages,
        received_bytes=received,
        slack=slack,
    )
    assert problem.heaviest(cut) <= bound
    assert rank(cut) == min(
        rank(c) for c in problem.cuts if problem.heaviest(c) <= bound
    )


@given(problems_with_a_table(), st.integers(0, 9))
def test_a_memory_limit_is_kept_or_the_least_one_named(problem_table, limit):
    problem, memory = problem_table

    def need(cut):
        return max(entries(memory, cut))

    def cut_within(limit):
        return best_partition(
            problem.costs,
            num_stages=problem.num_stages,
            memory=memory,
            memory_limit=limit,
        )

    enough = min(map(need, problem.cuts))
    if enough > limit:
        words = f"limit={limit} bytes.* is {enough} bytes, {enough - limit} bytes more"
        with pytest.raises(ValueError, match=words):
            cut_within(limit)
        limit = enough
    cut = cut_within(limit)
    assert need(cut) <= limit
    assert problem.heaviest(cut) == min(
        problem.heaviest(c) for c in problem.cuts if need(c) <= limit
    )


@given(problems(), st.data())
def test_stages_start_only_where_they_may(problem, data):
    size = len(problem.costs)
    may_start = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    cuts = [c for c in problem.cuts if all(may_start[s] for s in starts(c))]

    def cut_there():
        return best_partition(
            problem.costs, num_stages=problem.num_stages, may_start=may_start
        )

    if cuts:
        cut = cut_there()
        assert cut in cuts
        assert problem.heaviest(cut) == min(map(problem.heaviest, cuts))
    else:
        possible = 1 + sum(may_start[1:])
        with pytest.raises(ValueError, match=f"at most {possible} stages are possible"):
            cut_there()


@given(problems_with_a_table(), problems_with_a_table(), st.data())
def test_all_wishes_hold_together(problem_table, other, data):
    problem, received = problem_table
    size = len(problem.costs)
    memory = np.resize(other[1], received.shape)
    may_start = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))

    def rank(cut):
        return sum(entries(received, cut)), problem.squares(cut)

    allowed = [
        cut
        for cut in problem.cuts
        if all(may_start[s] for s in starts(cut)) and max(entries(memory, cut)) <= 5
    ]
    arguments = {
        "num_stages": problem.num_stages,
        "received_bytes": received,
        "memory": memory,
        "memory_limit": 5,
        "may_start": may_start,
        "slack": 0.25,
    }
    if not allowed:
        with pytest.raises(
            ValueError, match=r"stages are possible|stays within `memory_limit`"
        ):
            best_partition(problem.costs, **arguments)
        return
    bound = min(map(problem.heaviest, allowed)) * 1.25
    assert rank(best_partition(problem.costs, **arguments)) == min(
        rank(cut) for cut in allowed if problem.heaviest(cut) <= bound
    )


@pytest.mark.parametrize(
    ("costs", "num_stages", "cut"),
    [
        # Lingvo's greedy cut leaves a stage empty here.
        ([10, 1, 1, 1], 2, (1, 3)),
        ([1] * 16, 4, (4, 4, 4, 4)),
        ([1, 2, 3, 4, 5, 6], 2, (4, 2)),
        # The heavy stage leaves the others free: they are even, too.
        ([9, 1, 1, 1, 1, 1, 1], 3, (1, 3, 3)),
        ([7], 1, (1,)),
        # The sum is more than a float holds.
        ([1e308, 1e308, 1e307, 1e307], 2, (1, 3)),
        ([3, 1, 2], 3, (1, 1, 1)),
    ],
)
def test_small_partitions_are_those_worked_out_by_hand(costs, num_stages, cut):
    assert best_partition(costs, num_stages=num_stages) == cut


@given(st.integers(1, 60), st.data())
def test_weightless_calls_spread_evenly(num_calls, data):
    num_stages = data.draw(st.integers(1, num_calls))
    cut = best_partition([0] * num_calls, num_stages=num_stages)
    assert max(cut) - min(cut) <= 1


def test_weightless_calls_beside_a_heavy_one_spread_evenly():
    cut = best_partition([10] + [0] * 8, num_stages=3)
    assert cut == (3, 3, 3)


def test_weightless_calls_stay_even_whatever_they_receive():
    received = np.ones((9, 9))
    received[1, 8] = 0  # One call and seven would receive nothing.
    assert best_partition([0] * 8, num_stages=2, received_bytes=received) == (4, 4)


@given(st.floats(5e-324, 2e307), st.sampled_from([3, 4]))
def test_rounding_does_not_break_ties(unit, count):
    """In floating point 0.1 + 0.2 + 0.3 + 0.1 is not 0.1 + 0.6."""
    received = np.ones((6, 6))
    received[count, 5] = 0
    costs = [1 * unit, 2 * unit, 3 * unit, 1 * unit, 6 * unit]
    cut = best_partition(costs, num_stages=2, received_bytes=received)
    assert cut == (count, 5 - count)


@pytest.mark.parametrize(("excess", "cut"), [(1e-11, (2, 1)), (1e-7, (1, 2))])
def test_bottlenecks_tie_only_within_rounding(excess, cut):
    received = np.zeros((4, 4))
    received[1, 3] = 1  # The cut (2, 1) saves it, with a bottleneck that is heavier.
    assert best_partition([2, excess, 1], num_stages=2, received_bytes=received) == cut


def test_a_thousand_calls_take_seconds():
    random = np.random.default_rng(0)
    received = random.integers(0, 1000, (1001, 1001))
    start = time.process_time()
    best_partition(
        random.random(1000), num_stages=64, received_bytes=received, slack=0.1
    )
    assert time.process_time() - start < 8


@pytest.mark.parametrize("num_stages", [-1, 0, 4])
def test_a_number_of_stages_that_calls_cannot_fill_is_refused(num_stages):
    words = rf"at most 3 stages are possible.*num_stages={num_stages} for 3 calls"
    with pytest.raises(ValueError, match=words):
        best_partition([1, 1, 1], num_stages=num_stages)


def test_no_call_makes_no_stage():
    with pytest.raises(ValueError, match="at most 0 stages are possible here"):
        best_partition([], num_stages=1)


def test_whether_the_first_call_may_start_a_stage_does_not_matter():
    may_start = np.array([False, False, True])
    assert best_partition([1, 1, 1], num_stages=2, may_start=may_start) == (2, 1)
    assert not may_start[0]  # The caller's array is left as it was.


def test_the_memory_error_says_what_to_try():
    memory = np.full((4, 4), 3_000_000.0)
    memory[0, 1] = memory[1, 3] = 1_999_999.5  # Whole bytes are named.
    words = (
        "No partition into 2 stages stays within `memory_limit`, the memory of one "
        "device. Received memory_limit=1,500,000 bytes; the least limit that some "
        "partition satisfies is 2,000,000 bytes, 500,000 bytes more. Try more stages, "
        "more microbatches, or remat."
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        best_partition([1, 1, 1], num_stages=2, memory=memory, memory_limit=1_500_000)
    within = best_partition(
        [1, 1, 9], num_stages=2, memory=memory, memory_limit=1_999_999.75
    )
    assert within == (1, 2)


def test_only_stages_of_at_least_one_call_are_read_of_a_table():
    table = np.where(np.triu(np.ones((4, 4)), 1), 1.0, math.nan)
    cut = best_partition(
        [1, 1, 2], num_stages=2, received_bytes=table, memory=table, memory_limit=1
    )
    assert cut == (2, 1)


def test_tables_are_left_as_they_were():
    memory, received = np.ones((4, 4)), np.ones((4, 4))
    best_partition(
        [1, 1, 2], num_stages=2, received_bytes=received, memory=memory, memory_limit=1
    )
    assert (memory == 1).all()
    assert (received == 1).all()


@given(st.data())
def test_a_table_of_costs_that_do_not_add_up_has_the_least_bottleneck(data):
    num_calls = data.draw(st.integers(2, 8))
    num_stages = data.draw(st.integers(1, min(4, num_calls)))
    entry = st.integers(0, 20)
    row = st.lists(entry, min_size=num_calls + 1, max_size=num_calls + 1)
    rows = st.lists(row, min_size=num_calls + 1, max_size=num_calls + 1)
    table = np.array(data.draw(rows), float)

    def heaviest(cut):
        return max(table[span.start, span.stop] for span in stage_spans(cut))

    cuts = Problem([1] * num_calls, num_stages).cuts
    best = best_partition(table, num_stages=num_stages)
    assert heaviest(best) == min(map(heaviest, cuts))


@given(st.data())
def test_stages_may_differ_in_costs_and_memory(data):
    num_calls = data.draw(st.integers(2, 7))
    num_stages = data.draw(st.integers(1, min(4, num_calls)))
    shape = (num_stages, num_calls + 1, num_calls + 1)
    seed = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    costs, memory = seed.integers(0, 20, (2, *shape)).astype(float)
    if data.draw(st.booleans()):  # The last two stages are alike.
        costs = [*costs[:-1], costs[max(num_stages - 2, 0)]]

    def most(tables, cut):
        pairs = zip(tables, stage_spans(cut), strict=True)
        return max(table[span.start, span.stop] for table, span in pairs)

    cuts = list(Problem([1] * num_calls, num_stages).cuts)
    needs = [most(memory, cut) for cut in cuts]
    limit = data.draw(st.sampled_from(needs))
    within = [c for c, need in zip(cuts, needs, strict=True) if need <= limit]
    best = best_partition(
        costs, num_stages=num_stages, memory=list(memory), memory_limit=limit
    )
    assert best in within
    assert most(costs, best) == min(most(costs, cut) for cut in within)
    additive = best_partition(
        [1] * num_calls, num_stages=num_stages, memory=list(memory), memory_limit=limit
    )
    assert max(additive) == min(map(max, within))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"costs": [1, -1, 1]},
            r"at least 0 for each call\. Received costs=\[1\.0, -1",
        ),
        ({"costs": [1, math.nan, 1]}, r"finite number.*Received costs=\[1\.0, nan"),
        ({"costs": [1, math.inf, 1]}, r"finite number.*Received costs=\[1\.0, inf"),
        (
            {"costs": [[[1, 1], [1, 1]]]},
            r"`costs` holds one table for all stages.*Received 1 tables for 2 stages",
        ),
        ({"costs": [[1, 1, 1]] * 2}, r"`costs`.*shape \(2, 2\) for 1 calls\. Received"),
        ({"slack": -0.5}, r"`slack`.*at least 0\. Received slack=-0\.5\. Use 0\.05"),
        ({"slack": math.nan}, "Received slack=nan"),
        ({"may_start": [True]}, r"one boolean for each call\. Received 1 for 3 calls"),
        (
            {"memory_limit": 5},
            "`memory_limit` needs `memory`.*memory_limit=5 and memory=None",
        ),
        (
            {"received_bytes": np.ones((3, 3))},
            r"`received_bytes` .*shape \(4, 4\) for 3 calls\. Received shape \(3, 3\)",
        ),
        (
            {"memory": np.ones(4), "memory_limit": 1},
            r"`memory` .*shape \(4, 4\) for 3 calls\. Received shape \(4,\)",
        ),
        (
            {"received_bytes": np.full((4, 4), -2)},
            r"`received_bytes` holds finite numbers.* values from -2\.0 to -2\.0",
        ),
        (
            {"memory": np.full((4, 4), math.inf), "memory_limit": 1},
            "`memory` holds finite numbers.*Received values from inf to inf",
        ),
    ],
)
def test_malformed_arguments_are_named(arguments, words):
    costs = arguments.pop("costs", [1, 1, 1])
    with pytest.raises(ValueError, match=words):
        best_partition(costs, num_stages=2, **arguments)


@pytest.mark.parametrize(
    ("stage_costs", "ratio"),
    [([4, 4, 4], 1.0), ([0.1] * 3, 1.0), ([6, 1, 2], 2.0), ([0, 0], 1.0), ([5], 1.0)],
)
def test_imbalance_is_the_largest_over_the_mean(stage_costs, ratio):
    assert imbalance(stage_costs) == ratio


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([], "each at least 1"),
        ([3, 0], r"each at least 1\. Received partition=\[3, 0\]"),
        ([1.5, 1.5], r"each at least 1\. Received partition=\[1\.5, 1\.5\]"),
        ([1, 1], r"adds up to 2, for 3 calls: a, b, c\. .* as partition=\['a'\]\."),
    ],
)
def test_a_partition_that_cannot_be_is_refused(counts, words):
    with pytest.raises(ValueError, match=words):
        Partition.of(counts).counts(["a", "b", "c"])


def test_a_partition_that_adds_up_is_taken_as_it_is():
    assert Partition.of([2, 1]).counts(["a", "b", "c"]) == (2, 1)


def test_the_names_of_many_calls_are_told_in_part_and_as_cut_points():
    names = [f"layer_{i}" for i in range(43)]
    with pytest.raises(ValueError, match="for 43 calls: ") as raised:
        Partition.of([2, 2, 2, 2]).counts(names)
    message = str(raised.value)
    assert "layer_0, layer_1, " in message
    assert "layer_5, ... (32 more), layer_38, " in message
    assert "as partition=['layer_9', 'layer_20', 'layer_31']." in message


def test_spans_follow_each_other():
    assert stage_spans((2, 1, 3)) == (slice(0, 2), slice(2, 3), slice(3, 6))
