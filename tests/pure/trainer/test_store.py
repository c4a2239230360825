"""Checkpoints on disk are there whole, or not at all, and damage is found."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint import store
from trainer.checkpoint.store import DamagedError, RunState
from trainer.errors import CheckpointError


def write(folder: Path, step: int, data: bytes = b"values") -> Path:
    with store.writing(folder, step, {"note": step}) as aside:
        (aside / "data").write_bytes(data)
    return store.place(folder, step)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for step in (20, 100, 3):
        write(tmp_path, step)
    assert store.steps(tmp_path) == [3, 20, 100]
    about = store.check(tmp_path, 20)
    assert (about.step, about.notes) == (20, {"note": 20})
    assert about.time == store.about(tmp_path, 20).time


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    assert store.steps(tmp_path / "none") == []


def test_one_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with store.writing(tmp_path, 2, {}) as aside:
            (aside / "data").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path, 1)
    with pytest.raises(OSError, match="No space"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_nobody_reads_what_a_killed_process_has_left(tmp_path: Path) -> None:
    write(tmp_path, 1).rename(tmp_path / ".writing-1-77")
    assert store.steps(tmp_path) == []
    store.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_step_written_again_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path, 1, b"old")
    assert (write(tmp_path, 1, b"new") / "data").read_bytes() == b"new"
    store.check(tmp_path, 1)


@pytest.mark.parametrize("name", ["data", "about.json", "about.sha256"])
@pytest.mark.parametrize("bit", [0, 7])
def test_every_flipped_bit_is_found(name: str, bit: int, tmp_path: Path) -> None:
    path = write(tmp_path, 1) / name
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << bit)]) + whole[i + 1 :])
        with pytest.raises(DamagedError, match="has another checksum"):
            store.check(tmp_path, 1)
    path.write_bytes(whole)
    store.check(tmp_path, 1)


@pytest.mark.parametrize("name", ["data", "about.json", "about.sha256"])
def test_every_truncation_is_found(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, 1) / name
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match=r"of 6 bytes|has another checksum"):
            store.check(tmp_path, 1)


def rewrite(folder: Path, step: int, change: Callable[[Any], Any]) -> None:
    """Changes what a checkpoint says of itself, its checksum included."""
    about = store.place(folder, step) / "about.json"
    about.write_text(json.dumps(change(json.loads(about.read_text()))))
    checksum = hashlib.sha256(about.read_bytes()).hexdigest()
    about.with_suffix(".sha256").write_text(f"{checksum}  about.json\n")


def test_one_of_the_format_before_is_read(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def before(body: dict[str, Any]) -> dict[str, Any]:
        assert body.pop("format") == store.FORMAT == 1
        return body

    rewrite(tmp_path, 1, before)
    assert store.check(tmp_path, 1).notes == {"note": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: {**body, "format": 2}, r"of format 1 or before; .* format 2\."),
        (lambda body: {**body, "format": "1"}, r"is of format '1'\."),
        (lambda body: {**body, "more": 1}, r"received .*, of which more cannot be"),
        (
            lambda body: {n: v for n, v in body.items() if n != "time"},
            r"to hold step, time, notes, files alone; .*, of which time cannot be used",
        ),
        (lambda body: {**body, "files": []}, r"of which files cannot be used"),
        (lambda body: {**body, "files": {"a": 1}}, r"of which files cannot be used"),
        (lambda body: [], r"received none of them"),
    ],
)
def test_one_of_another_version_is_refused(
    change: Callable[[Any], Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path, 2)
    rewrite(tmp_path, 2, change)
    with pytest.raises(CheckpointError, match=words):
        store.check(tmp_path, 2)


def test_what_is_no_json_is_damaged(tmp_path: Path) -> None:
    about = write(tmp_path, 1) / "about.json"
    about.write_text("")
    checksum = hashlib.sha256(b"").hexdigest()
    about.with_suffix(".sha256").write_text(f"{checksum}  about.json\n")
    with pytest.raises(DamagedError, match=r"about\.json is no JSON: Expecting value"):
        store.check(tmp_path, 1)


@pytest.mark.parametrize("change", [{"more": 1}, None])
def test_notes_of_another_version_are_refused(change: dict[str, int] | None) -> None:
    written = RunState(best_step=3).written()
    assert RunState.read(written) == RunState(best_step=3)
    # Those of format 1 had no losses.
    before = {name: each for name, each in written.items() if "loss" not in name}
    assert RunState.read(before) == RunState(best_step=3)
    written = {**written, **change} if change else {"best_step": 3}
    with pytest.raises(CheckpointError, match="notes, in its about"):
        RunState.read(written)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (write(tmp_path, 1) / "data").unlink()
    with pytest.raises(DamagedError, match="data cannot be read: No such file"):
        store.check(tmp_path, 1)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "."])
def test_a_file_outside_of_the_checkpoint_is_none_of_its(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("s")
    with store.writing(tmp_path, 1, {}) as folder:
        (folder / "data").write_text("s")
    about = store.place(tmp_path, 1) / "about.json"
    text = about.read_text().replace('"data"', json.dumps(name))
    about.write_text(text)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    about.with_suffix(".sha256").write_text(f"{checksum}  about.json\n")
    for read in (store.check, store.about):
        with pytest.raises(DamagedError, match="names no file of the checkpoint's own"):
            read(tmp_path, 1)


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
    gone = store.superfluous(times, keep=keep, keep_hours=keep_hours, best=best)
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
        for gone in store.superfluous(there, keep=2, keep_hours=hours):
            del there[gone]
    for_good = [there[step] for step in sorted(there)[:-2]]
    apart = [b - a for a, b in itertools.pairwise(for_good)]
    assert all(gap >= 3600 * hours for gap in apart)
    assert sorted(there)[-2:] == sorted(times)[-2:]
    assert min(times) in there
