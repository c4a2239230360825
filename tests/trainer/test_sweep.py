"""Runs for all combinations of values."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import runs
from tests.helpers.subprocesses import command
from tfgpipe_trainer.commands import sweep
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.main import main

SHORT = [
    *("--params=template.Mine", "--set=width=4", "--set=checkpoint.every_steps=2"),
    *("--set=training.num_steps=4", "--set=training.log_every=1"),
]


@pytest.mark.parametrize(
    ("swept", "expected"),
    [
        (["a=1"], [("a=1",)]),
        (["a=1,2", "b=x"], [("a=1", "b=x"), ("a=2", "b=x")]),
        (
            ["a=(1,2),[3,4]", "b='x,y'"],
            [("a=(1,2)", "b='x,y'"), ("a=[3,4]", "b='x,y'")],
        ),
    ],
)
def test_commas_in_brackets_and_quotes_divide_nothing(
    swept: list[str], expected: list[tuple[str, ...]]
) -> None:
    assert [each.assignments for each in sweep.combinations(swept)] == expected


@pytest.mark.parametrize("text", ["a", "a=", "=1"])
def test_what_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--sweep=NAME=VALUE,VALUE"):
        sweep.combinations([text])


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--sweep=seed=0,-1"], 2, "seed: expected"),
        (["--sweep=sed=0"], 2, "Did you mean seed"),
        (["--sweep=seed=0,1", "--sweep_index=2"], 1, "--sweep_index from 0 to 1"),
        (["--sweep_index=0"], 1, "Expected --sweep=NAME"),
        (
            ["--sweep=seed=0", "--smoke_test"],
            1,
            "Expected --sweep without --smoke_test",
        ),
        (["--sweep=seed=0", "--mode=eval"], 1, "Expected --sweep with --mode=train"),
    ],
)
def test_nothing_is_begun_if_something_is_wrong(
    flags: list[str],
    status: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["trainer", *SHORT, *flags, f"--logdir={tmp_path}"]) == status
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_each_run_is_that_of_its_values_and_the_table_has_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = [*SHORT, "--set=seed=1", "--set=optimizer.learning_rate=1e-2"]
    assert main(["trainer", *alone, f"--logdir={tmp_path / 'alone'}"]) == 0
    swept = ["--sweep=optimizer.learning_rate=1e-2,1e38", "--sweep=seed=1"]
    argv = ["trainer", *SHORT, *swept, f"--logdir={tmp_path / 'sweep'}"]
    capfd.readouterr()
    assert main(argv) == 0
    printed = capfd.readouterr().out
    folder = tmp_path / "sweep" / "optimizer.learning_rate=1e-2,seed=1"
    assert runs.timeless(folder) == runs.timeless(tmp_path / "alone")
    *_, names, first, second = printed.splitlines()
    loss = runs.losses(folder)[-1][1]
    assert names.split()[:4] == ["optimizer.learning_rate", "seed", "step", "loss"]
    assert first.split()[:4] == ["1e-2", "1", "4", f"{loss:.4f}"]
    assert second.split()[:2] == ["1e38", "1"]  # It has diverged.
    # Given again, only that which is not over is made, of an array one alone.
    shutil.rmtree(folder)
    assert main([*argv, "--sweep_index=0"]) == 0
    printed = capfd.readouterr().out
    assert "Run 0 of 2" in printed
    assert "Run 1 of 2" not in printed
    assert runs.timeless(folder) == runs.timeless(tmp_path / "alone")


def test_a_signal_ends_the_run_and_the_sweep(tmp_path: Path) -> None:
    long = [*SHORT, "--set=training.num_steps=100000", "--sweep=seed=0,1"]
    with subprocess.Popen(
        [sys.executable, "-u", *command("trainer", *long, f"--logdir={tmp_path}")[1:]],
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if line.startswith("step "):
                break
        time.sleep(0.1)
        trainer.send_signal(signal.SIGTERM)
        printed = trainer.stdout.read()
        assert trainer.wait(60) == 42
    assert "Run 1 of 2" not in printed
    assert list((tmp_path / "seed=0" / "checkpoints").glob("step-*"))
