"""Checkpoints on disk are there whole, or not at all.

`tests/trainer/test_store.py` reads and damages what is in them.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.checkpoint.run_state import RunState
from tfgpipe_trainer.errors import CheckpointError

pytestmark = pytest.mark.pure


def write(folder: Path, step: int, data: bytes = b"values") -> Path:
    with store.writing(folder, step) as aside:
        (aside / "data").write_bytes(data)
    return store.path_of(folder, step)


def test_checkpoints_are_found_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (20, 100, 3):
        write(tmp_path, step)
    assert store.steps(tmp_path) == [3, 20, 100]


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    assert store.steps(tmp_path / "none") == []


def test_one_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with store.writing(tmp_path, 2) as aside:
            (aside / "data").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path, 1)
    with pytest.raises(OSError, match="No space"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_nobody_reads_what_a_killed_process_has_left(tmp_path: Path) -> None:
    write(tmp_path, 1).rename(tmp_path / ".writing-1-77")
    (tmp_path / ".writing-file").touch()
    (tmp_path / ".writing-link").symlink_to(tmp_path)
    assert store.steps(tmp_path) == []
    store.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_step_written_again_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path, 1, b"old")
    assert (write(tmp_path, 1, b"new") / "data").read_bytes() == b"new"
    assert store.steps(tmp_path) == [1]


def test_a_record_that_began_without_metrics_ends_without() -> None:
    """Of a checkpoint of format 2: their means would be of the later steps alone."""
    state = RunState.read(RunState(loss_sum=6.0, num_losses=2).written())
    state.count({"loss": 3.0, "accuracy": 1.0})
    assert state.means() == {"loss": 3.0}
    state.start_record()
    state.count({"loss": math.nan, "accuracy": 0.0})
    state.count({"loss": 2.0, "accuracy": 0.5})
    assert state.means() == {"loss": 2.0, "accuracy": 0.5}


@pytest.mark.parametrize("change", [{"more": 1}, None])
def test_notes_of_another_version_are_refused(change: dict[str, int] | None) -> None:
    written = RunState(best_step=3).written()
    assert RunState.read(written) == RunState(best_step=3)
    # Those of format 2 had no other metrics.
    before = {name: each for name, each in written.items() if name != "metric_sums"}
    assert RunState.read(before) == RunState(best_step=3)
    written = {**written, **change} if change else {"best_step": 3}
    with pytest.raises(CheckpointError, match="whose notes are best_step, "):
        RunState.read(written)


def test_damaged_ones_are_moved_aside_and_none_is_lost(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path, 5)
        moved = store.set_aside(tmp_path, 5)
        assert moved.name == f"damaged-{number}-step-00000005"
        assert os.listdir(moved)
    assert store.steps(tmp_path) == []


# Which of them are kept.

TIMES = st.dictionaries(
    st.integers(0, 10_000), st.floats(0, 1e6), min_size=1, max_size=20
).map(lambda found: dict(zip(sorted(found), sorted(found.values()), strict=True)))


@given(
    TIMES, st.integers(1, 5), st.none() | st.floats(0, 100), st.none() | st.integers()
)
def test_the_last_and_the_best_always_stay(times, keep, keep_hours, best):
    gone = store.steps_to_delete(times, keep=keep, keep_hours=keep_hours, best=best)
    left = sorted(set(times) - set(gone))
    assert left[-keep:] == sorted(times)[-keep:]
    assert best not in gone
    if keep_hours is None:
        assert len(left) <= keep + 1


@given(TIMES, st.floats(0.1, 100))
def test_what_stays_for_good_does_not_depend_on_what_has_gone(times, hours):
    """Deleting after each checkpoint leaves what deleting once at the end does."""
    there: dict[int, float] = {}
    for step in sorted(times):
        there[step] = times[step]
        for gone in store.steps_to_delete(there, keep=2, keep_hours=hours):
            del there[gone]
    for_good = [there[step] for step in sorted(there)[:-2]]
    apart = [b - a for a, b in itertools.pairwise(for_good)]
    assert all(gap >= 3600 * hours for gap in apart)
    assert sorted(there)[-2:] == sorted(times)[-2:]
    assert min(times) in there


def test_what_has_not_the_name_of_its_step_is_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for name in ("step-12", "step-000000000002", "step-٠٠٠٠٠٠٠٣", "step-x"):
        (tmp_path / name).mkdir()
    assert store.steps(tmp_path) == [2]
    names = {path.name for path in store.misnamed(tmp_path)}
    assert names == {"step-12", "step-000000000002", "step-٠٠٠٠٠٠٠٣"}
