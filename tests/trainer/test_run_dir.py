"""The folder of a run, before TensorFlow starts."""

from __future__ import annotations

import errno
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tfgpipe_trainer import run_dir
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.main import main

pytestmark = pytest.mark.pure


def test_following_a_folder_in_which_no_run_begins_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_dir, "_BEGINNING_SECONDS", 0.2)
    # Neither has what a killed run has left.
    (tmp_path / "params.txt").write_text("# lm.Tiny\n")
    assert main(["trainer", "--mode=eval", "--watch", f"--logdir={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith(
        f"{tmp_path} holds no checkpoint to evaluate, and nobody trains there."
    )


def test_following_waits_for_a_run_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "_BEGINNING_SECONDS", 30.0)
    ends, begun = threading.Event(), threading.Event()

    def train() -> None:
        time.sleep(0.2)
        with run_dir.lock(tmp_path):
            time.sleep(0.2)
            begun.set()
            (tmp_path / "params.txt").touch()
            ends.wait()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        run_dir.wait_for_run(tmp_path)
        assert begun.is_set()
    finally:
        ends.set()
        thread.join()


def test_a_folder_on_a_disk_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_dir.ensure_writable(tmp_path / "a" / "b").is_dir()
    assert list((tmp_path / "a" / "b").iterdir()) == []

    def fail(**arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(UsageError, match=f"{tmp_path} cannot: Read-only file system"):
        run_dir.ensure_writable(tmp_path)


def test_decoding_needs_something_to_decode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "params.txt").write_text("# template.Mine\nseed = 1\n")
    assert main(["trainer", "--mode=decode", f"--logdir={tmp_path}"]) == 1
    assert "Expected an experiment with a method `decode`" in capsys.readouterr().err
