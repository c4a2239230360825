"""Windows cut from a text: what a language model reads, and what it is to predict."""

from __future__ import annotations

import numpy as np

from tfgpipe_params.lm import corpus
from tfgpipe_trainer.batches import validation_batches

TEXT = np.arange(200, dtype=np.uint8)


def _random(**changes: object) -> list[tuple[np.ndarray, np.ndarray]]:
    settings = {"length": 8, "batch_size": 4, "steps": range(5), "seed": 1, **changes}
    return list(corpus.random_windows(TEXT, **settings).as_numpy_iterator())


def test_targets_are_the_bytes_that_follow() -> None:
    for inputs, targets in _random():
        assert inputs.shape == targets.shape == (4, 8)
        assert np.array_equal(inputs + 1, targets)  # The text counts up.


def test_the_batch_of_a_step_depends_on_seed_and_step_alone() -> None:
    from_zero, from_three = _random(), _random(steps=range(3, 5))
    assert len(from_three) == 2
    for late, early in zip(from_three, from_zero[3:], strict=True):
        assert np.array_equal(late[0], early[0])
    assert not np.array_equal(_random(seed=2)[0][0], from_zero[0][0])
    assert not np.array_equal(from_zero[0][0], from_zero[1][0])


def test_random_windows_reach_both_ends_of_the_text() -> None:
    batches = _random(steps=range(2000))
    assert min(inputs.min() for inputs, _ in batches) == TEXT[0]
    assert max(targets.max() for _, targets in batches) == TEXT[-1]


def _even(num_batches: int, **changes: int) -> list[list[int]]:
    windows = corpus.Windows(TEXT, **{"length": 8, **changes})
    found = validation_batches(windows, batch_size=2, num_batches=num_batches)
    pairs = list(found.as_numpy_iterator())
    for inputs, targets in pairs:
        assert inputs.shape[1:] == targets.shape[1:] == (8,)
        assert np.array_equal(inputs + 1, targets)
    return [inputs[:, 0].tolist() for inputs, _ in pairs]


def test_even_windows_spread_over_the_whole_text() -> None:
    assert _even(3) == [[0, 38], [76, 114], [152, 191]]
    assert _even(2, stride=9) == [[0, 63], [126, 189]]


def test_even_windows_of_a_small_text_come_once() -> None:
    assert _even(32, stride=9) == [[18 * i, 18 * i + 9] for i in range(11)]
