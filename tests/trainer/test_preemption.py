"""Asked to end, a run finishes its step, saves, and is done; asked twice, at once."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import fresh_processes, runs
from tests.helpers.fresh_processes import Program
from tests.helpers.processes import wait_for
from tests.helpers.subprocesses import interpret
from tests.trainer import endings
from tfgpipe import cluster
from tfgpipe_trainer import run_dir
from tfgpipe_trainer.callbacks import Logging
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.main import main
from tfgpipe_trainer.preemption import on_signals

PATIENCE = 240


@pytest.fixture
def long_run(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Program, list[str], Path, Path]]:
    """A trainer in a process of its own, its flags, its folder, and what it prints."""
    folder, log = tmp_path / "run", tmp_path / "log"
    flags = runs.flags(
        training__num_steps=9999,
        checkpoint__every_steps=9999,
        **getattr(request, "param", {}),
    )
    flags.append(f"--logdir={folder}")
    with fresh_processes.start("trainer", *flags, log=log) as trainer:
        yield trainer, flags, folder, log


def test_sigterm_saves_and_asks_to_be_started_again(long_run) -> None:
    trainer, flags, folder, log = long_run
    wait_for("step    3/9999", log)
    # Meanwhile nobody else trains there, and nothing of the run is touched.
    with pytest.raises(UsageError, match=rf"in use by process {trainer.pid} "):
        run_dir.lock(folder).__enter__()
    assert main(["trainer", *flags]) == 1
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(PATIENCE) == cluster.EXIT_PREEMPTED == 42
    printed = log.read_text()
    assert "Stopping after this step, and a checkpoint." in printed
    assert printed.endswith("Stopped, with all saved: start it again.\n")
    (step,) = store.steps(folder / "checkpoints")
    assert step == runs.losses(folder)[-1][0] >= 3
    with run_dir.lock(folder):
        pass


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, float]]:
    """The exit statuses, and the seconds to the end, of `endings.WAYS`."""
    folder = tmp_path_factory.mktemp("endings")
    flags = runs.flags(training__num_steps=9999, training__on_nonfinite="stop")
    log = folder / "log"
    with fresh_processes.start(
        endings.__name__, str(folder), *flags, log=log
    ) as program:
        status = program.wait(PATIENCE)
    logs = "".join(path.read_text() for path in folder.glob("*log"))
    assert status == 0, logs
    return json.loads(log.read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("sigterm", cluster.EXIT_PREEMPTED),
        ("bad_records", 2),
        ("divergence", 3),
        # What comes after all is saved is no other end.
        ("two_signals", cluster.EXIT_PREEMPTED),
    ],
)
def test_a_process_ends_though_functions_still_make_batches(
    ended, way: str, status: int
) -> None:
    received, seconds = ended[way]
    assert received == status
    assert 0 <= seconds < 60  # It is killed after more, if it hangs.


# Its first step takes many seconds, so it is not over at the second signal.
@pytest.mark.parametrize("long_run", [{"model__num_blocks": 100}], indirect=True)
def test_a_second_ctrl_c_ends_it_at_once(long_run) -> None:
    trainer, _, folder, log = long_run
    wait_for("Tracing the first step.", log)
    time.sleep(0.5)  # Deep in TensorFlow, where Python's own handlers do not run.
    trainer.send_signal(signal.SIGINT)
    wait_for("Once more stops at once.", log)
    trainer.send_signal(signal.SIGINT)
    status = trainer.wait(PATIENCE)
    printed = log.read_text()
    assert status == 128 + signal.SIGINT, printed
    assert "Stopped at once, by SIGINT." in printed
    assert store.steps(folder / "checkpoints") == []


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_before_the_first_step_there_is_nothing_to_finish(number: str) -> None:
    # Also while TensorFlow is imported.
    code = (
        "import os, signal, time\n"
        "from tfgpipe._compat import native_logging_off\n"
        "from tfgpipe_trainer.preemption import on_signals\n"
        "with on_signals(status=42), native_logging_off():\n"
        f"    os.kill(os.getpid(), signal.{number})\n"
        "    time.sleep(60)\n"
    )
    run = interpret(code)
    assert run.returncode == 42
    assert run.stderr == "\nStopped. The same command goes on.\n"


@pytest.mark.parametrize(("ignored", "status"), [(False, 42), (True, 5)])
def test_a_closed_terminal_asks_a_run_to_end_unless_that_is_ignored(
    ignored: bool, status: int
) -> None:
    code = (
        "import os, pty, signal, sys, time\n"
        "from tfgpipe_trainer.preemption import on_signals\n"
        "process, terminal = pty.fork()\n"
        "if process:\n"
        "    while os.read(terminal, 1) != b'\\n':\n"
        "        pass\n"
        "    os.close(terminal)\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))\n"
        f"if {ignored}:\n"
        "    signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with on_signals(status=42) as stopping:\n"
        "    stopping.stepping = True\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(1)\n"
        "    if stopping.asked:\n"
        "        print('can be said, and nobody hears it', flush=True)\n"
        "os._exit(42 if stopping.asked else 5)\n"
    )
    assert interpret(code).returncode == status


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with on_signals(status=42) as stopping:
        stopping.stepping = True
        assert not stopping.asked
        os.kill(os.getpid(), signal.SIGTERM)
        while not stopping.asked:
            time.sleep(0.01)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_stopped_run_goes_on_exactly(
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    small += ["--set=model.dropout=0.2", "--set=evaluation.every_steps=4"]
    # The run is stopped between two records, which have means of losses.
    small.append("--set=training.log_every=3")
    assert main([*small, f"--logdir={whole}"]) == 0
    end = Logging.end

    def end_and_ask(self: Logging, step: int, loss: float) -> None:
        end(self, step, loss)
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    monkeypatch.setattr(Logging, "end", end_and_ask)
    assert main([*small, f"--logdir={stopped}"]) == 42
    assert store.steps(stopped / "checkpoints")[-1] == 5
    monkeypatch.setattr(Logging, "end", end)
    capsys.readouterr()
    assert main([*small, f"--logdir={stopped}"]) == 0
    assert "Going on from step 5." in capsys.readouterr().out
    assert [step for step, _ in runs.losses(whole)] == [3, 6, 8]
    assert runs.timeless(stopped) == runs.timeless(whole)
    decoded = [f / "decode" / "predictions.csv" for f in (stopped, whole)]
    assert decoded[0].read_bytes() == decoded[1].read_bytes()


def test_a_lock_needs_no_room_on_a_disk(tmp_path: Path) -> None:
    # As on a full disk, where a file can be made and holds nothing.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with run_dir.lock(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_two_trainers_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        run_dir.lock(tmp_path),
        pytest.raises(
            UsageError,
            match=rf"{tmp_path} is in use by process {os.getpid()} on .*, end it, or",
        ),
    ):
        run_dir.lock(tmp_path).__enter__()
    with run_dir.lock(tmp_path):
        pass
