"""The trainer, from its command line to what it leaves in the run's folder."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)

import tfgpipe
from tests.helpers import fake_tpu, runs
from tests.helpers.subprocesses import python
from tfgpipe_trainer import devices
from tfgpipe_trainer.commands import machine_checks
from tfgpipe_trainer.config import Pipelining
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.evaluate import comparison
from tfgpipe_trainer.hosts import Hosts
from tfgpipe_trainer.hyperparams import HyperparameterError
from tfgpipe_trainer.main import main
from tfgpipe_trainer.progress import Measurement, Progress
from tfgpipe_trainer.writers import Metrics, read_metrics

TABLE = "stage  device  layers"

# The command line.


def test_help_fits_a_screen_and_is_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given in ("--help", "-h", "--params=lm.Tiny --help"):
        assert main(["trainer", *given.split()]) == 0
        printed = capsys.readouterr()
        lines = printed.out.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert printed.err == ""


def test_a_run_is_in_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = runs.flags(training__num_steps=2)
    assert main(["trainer", *small]) == 0
    assert "The run's folder is runs/parallelism.Pipelined." in capsys.readouterr().out
    assert runs.losses(tmp_path / "runs/parallelism.Pipelined")[-1][0] == 2
    assert main(["trainer", *small, "--mode=eval"]) == 0
    assert "Loaded checkpoint, step 2." in capsys.readouterr().out
    assert main(["trainer", *small, "--smoke_test"]) == 0
    assert "The run's folder" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--logdir=a", "Expected --params=NAME, one of image.AmoebaNetD, image."),
        ("--mode=eval", "Expected --logdir=DIR, which --mode=eval"),
        ("--params=lm.Tiny --mode=eval", "runs/lm.Tiny holds no checkpoint to eval"),
        ("--params=lm.Tiny stray", "Expected flags only, such as --params=lm.Tiny; "),
        ("stray --params=lm.Tiny", "received 'stray'"),
        ("--param=lm.Tiny", "Unknown command line flag 'param'. Did you mean: params"),
        ("--params=lm.Tiny --mode=trian", "should be one of <train_and_eval|train|e"),
        ("--params=lm.Tiny --watch", "Expected --watch with --mode=eval only; re"),
        (
            "--params=lm.Tiny --mode=eval --checkpoint=x",
            "Expected --checkpoint=latest, best, or ",
        ),
        ("--params=lm.Tiny --profile_steps=3", "Expected --profile_steps=A,B, the fir"),
        ("--mode=diff lm.Tiny", "Expected --mode=diff A B, each the name of an exper"),
        ("--params=lm.Tiny --device=cpu --tpu=a", "Expected --device=cpu without --tp"),
        ("--mode=doctor --tpu=a", "Expected --tpu with --mode=train_and_eval, train"),
        ("--params=lm.Tiny --tpu_zone=a", "Expected --tpu=NAME with --tpu_zone=ZONE."),
        ("--params=lm.Tiny --mode=eval --logdir=none", "none holds no checkpoint"),
        (
            "--params=lm.Tiny --mode=export --logdir=none",
            "none holds no checkpoint to export.",
        ),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer", *arguments.split()]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Try `python -m trainer --help`." in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--params=lm.Tyni", "no such experiment. Did you mean lm.Tiny?"),
        ("--set=num_layers=3", "Did you mean model.num_layers?"),
        ("--set=model.num_layers=x", "expected an int, at least 1; received 'x'."),
        ("--set=model.width=9", "model.width: expected a multiple of num_heads=4"),
        ("--set=data.files=/none/*", "data.files: expected a glob that matches files"),
        (
            "--set=precision.policy=float8",
            "expected one of float32, mixed_float16, mixed_bfloat16; received 'float8'",
        ),
        ("--set=precision.quantize=4bit", "expected one of none, 8bit; received"),
        ("--set=model.dropout=2", "model.dropout: expected a float, at least 0, less "),
        ("--set=seed=1099511627776", "seed: expected an int, at least 0, less than "),
        (
            "--set=pipelining.num_shards=3 --set=pipelining.num_stages=1",
            "model: Each shard gets as many heads as the others.",
        ),
    ],
)
def test_wrong_hyperparameters_have_a_status_of_their_own(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["trainer", "--params=lm.Tiny", f"--logdir={tmp_path}"]
    assert main([*argv, *arguments.split()]) == 2
    assert message in capsys.readouterr().err


# The modes.


def test_inspecting_prints_the_stages_and_nothing_of_tensorflow() -> None:
    # In an interpreter of its own, as TensorFlow says most while it is imported.
    command = ("-m", "trainer", "--params=lm.Tiny", "--mode=inspect")
    run = python(*command, without=["TF_CPP_MIN_LOG_LEVEL"])
    # Progress is told of what takes some seconds, as on a busy machine.
    told = [x for x in run.stderr.splitlines() if not x.startswith("tfgpipe: trac")]
    assert (run.returncode, told) == (0, [])
    assert TABLE in run.stdout
    assert "CPU:1" in run.stdout
    plan = run.stdout.partition("\n\n")[2]
    assert plan.splitlines()[0].split() == ["stage", "0", "stage", "1"]
    assert plan.splitlines()[1].split() == ["replica", "0", "CPU:0", "CPU:1"]
    assert "4 examples, remat=none, schedule=1f1b, partition as given" in plan
    assert "imbalance 1." in plan


def test_the_doctor_looks_at_a_machine_and_an_experiment(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*small, "--mode=doctor", f"--logdir={tmp_path / 'run'}"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    sections = printed.strip().split("\n\n")
    titles = [section.partition("\n")[0] for section in sections]
    assert titles == [
        "Versions",
        "Devices",
        "CPU",
        "Disk",
        "Optional packages",
        "parallelism.Pipelined",
        "Nothing fails.",
    ]
    for section in sections[:-1]:
        for line in section.splitlines()[1:]:
            assert re.match(r"(ok   |slow )  \w", line), line
    assert f"tensorflow {tf.__version__} (<2." in sections[0]
    assert "A batch of its training and validation data can be read." in sections[-2]
    assert not list(tmp_path.iterdir())

    assert main([*command, "--set=data.files=none/*.npz"]) == 1
    printed = capsys.readouterr().out
    assert "\nfails  data.files: expected a glob that matches files" in printed
    assert printed.endswith("\n1 fails.\n")


def test_a_run_leaves_all_it_should(
    small_lm: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    small_lm += ["--set=training.log_every=4", "--set=training.log_seconds=3600"]
    assert main([*small_lm, f"--logdir={folder}"]) == 0

    printed = capsys.readouterr().out
    assert TABLE in printed
    # Most of the time of the first is for tracing; the last is always shown.
    assert re.findall(r"step (\d)/8  loss ", printed) == ["2", "8"]
    assert " bytes/s  0:00:00 left" in printed
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "curves",
        "decode",
        "goodput.jsonl",
        "heartbeat.json",
        "lock",
        "losses.png",
        "metrics.jsonl",
        "params.txt",
    }
    assert (folder / "params.txt").read_text().startswith("# lm.Tiny\n")
    sample = (folder / "decode" / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith("def ")
    assert f"A sample:\n\n{sample}\n" in printed
    assert printed.endswith(f"More is in {folder / 'decode'}.\n")

    four, eight, validation = runs.records(folder)
    assert (four["step"], eight["step"], validation["step"]) == (4, 8, 8)
    of_work = {"bubble", "flops_per_second", "memory"}
    usual = {"step", "loss", "learning_rate", "throughput"}
    assert four.keys() == usual | of_work
    table = comparison(
        {"loss": validation["validation_loss"]},
        {"bigram": validation["validation_bigram"]},
        unit="byte",
    )
    assert table in printed

    # The same command again finds the run complete: it only evaluates.
    assert main([*small_lm, f"--logdir={folder}"]) == 0
    printed = capsys.readouterr().out
    assert "Going on from step 8." in printed
    assert "step 8/8" not in printed
    assert table in printed
    assert runs.records(folder) == [four, eight, validation]


def test_what_cannot_be_quantized_is_a_wrong_hyperparameter(
    small_lm: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_lm += ["--set=model.softmax=tied", "--set=precision.quantize=8bit"]
    assert main([*small_lm, f"--logdir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("precision.quantize: "), error


def test_a_run_that_could_not_start_leaves_the_folder_free(
    small_lm: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    # Enough to train on, and found out before the training that too little is left.
    short.write_bytes(b"x" * 50)
    small_lm += [f"--logdir={tmp_path / 'run'}", "--set=training.num_steps=1"]
    assert main([*small_lm, f"--set=data.files={short}"]) == 2
    printed = capsys.readouterr()
    assert "bytes for validation; received 5." in printed.err
    assert "Tracing" not in printed.out
    assert main([*small_lm, "--mode=train"]) == 0


def test_ctrl_c_ends_a_run_without_a_traceback(
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tfgpipe_trainer.devices.start_tensorflow", interrupted)
    assert main([*small, f"--logdir={tmp_path / 'run'}"]) == 1
    assert capsys.readouterr().err == "\nStopped. The same command goes on.\n"


def _failing(error: Exception) -> Callable[..., None]:
    """Returns a function that raises an error."""

    def fail(*arguments: object, **named: object) -> None:
        raise error

    return fail


def test_what_nobody_expected_is_a_sentence_and_a_file(
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    surprise = RuntimeError("A surprise,\nof two lines.")
    monkeypatch.setattr("tfgpipe_trainer.commands.job.build", _failing(surprise))
    folder = tmp_path / "run"
    command = [*small, f"--logdir={folder}"]
    assert main(command) == 1
    (log,) = folder.glob("crash-*.log")
    assert capsys.readouterr().err == (
        f"Crashed: RuntimeError: A surprise,\nThe traceback is in {log}.\n"
    )
    text = log.read_text()
    assert " ".join(command) in text
    assert "in fail" in text
    assert "of two lines." in text
    # Without a folder of the run it is in one for temporary files.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main([*small, "--mode=inspect"]) == 1
    assert list(tmp_path.glob("crash-*.log"))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.45 GiB for an array"),
        tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor"),
    ],
)
def test_too_little_memory_is_said_with_what_to_try(
    error: Exception,
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tfgpipe_trainer.commands.job.build", _failing(error))
    assert main([*small, f"--logdir={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"Crashed: MemoryError: {error}\nThe trac")
    assert "There is too little memory. Try a smaller training.batch_size" in said


def test_a_lock_that_is_a_folder_is_refused(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lock").mkdir()
    assert main([*small, f"--logdir={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith(
        f"Expected a --logdir that can be written to; {tmp_path / 'lock'} cannot: Is a "
    )


def test_hyperparameters_that_are_no_text_are_refused(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "params.txt").write_bytes(b"\xff\xfe\x00")
    for mode in ("train", "eval"):
        assert main([*small, f"--logdir={tmp_path}", f"--mode={mode}"]) == 2
        assert "expected the hyperparameters of a run, as" in capsys.readouterr().err


# The parts.


def _fake_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds a v4-8 wherever one is looked for."""
    resolver = fake_tpu.Resolver(4)
    monkeypatch.setattr(
        tf.distribute.cluster_resolver,
        "TPUClusterResolver",
        lambda name, zone: resolver,
    )
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", lambda _: None)
    monkeypatch.setattr(
        tf.tpu.experimental,
        "initialize_tpu_system",
        lambda _: fake_tpu.Topology((2, 2, 1, 1)),
    )
    listed = tf.config.list_logical_devices
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind=None: listed("CPU" if kind == "TPU" else kind),
    )


def test_on_a_tpu_even_one_replica_has_a_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _fake_tpu(monkeypatch)
    with devices.scope(Pipelining(num_stages=4), tpu="a", tpu_zone="b"):
        strategy = tf.distribute.get_strategy()
    assert isinstance(strategy, tfgpipe.PipelineStrategy)
    names = [device[-5:] for device, *_ in strategy.mesh.devices[0]]
    assert names == ["CPU:0", "CPU:2", "CPU:3", "CPU:1"]  # Around the four chips.


def test_shards_on_a_tpu_are_refused() -> None:
    with pytest.raises(
        HyperparameterError, match=r"^pipelining\.num_shards: expected .*tpu"
    ):
        devices.start_tensorflow(Pipelining(num_shards=2), tpu="a")


def test_more_logical_devices_than_start_are_refused() -> None:
    with pytest.raises(HyperparameterError, match="at most 1024 devices on the CPU"):
        devices.start_tensorflow(Pipelining(num_replicas=1025), device="cpu")


def test_checkpoints_that_are_a_file_are_refused_at_once(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").touch()
    assert main([*small, f"--logdir={tmp_path}"]) == 1
    printed = capsys.readouterr()
    assert f"{tmp_path / 'checkpoints'} cannot: File exists." in printed.err
    assert not printed.out


def test_measurements_that_are_a_folder_are_refused(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(OSError, match="Not a file"):  # Nobody would ever write there.
        list(read_metrics(tmp_path / "pipe.jsonl"))
    (tmp_path / "metrics.jsonl").mkdir()
    assert main([*small, f"--logdir={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith(
        f"Expected a --logdir that can be written to; {tmp_path / 'metrics.jsonl'} "
        "cannot: Is a directory.\n"
    )


def test_too_small_a_tpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_tpu(monkeypatch)
    with pytest.raises(HyperparameterError, match="pipelining: 4 stages x 2 replicas"):
        devices.scope(Pipelining(num_stages=4, num_replicas=2), tpu="a")


def test_a_tpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(name: str, zone: str | None) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", nobody)
    with pytest.raises(
        UsageError,
        match=r"--tpu=a: no TPU was reached: Name or service not known\. Give .*local",
    ):
        devices.scope(Pipelining(num_stages=2), tpu="a")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[object]]:
    """Has TensorFlow find some GPUs; gives what hides them."""
    cpus, hidden = tf.config.list_physical_devices("CPU"), []

    def found(number: int) -> list[object]:
        there = {"CPU": cpus, "GPU": [f"GPU {i}" for i in range(number)]}
        monkeypatch.setattr(tf.config, "list_physical_devices", there.__getitem__)
        monkeypatch.setattr(
            tf.config, "set_visible_devices", lambda *each: hidden.append(each)
        )
        return hidden

    return found


@pytest.mark.parametrize(
    ("number", "pipelining"),
    [
        (1, Pipelining()),
        (4, Pipelining(num_stages=2, num_replicas=2)),
        (4, Pipelining(num_stages=8, schedule="interleaved")),
        (2, Pipelining(num_stages=8, schedule="interleaved", stages_per_device=4)),
        (4, Pipelining(num_stages=4, num_shards=2, schedule="interleaved")),
    ],
)
def test_enough_gpus_are_used(
    number: int,
    pipelining: Pipelining,
    gpus: Callable[[int], list[object]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hidden = gpus(number)
    devices.start_tensorflow(pipelining)
    assert (hidden, capsys.readouterr().out) == ([], "")
    gpus(number - 1 or 1)
    if number > 1:
        with pytest.raises(HyperparameterError, match=f"expected {number} GPUs for"):
            devices.start_tensorflow(pipelining)


def test_too_few_gpus_are_refused(gpus: Callable[[int], list[object]]) -> None:
    hidden = gpus(3)
    with pytest.raises(
        HyperparameterError,
        match=r"pipelining: expected 4 GPUs for 2 stages x 2 replicas x 1 shards; "
        r"received 3\. .*num_stages=K.* CUDA_VISIBLE_DEVICES.* --device=cpu",
    ):
        devices.start_tensorflow(Pipelining(num_stages=2, num_replicas=2))
    assert hidden == []


def test_too_few_gpus_end_a_run_before_it_trains(
    gpus: Callable[[int], list[object]],
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(1)
    assert main([*small, f"--logdir={tmp_path}"]) == 2
    assert "expected 2 GPUs for 2 stages" in capsys.readouterr().err


def test_the_cpu_takes_all_stages_where_it_is_asked_to(
    gpus: Callable[[int], list[object]], capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = gpus(1)
    pipelining = Pipelining(num_stages=2, num_replicas=2)
    devices.start_tensorflow(pipelining, device="cpu")
    assert hidden == [([], "GPU")]
    printed = capsys.readouterr().out
    assert printed == "On the CPU, as 4 logical devices: --device=cpu.\n"


def test_a_run_without_gpus_says_that_it_is_on_the_cpu(
    gpus: Callable[[int], list[object]], capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(0)
    devices.start_tensorflow(Pipelining())
    devices.start_tensorflow(Pipelining(num_stages=4, schedule="interleaved"))
    assert capsys.readouterr().out == (
        "On the CPU, as one device: no GPU is here.\n"
        "On the CPU, as 2 logical devices: no GPU is here.\n"
    )


def test_the_doctor_names_the_gpus_that_are_used_and_those_that_are_not(
    gpus: Callable[[int], list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    details = {"device_name": "H100"}
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda gpu: details
    )
    monkeypatch.setattr("tfgpipe_trainer.commands.catalog.num_gpus_there", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine_checks.visible_gpus() == ["H100"] * 2
    found = machine_checks.check_gpus(["H100"] * 2)
    assert [each.level for each in found] == ["ok", "ok", "slow"]


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [("interleaved", (0, 1, 0, 1)), ("zbv", (0, 1, 1, 0))],
    ids=["round robin", "folded"],
)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_stages_share_the_devices_of_a_replica_as_the_schedule_says(
    num_replicas: int, schedule: Any, placement: tuple[int, ...]
) -> None:
    pipelining = Pipelining(num_stages=4, num_replicas=num_replicas, schedule=schedule)
    with devices.scope(pipelining):
        mesh = tf.distribute.get_strategy().mesh
    assert mesh.placement == placement
    names = {name for replica in mesh.primary_devices for name in replica}
    assert len(names) == pipelining.num_devices == 2 * num_replicas


def test_several_stages_on_a_device_are_refused_on_several_hosts() -> None:
    with pytest.raises(
        HyperparameterError, match=r"pipelining\.schedule: expected one"
    ):
        devices.start_tensorflow(
            Pipelining(num_stages=4, num_replicas=2, schedule="interleaved"),
            hosts=Hosts(0, 2),
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_stages": 3}, "num_stages: expected a multiple of 2, the stages on each"),
        ({"num_stages": 4, "stages_per_device": 3}, "expected a multiple of 3"),
        (
            {"num_stages": 4, "stages_per_device": 2, "schedule": "1f1b"},
            "stages_per_device: expected None, as this schedule has one stage on",
        ),
    ],
)
def test_stages_that_cannot_be_dealt_evenly_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(HyperparameterError, match=message):
        Pipelining(**{"schedule": "interleaved", **values})


def _measurement(step: int, **values: Any) -> Measurement:
    return Measurement(
        step=step,
        num_steps=200,
        loss=1.23456,
        learning_rate=0.001,
        throughput=12345.6,
        seconds_left=3725.2,
        unit="byte",
        **values,
    )


def test_a_line_of_progress_says_where_the_run_is() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        assert not progress.is_live
        progress.show(_measurement(7))
        progress.show(_measurement(8, memory="GPU:1 3.4 GiB"))
    assert stream.getvalue() == (
        "step   7/200  loss 1.2346  learning rate 1.00e-03  "
        "12,346 bytes/s  1:02:05 left\n"
        "step   8/200  loss 1.2346  learning rate 1.00e-03  "
        "12,346 bytes/s  1:02:05 left  GPU:1 3.4 GiB\n"
    )


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Returns what is to be seen: a line that is erased is not."""
        shown = re.sub(r"[^\n]*\r\x1b\[2K", "", self.getvalue())
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()


def test_a_terminal_gets_one_line_that_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    with Progress(terminal) as progress:
        assert progress.is_live
        assert progress.is_due
        progress.show(_measurement(100))
        assert not progress.is_due
        print("step 100: validation loss 1.5")
        progress.show(_measurement(200))
        # A process that is killed here leaves the cursor visible.
        last = terminal.getvalue().rpartition("\x1b[?25")[2]
        assert last.startswith("h")
    above, line = terminal.lines()
    assert above == "step 100: validation loss 1.5"
    assert line.endswith(" step 200/200  loss 1.2346  12,346 bytes/s  1:02")
    assert len(line) == 60
    print("After it.")
    assert capsys.readouterr().out == "After it.\n"


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = _Terminal()
    with Progress(terminal) as progress:
        progress.show(_measurement(100))
    assert terminal.getvalue() == f"{_measurement(100)}\n"


def test_memory_is_that_of_the_fullest_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, size = devices.memory_in_use()
    assert name == "process"
    assert size > 2**26
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["", ""])
    held = {"GPU:0": 2**30, "GPU:1": 3 * 2**30}
    monkeypatch.setattr(
        tf.config.experimental, "get_memory_info", lambda name: {"peak": held[name]}
    )
    assert devices.memory_in_use() == ("GPU:1", 3 * 2**30)


def test_measurements_of_steps_to_be_done_again_are_dropped(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, step=0)
    for step in (1, 2, 3):
        metrics.write(step, {"loss": 0.5})
    metrics.write(2, {"validation_loss": 0.5})
    metrics.write(2, {"validation_loss": 0.5}, final=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    Metrics(tmp_path, step=2)
    assert runs.records(tmp_path) == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.5},
        {"step": 2, "validation_loss": 0.5},
    ]


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    record = '{"step": 1, "loss": 0.5, "final": true}'
    lines = [record, "[]", "3", "null", "{}", '{"step": "1"}', '{"step": 1, "a": []}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "\x00", ""]))
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [
        {"step": 1, "loss": 0.5, "final": True}
    ]


def test_what_is_not_finite_is_null_in_a_line_of_json(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, step=0)
    metrics.write(1, {"loss": math.nan, "rate": math.inf, "other": -math.inf, "a": 1.5})
    Metrics(tmp_path, step=1)  # Goes on, and writes it again.
    text = (tmp_path / "metrics.jsonl").read_text()
    expected = {"step": 1, "loss": None, "rate": None, "other": None, "a": 1.5}
    assert json.loads(text, parse_constant=pytest.fail) == expected
    (record,) = metrics.read()
    assert math.isnan(record["loss"])
    assert record["a"] == 1.5


def _drawn(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the points of each curve that TensorBoard draws."""
    events = EventAccumulator(str(folder / "curves" / "metrics"))
    events.Reload()
    tags = events.Tags()["tensors"]
    return {
        name: [
            (point.step, float(tf.make_ndarray(point.tensor_proto)))
            for point in events.Tensors(name)
        ]
        for name in tags
        if name != "hyperparameters"
    }


def test_tensorboard_forgets_steps_that_are_done_again(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, step=0, text="seed = 1")
    for step in (1, 2, 3, 4):
        metrics.write(step, {"loss": 0.5})
    metrics.write_validation(2, {"loss": 0.25})
    for _ in range(2):
        metrics = Metrics(tmp_path, step=2, text="seed = 1")
        for step in (3, 4):
            metrics.write(step, {"loss": 0.125})
    expected = {
        "loss": [(1, 0.5), (2, 0.5), (3, 0.125), (4, 0.125)],
        "validation_loss": [(2, 0.25)],
    }
    assert _drawn(tmp_path) == expected
    # The end of a run that is over is come to again.
    metrics.write_validation(4, {"loss": 1.0}, final=True)
    Metrics(tmp_path, step=4).write_validation(4, {"loss": 1.0}, final=True)
    expected["validation_loss"] = [(2, 0.25), (4, 1.0)]
    assert _drawn(tmp_path) == expected


def test_a_full_disk_costs_measurements_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Metrics(tmp_path, step=0).write(1, {"loss": 0.5})
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 2, "lo')
    Metrics(tmp_path, step=9).write(3, {"loss": 0.25})
    expected = [{"step": 1, "loss": 0.5}, {"step": 3, "loss": 0.25}]
    assert runs.records(tmp_path) == expected

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tfgpipe_trainer.checkpoint.store.atomic_write", full)
    monkeypatch.setattr(tf.io, "TFRecordWriter", full)
    metrics = Metrics(tmp_path, step=0)
    monkeypatch.setattr(Metrics, "_append", full)
    metrics.write(4, {"loss": 0.5})
    assert runs.records(tmp_path) == expected
    assert capsys.readouterr().err == (
        "\nMeasurements could not be written: [Errno 28] No space left on device. "
        "Training goes on.\n"
    )


def test_without_tensorboard_a_sentence_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    Metrics(tmp_path, step=0).write(1, {"loss": 0.5})
    assert capsys.readouterr().out == (
        "No TensorBoard curves: `pip install tensorboard` brings them.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
