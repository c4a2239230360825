"""Which rows of a batch a host reads, and which examples validation has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpipe_trainer.batches import HostShard, validation_indices
from tfgpipe_trainer.hyperparams import HyperparameterError

pytestmark = pytest.mark.pure


@settings(deadline=None)
@given(size=st.integers(1, 8), num_hosts=st.integers(1, 8))
def test_hosts_share_a_batch_out(size, num_hosts):
    rows = list(range(size * num_hosts))
    parts = [
        rows[HostShard(host, num_hosts).rows(len(rows))] for host in range(num_hosts)
    ]
    assert [row for part in parts for row in part] == rows
    assert {len(part) for part in parts} == {size}


def test_a_batch_that_hosts_cannot_share_evenly_is_refused():
    with pytest.raises(HyperparameterError) as error:
        HostShard(0, 4).rows(10)
    assert str(error.value) == (
        "training.batch_size: expected a multiple of 4, the number of hosts that read "
        "it; received 10."
    )


@given(count=st.integers(1, 500), size=st.integers(1, 9))
def test_validation_has_all_examples_unless_fewer_are_asked_for(count, size):
    batches = validation_indices(count, batch_size=size, num_batches=None)
    assert [i for batch in batches for i in batch.tolist()] == list(range(count))


@given(count=st.integers(1, 50), size=st.integers(1, 9), number=st.integers(1, 9))
def test_validation_is_in_order_without_repetition(count, size, number):
    batches = validation_indices(count, batch_size=size, num_batches=number)
    line = [index for batch in batches for index in batch.tolist()]
    assert line == sorted(set(line))
    assert len(line) == min(count, size * number)
    assert line[0] == 0
    assert len(line) == 1 or line[-1] == count - 1
