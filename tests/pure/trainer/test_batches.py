"""The order of examples: each once an epoch, found from the step alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches import Share, examples_of_step, permutation
from trainer.hyperparams import HyperparameterError

sizes = st.integers(1, 50)
seeds = st.integers(0, 2**31)


def batches(steps: range, **arguments: int) -> list[list[int]]:
    return [examples_of_step(step, **arguments).tolist() for step in steps]


@settings(deadline=None)
@given(num_examples=sizes, seed=seeds, epoch=st.integers(0, 1000))
def test_an_epoch_has_each_example_once(num_examples, seed, epoch):
    found = permutation(num_examples, seed=seed, epoch=epoch)
    assert sorted(found) == list(range(num_examples))


@settings(deadline=None)
@given(num_examples=sizes, batch_size=sizes, seed=seeds)
def test_batches_are_epochs_one_after_another(num_examples, batch_size, seed):
    arguments = {"num_examples": num_examples, "batch_size": batch_size}
    line = np.concatenate(batches(range(2 * num_examples), seed=seed, **arguments))
    epochs = line[: 2 * batch_size * num_examples].reshape(-1, num_examples)
    for epoch, examples in enumerate(epochs[:3]):
        expected = permutation(num_examples, seed=seed, epoch=epoch)
        assert examples.tolist() == expected.tolist()


@settings(deadline=None)
@given(num_examples=sizes, batch_size=sizes, seed=seeds, first=st.integers(0, 20))
def test_a_step_does_not_depend_on_where_a_run_began(
    num_examples, batch_size, seed, first
):
    arguments = {"num_examples": num_examples, "batch_size": batch_size}
    whole = batches(range(25), seed=seed, **arguments)
    assert batches(range(first, 25), seed=seed, **arguments) == whole[first:]


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {
        tuple(permutation(20, seed=seed, epoch=epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_an_order_never_changes():
    """A run that was begun with an older version goes on with the same batches."""
    found = permutation(10, seed=1, epoch=2).tolist()
    assert found == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


@settings(deadline=None)
@given(size=st.integers(1, 8), num_hosts=st.integers(1, 8))
def test_hosts_share_a_batch_out(size, num_hosts):
    rows = list(range(size * num_hosts))
    parts = [rows[Share(host, num_hosts).rows(len(rows))] for host in range(num_hosts)]
    assert [row for part in parts for row in part] == rows
    assert {len(part) for part in parts} == {size}


def test_a_batch_that_hosts_cannot_share_evenly_is_refused():
    with pytest.raises(HyperparameterError) as error:
        Share(0, 4).rows(10)
    assert str(error.value) == (
        "training.batch_size: expected a multiple of 4, the number of hosts that read "
        "it; received 10."
    )
