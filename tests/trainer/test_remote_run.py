"""Runs whose folder, data or first weights are at `s3://`, with networks that fail."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs

from tests.helpers import fresh_processes, runs, s3
from tfgpipe_trainer import callbacks, remote_run
from tfgpipe_trainer.main import main

URL = "s3://runs/mine"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3.served() as port:
        yield port


@pytest.fixture
def proxy(
    server: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[s3.Proxy]:
    """A proxy that this process takes for S3, with an empty bucket."""
    made = s3.Proxy(server)
    for name, value in s3.variables(made.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()
    bucket().mkdir("runs")
    yield made
    made.is_gone, made.delay, made.num_refused, made.num_cut = False, 0.0, 0, 0
    with bucket_of(server) as files:
        files.rm("runs", recursive=True)
    made.close()
    s3fs.S3FileSystem.clear_instance_cache()


def bucket() -> Any:
    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


class bucket_of:  # noqa: N801
    """The server itself, without the proxy."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Any:
        return s3fs.S3FileSystem(
            endpoint_url=self._url, use_listings_cache=False, skip_instance_cache=True
        )

    def __exit__(self, *error: object) -> None:
        pass


def held() -> set[str]:
    return {path.removeprefix("runs/mine/") for path in bucket().find("runs/mine")}


def losses_there() -> list[dict[str, Any]]:
    return runs.timeless_records(bucket().cat_file("runs/mine/metrics.jsonl").decode())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The measurements of a run in a folder of this machine."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["trainer", *runs.flags(), f"--logdir={folder}"]) == 0
    return runs.timeless(folder)


def checkpoints(*steps: int) -> set[str]:
    names = ("complete.json", "state.data-00000-of-00001", "state.index")
    return {f"checkpoints/step-{step:08}/{name}" for step in steps for name in names}


def test_a_run_there_is_that_of_a_folder_here(
    proxy: s3.Proxy,
    small: list[str],
    whole: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert main([*small, f"--logdir={URL}"]) == 0
    assert f"{URL} is copied from {tmp_path / 'cache'}" in capsys.readouterr().out
    assert losses_there() == whole
    kept = {"params.txt", "metrics.jsonl", "losses.png", "decode/predictions.csv"}
    kept |= {"goodput.jsonl", "heartbeat.json"}
    there = {name for name in held() if not name.startswith("curves/")}
    assert there == kept | checkpoints(4, 6, 8)

    # Elsewhere, of what is there: with one of the old checkpoints.
    other = ["trainer", f"--logdir={URL}", "--mode=eval", "--checkpoint=4"]
    assert main(other) == 0
    assert "Loaded checkpoint, step 4." in capsys.readouterr().out
    bucket().rm_file("runs/mine/decode/predictions.csv")
    assert main(["trainer", f"--logdir={URL}", "--mode=decode"]) == 0
    assert "decode/predictions.csv" in held()


def test_a_failing_network_costs_nothing(
    proxy: s3.Proxy,
    small: list[str],
    whole: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_run, "_COPY_SECONDS", 0.05)
    monkeypatch.setattr(remote_run, "_ATTEMPT_SECONDS", 0.05)
    proxy.delay, proxy.num_refused, proxy.num_cut = 0.001, 6, 4
    assert main([*small, f"--logdir={URL}"]) == 0
    assert (proxy.num_refused, proxy.num_cut) == (0, 0)
    assert losses_there() == whole
    assert checkpoints(4, 6, 8) <= held()


def test_a_store_that_is_gone_at_the_end_leaves_the_run_here(
    proxy: s3.Proxy,
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote_run, "_ATTEMPT_SECONDS", 0.01)
    monkeypatch.setattr(remote_run, "_ATTEMPTS", 2)
    real = remote_run.RemoteRun._push_ours

    def push(self: remote_run.RemoteRun) -> None:
        proxy.is_gone = True
        real(self)

    monkeypatch.setattr(remote_run.RemoteRun, "_push_ours", push)
    assert main([*small, f"--logdir={URL}"]) == 1
    said = capfd.readouterr().err
    (folder,) = re.findall(r"could not be copied to \S+ It is in (\S+); copy", said)
    assert (Path(folder) / "checkpoints" / "step-00000008").is_dir()


def test_a_checkpoint_that_is_not_whole_is_passed_over(
    proxy: s3.Proxy,
    small: list[str],
    whole: list[dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main([*small, f"--logdir={URL}"]) == 0
    # Killed while it was written, or removed.
    bucket().rm_file("runs/mine/checkpoints/step-00000008/complete.json")
    bucket().pipe_file("runs/mine/checkpoints/step-00000006/state.index", b"other")
    assert main([*small, f"--logdir={URL}"]) == 0
    said, warned = capfd.readouterr()
    assert f"The checkpoint of step 6 in {URL} is damaged." in warned
    assert "Going on from step 4." in said
    assert losses_there() == whole
    assert checkpoints(4, 6, 8) <= held()
    # The damaged one has been written anew.
    place = "runs/mine/checkpoints/step-00000006/"
    about = json.loads(bucket().cat_file(f"{place}complete.json"))
    index = bucket().cat_file(f"{place}state.index")
    assert hashlib.sha256(index).hexdigest() == about["files"]["state.index"]


def test_old_checkpoints_that_were_not_fetched_are_removed_in_time(
    proxy: s3.Proxy, small: list[str]
) -> None:
    settings = ["--set=checkpoint.keep=2", "--set=training.num_steps=8"]
    assert main([*small, *settings, f"--logdir={URL}"]) == 0
    assert {x for x in held() if x.startswith("checkpoints")} == checkpoints(6, 8)
    longer = [*settings, "--set=training.num_steps=10", "--allow_changes"]
    assert main([*small, *longer, f"--logdir={URL}"]) == 0
    assert {x for x in held() if x.startswith("checkpoints")} == checkpoints(8, 10)


def _lock(process: int, host: str = "") -> None:
    lock = {
        "holder": "process 7 on another",
        "host": host or socket.gethostname(),
        "process": process,
        "id": "other",
        "time": time.time(),
    }
    bucket().pipe_file("runs/mine/lock.json", json.dumps(lock).encode())


def test_a_trainer_that_is_gone_leaves_no_lock(
    proxy: s3.Proxy, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [*small, "--set=training.num_steps=2", f"--logdir={URL}"]
    _lock(process=2**22 - 1)  # None on this machine has so large a number.
    assert main(short) == 0
    assert "lock.json" not in held()
    monkeypatch.setattr(remote_run, "_LEASE_SECONDS", 1.5)
    _lock(process=1, host="another")
    assert main(short) == 0


def test_a_trainer_at_work_keeps_others_out(
    proxy: s3.Proxy,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    _lock(process=1, host="another")
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.3):
            _lock(process=1, host="another")

    thread = threading.Thread(target=renew)
    thread.start()
    assert main([*small, f"--logdir={URL}"]) == 1
    over.set()
    thread.join()
    assert "in use by process 7 on another" in capsys.readouterr().err


def test_a_run_that_is_stopped_leaves_all_and_no_lock(
    proxy: s3.Proxy, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = callbacks.Logging.end

    def end(self: callbacks.Logging, step: int, loss: float) -> None:
        real(self, step, loss)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # Signals are counted by a thread.

    monkeypatch.setattr(callbacks.Logging, "end", end)
    assert main([*small, f"--logdir={URL}"]) == 42
    assert checkpoints(2, 3) <= held()
    assert "lock.json" not in held()


def test_a_folder_by_its_scheme_is_one_as_well(
    small: list[str], whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert main([*small, f"--logdir=file://{tmp_path}/run"]) == 0
    assert runs.timeless(tmp_path / "run") == whole


def test_a_killed_run_goes_on_on_another_machine(
    proxy: s3.Proxy, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    flags = [*runs.flags(), f"--logdir={URL}"]
    there = s3.variables(proxy.port)
    log = tmp_path / "log"
    first = fresh_processes.start(
        "tests.trainer.slow_run",
        *flags,
        log=log,
        XDG_CACHE_HOME=str(tmp_path / "first"),
        STEP_SECONDS="4",  # The store may be slower than steps.
        **there,
    )
    with first as trainer:
        deadline = time.monotonic() + 120
        while not any(checkpoints(step) <= held() for step in (2, 4)):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        trainer.send_signal(signal.SIGKILL)
    assert "losses.png" not in held()
    assert main(["trainer", *flags]) == 0
    assert losses_there() == whole


def test_data_and_first_weights_may_be_there(
    proxy: s3.Proxy,
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, [40, 8, 8], np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 4)
    bucket().put_file(str(tmp_path / "a.npz"), "runs/data/a.npz")
    one = [*small, f"--set=data.files={tmp_path}/*.npz", f"--logdir={tmp_path / 'one'}"]
    other = [*small, "--set=data.files=s3://runs/data/*.npz", f"--logdir={URL}"]
    assert main(one) == main(other) == 0
    assert losses_there() == runs.timeless(tmp_path / "one")
    warm = f"--set=warm_start.path={URL}"
    assert main([*small, warm, f"--logdir={tmp_path / 'warm'}"]) == 2  # 4, not 10.
    capsys.readouterr()
    assert main([*other[:-1], warm, f"--logdir={tmp_path / 'warm'}"]) == 0
    assert "Warm start: 10 of 10 weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--logdir=nope://a/b", "--logdir: expected a path of a scheme"),
        ("--logdir=s3://absent/run", "--logdir that can be read and written; s3://abs"),
        ("--set=data.files=nope://a/*", "data.files: expected a path of a scheme"),
        ("--set=data.files=s3://runs/*.npz", "which matches none"),
        ("--set=warm_start.path=s3://runs/no", "warm_start.path: expected the folder"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    flag: str,
    words: str,
    proxy: s3.Proxy,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    logdir = [] if flag.startswith("--logdir") else [f"--logdir={tmp_path / 'run'}"]
    assert main([*small, *logdir, flag]) in (1, 2)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "nope:").exists()
