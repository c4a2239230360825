"""What a command line may say, before anything is imported for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.subprocesses import python
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.flags import parse
from tfgpipe_trainer.main import main

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("mode", "flag"),
    [
        ("train", "--checkpoint=3"),
        ("benchmark", "--checkpoint=latest"),
        ("eval", "--smoke_test"),
        ("benchmark", "--smoke_test"),
        ("eval", "--trace_steps=1,2"),
        ("benchmark", "--profile_steps=1,2"),
        ("train", "--watch"),
        ("describe", "--cluster=10.0.0.5:4000"),
        ("tokenizer", "--tpu=local"),
        ("describe", "--hosts=10.0.0.5:4000,10.0.0.6:4000"),
        ("tokenizer", "--device=cpu"),
        ("inspect", "--allow_changes"),
        ("doctor", "--cluster=10.0.0.5:4000"),
    ],
)
def test_a_flag_that_a_mode_would_ignore_is_refused(mode: str, flag: str) -> None:
    name = flag.partition("=")[0]
    with pytest.raises(UsageError, match=rf"^Expected {name} with --mode=\w.* only; "):
        parse(["trainer", "--params=lm.Tiny", f"--mode={mode}", flag])


@pytest.mark.parametrize(
    "flags",
    [
        ["--mode=eval", "--watch", "--checkpoint=3"],
        ["--smoke_test", "--trace_steps=1,2"],
        ["--smoke_test", "--profile_steps=1,2"],
    ],
)
def test_flags_of_which_one_would_be_ignored_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match=r"^Expected --\w+ without --\w+\.$"):
        parse(["trainer", "--params=lm.Tiny", *flags])


def test_workers_of_the_environment_are_no_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TFGPIPE_CLUSTER", "10.0.0.5:4000")
    assert parse(["trainer", "--params=lm.Tiny", "--mode=describe"]).mode == "describe"


@pytest.mark.parametrize("checkpoint", ["²", "٣", "1" * 5000, "-1", "3.0", ""])
def test_a_checkpoint_is_a_number_of_digits(checkpoint: str) -> None:
    with pytest.raises(UsageError, match="--checkpoint=latest, best, or a step"):
        parse(["trainer", "--mode=eval", f"--checkpoint={checkpoint}"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--mode=eval", "--watch", "--logdir=s3://bucket/run"],
        ["--mode=diff", "lm.Tiny", "hdfs://host/run"],
    ],
)
def test_a_folder_of_another_machine_is_refused(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trainer", *flags]) == 1
    assert "Expected a folder of this machine for --" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")  # No shell expands --logdir=~.
    assert parse(["trainer", "--logdir=~/run"]).logdir == "/home/me/run"
    compared = parse(["trainer", "--mode=diff", "lm.Tiny", "~/run"]).compared
    assert compared == ("lm.Tiny", "/home/me/run")


def test_a_value_that_python_cannot_parse_for_its_depth_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    deep = "''" + "+1" * 100_000
    flags = ["--params=lm.Tiny", "--mode=describe", f"--set=data.files={deep}"]
    assert main(["trainer", *flags]) == 2
    assert "data.files: expected a string" in capsys.readouterr().err


def test_hosts_that_python_cannot_parse_for_their_depth_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", "[" * 100_000)
    assert main(["trainer", "--params=lm.Tiny"]) == 1
    assert "Expected TF_CONFIG to list workers" in capsys.readouterr().err


def test_another_backend_of_keras_is_refused_in_a_sentence() -> None:
    found = python("-m", "trainer", KERAS_BACKEND="jax")
    assert found.returncode == 1
    assert found.stderr.startswith("tfgpipe needs Keras to run on TensorFlow, but")
