"""Batches that are a function of their step: each example once an epoch."""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpipe_trainer import batches
from tfgpipe_trainer.batches import (
    ArrayExamples,
    HostShard,
    ItemExamples,
    as_examples,
)
from tfgpipe_trainer.hyperparams import HyperparameterError


def _rows(num_examples: int, steps: range, **options: Any) -> list[list[int]]:
    dataset = batches.training_batches(
        ArrayExamples(np.arange(num_examples)),
        **{"batch_size": 4, "seed": 1, **options},
        steps=steps,
    )
    return [batch.tolist() for batch in dataset.as_numpy_iterator()]


@settings(max_examples=10, deadline=None)
@given(
    num_examples=st.integers(1, 30), size=st.integers(1, 7), seed=st.integers(0, 2**31)
)
def test_an_epoch_has_each_example_once(num_examples, size, seed):
    found = _rows(num_examples, range(2 * num_examples), batch_size=size, seed=seed)
    line = np.concatenate(found)
    for epoch in line[: 2 * num_examples].reshape(2, num_examples):
        assert sorted(epoch) == list(range(num_examples))


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {
        tuple(epoch)
        for seed in range(5)
        for epoch in _rows(20, range(5), batch_size=20, seed=seed)
    }
    assert len(orders) == 25


def test_an_order_never_changes():
    """A run that was begun with an older version goes on with the same batches."""
    assert _rows(1000, range(2), seed=1) == [
        [344, 776, 991, 552],
        [888, 380, 333, 212],
    ]


@settings(max_examples=10, deadline=None)
@given(first=st.integers(0, 7))
def test_a_step_does_not_depend_on_where_a_run_began(first):
    assert _rows(10, range(first, 8)) == _rows(10, range(8))[first:]


def test_hosts_have_the_rows_of_one_batch() -> None:
    parts = [_rows(10, range(3), shard=HostShard(host, 2)) for host in (0, 1)]
    joined = [first + second for first, second in zip(*parts, strict=True)]
    assert joined == _rows(10, range(3))


class Squares:
    """Items that are dicts of an array and a number."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], int]:
        return {"x": np.full([2], index, "float64")}, index**2


def _negated(batch: Any, step: int, rows: slice) -> Any:
    inputs, squares = batch
    return inputs, -squares - 100 * step + rows.start


@pytest.mark.parametrize("num_workers", [0, 2])
def test_items_are_stacked_and_transformed(num_workers: int) -> None:
    dataset = batches.training_batches(
        as_examples(Squares()),
        batch_size=2,
        steps=range(3, 6),
        seed=0,
        num_workers=num_workers,
        transform=_negated,
    )
    assert len(dataset) == 3
    for step, (inputs, squares) in enumerate(dataset.as_numpy_iterator(), start=3):
        assert (inputs["x"].shape, inputs["x"].dtype) == ((2, 2), np.float32)
        np.testing.assert_array_equal(
            squares, -(inputs["x"][:, 0].astype(int) ** 2) - 100 * step
        )


def test_validation_is_in_order_and_spread_over_all() -> None:
    def rows(num_batches: int) -> list[list[int]]:
        dataset = batches.validation_batches(
            ArrayExamples(np.arange(10)), batch_size=4, num_batches=num_batches
        )
        return [batch.tolist() for batch in dataset.as_numpy_iterator()]

    assert rows(9) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert rows(1) == [[0, 3, 6, 9]]


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("host", [0, 1])
def test_a_dataset_is_repeated_and_a_run_that_goes_on_skips(first, host) -> None:
    dataset = batches.batches_of_dataset(
        tf.data.Dataset.range(6),
        batch_size=4,
        steps=range(first, 5),
        shard=HostShard(host, 2),
    )
    line = [i % 6 for i in range(20)]
    expected = [line[4 * s + 2 * host :][:2] for s in range(first, 5)]
    assert [x.tolist() for x in dataset.as_numpy_iterator()] == expected


def test_a_dataset_keeps_the_structure_of_its_examples() -> None:
    x = tf.data.Dataset.from_tensor_slices(({"a": [1, 2]}, [3, 4]))
    dataset = batches.batches_of_dataset(x, batch_size=2, steps=range(1))
    ((inputs, targets),) = dataset.as_numpy_iterator()
    assert (inputs["a"].tolist(), targets.tolist()) == ([1, 2], [3, 4])


def _generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((np.zeros(3), np.zeros(4)), r"same number of rows.*\(3,\), \(4,\)"),
        (np.zeros(()), "same number of rows, at least one"),
        ([], "expected at least one; received none"),
        (_generator(), "a sequence with len.* received a generator"),
    ],
)
def test_what_are_no_examples_is_refused(found: Any, words: str) -> None:
    with pytest.raises(HyperparameterError, match=words):
        as_examples(found)


def test_items_of_several_shapes_are_refused() -> None:
    items = ItemExamples([np.zeros(2), np.zeros(3)])
    with pytest.raises(HyperparameterError, match=r"one shape each; .* a tuple"):
        items.take(np.array([0, 1]))


def test_an_error_in_a_function_ends_the_batches() -> None:
    def make(step: int) -> np.ndarray:
        if step == 2:
            raise HyperparameterError("data.files: expected something else.")
        return np.zeros(1)

    dataset = batches.from_function(make, range(4))
    with pytest.raises(tf.errors.OpError, match="expected something else"):
        list(dataset.as_numpy_iterator())


def test_a_function_may_be_partial() -> None:
    make = functools.partial(np.full, fill_value=3)
    assert [len(x) for x in batches.from_function(make, range(1, 3), any_size=True)]


def test_processes_are_ended_once_and_not_while_a_batch_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    events: list[str] = []

    class Batches:
        def __next__(self) -> np.ndarray:
            events.append("asked")
            time.sleep(0.2)
            events.append("made")
            return np.ones(2)

        def close(self) -> None:
            events.append("closed")

    taken: list[np.ndarray] = []
    reader = threading.Thread(
        target=lambda: taken.extend(batches._until_exit(Batches()))
    )
    reader.start()
    while len(taken) < 2:
        time.sleep(0.01)
    (close,) = at_exit
    close()
    reader.join(5)
    assert not reader.is_alive()
    assert events == ["asked", "made"] * (len(events) // 2) + ["closed"]
