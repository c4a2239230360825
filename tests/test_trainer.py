"""The trainer, from its command line to what it leaves in the run's folder."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from params.experiment import Pipelining
from trainer import devices, flags
from trainer.evaluate import comparison
from trainer.main import main
from trainer.metrics import Metrics
from trainer.progress import Measurement, Progress

ROOT = Path(__file__).resolve().parents[1]
TABLE = "stage  device  layers"

# Every flag of the trainer. A new one is a decision: add it here and to the help.
FLAGS = ["help", "logdir", "mode", "params", "set", "trace_steps"]


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Flags that make lm.Tiny very small, on a text made up for it."""
    text = tmp_path / "text"
    text.write_bytes(b"".join(b"%d squared is %d\n" % (i, i * i) for i in range(500)))
    values = {
        "data.files": text,
        "model.width": 8,
        "model.mlp_width": 16,
        "model.num_heads": 2,
        "model.context": 8,
        "pipelining.num_microbatches": 2,
        "training.batch_size": 4,
        "training.num_steps": 8,
        "training.num_validation_batches": 2,
        "training.log_every": 1,
        "training.save_every": 2,
        "sampling.num_bytes": 5,
    }
    return [
        "trainer",
        "--params=lm.Tiny",
        *(f"--set={name}={value}" for name, value in values.items()),
    ]


def _records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _losses(folder: Path) -> list[tuple[float, float]]:
    return [(r["step"], r["loss"]) for r in _records(folder) if "loss" in r]


# The command line.


def test_the_flags_are_a_frozen_list() -> None:
    defined = flags.define()
    assert sorted({defined[name].name for name in defined}) == FLAGS


@pytest.mark.parametrize("flag", ["--help", "-h", "--params=lm.Tiny --help"])
def test_help_fits_a_screen_and_is_no_failure(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer", *flag.split()]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert printed.err == ""


def test_help_tells_every_flag_mode_and_exit_status() -> None:
    for name in FLAGS:
        assert f"--{name}" in flags.HELP
    for mode in flags.MODES:
        assert f" {mode} " in flags.HELP
    for status in range(4):
        assert f"  {status}  " in flags.HELP


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Expected --params=NAME, one of image.DigitsQat, lm.Medium, lm.One"),
        ("--params=lm.Tiny", "Expected --logdir=DIR, which --mode=train needs."),
        ("--params=lm.Tiny --mode=eval", "Expected --logdir=DIR, which --mode=eval"),
        ("--params=lm.Tiny stray", "Expected flags only, such as --params=lm.Tiny; "),
        ("stray --params=lm.Tiny", "received 'stray'"),
        ("--param=lm.Tiny", "Unknown command line flag 'param'. Did you mean: params"),
        ("--params=lm.Tiny --mode=trian", "should be one of <train|eval|export|"),
        ("--params=lm.Tiny --mode=eval --logdir=none", "none holds no checkpoint"),
        ("--params=lm.Tiny --mode=export", "Expected --logdir=DIR, which --mode=exp"),
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
    ],
)
def test_wrong_hyperparameters_have_a_status_of_their_own(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["trainer", "--params=lm.Tiny", f"--logdir={tmp_path}", arguments]
    assert main(argv) == 2
    assert message in capsys.readouterr().err


# The modes.


def test_describing_needs_no_tensorflow() -> None:
    code = (
        "import sys; from trainer.main import main\n"
        "status = main(['trainer', '--params=lm.Tiny', '--mode=describe',"
        " '--set=model.num_layers=6'])\n"
        "sys.exit(status or 'tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("lm.Tiny: ")
    (line,) = (li for li in run.stdout.splitlines() if li.startswith("model.num_la"))
    assert line.split(maxsplit=2) == ["model.num_layers", "6", "Blocks."]


def test_inspecting_prints_the_stages_and_nothing_of_tensorflow() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    run = subprocess.run(
        [sys.executable, "-m", "trainer", "--params=lm.Tiny", "--mode=inspect"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert TABLE in run.stdout
    assert "CPU:1" in run.stdout
    plan = run.stdout.partition("\n\n")[2]
    assert "8 microbatches of 4 rows, remat=none, cut as given" in plan
    assert "imbalance 1." in plan


def test_a_run_leaves_all_it_should(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main([*small, f"--logdir={folder}", "--set=training.log_every=4"]) == 0

    printed = capsys.readouterr().out
    assert TABLE in printed
    assert "step 4/8  loss " in printed
    assert "step 8/8  loss " in printed
    assert "step 5/8" not in printed
    assert " tokens/s  0:00:00 left" in printed
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "curves",
        "metrics.jsonl",
        "params.txt",
        "sample.txt",
    }
    assert (folder / "params.txt").read_text().startswith("# lm.Tiny\n")
    sample = (folder / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith("def ")
    assert printed.endswith(f"A sample:\n\n{sample}\n")

    four, eight, validation = _records(folder)
    assert (four["step"], eight["step"], validation["step"]) == (4, 8, 8)
    assert four.keys() == {"step", "loss", "learning_rate", "tokens_per_second"}
    assert f"{validation['validation_model']:.4f}" in printed
    assert f"{validation['validation_bigram']:.4f}" in printed

    # The same command again finds the run complete: it only evaluates.
    assert main([*small, f"--logdir={folder}", "--set=training.log_every=4"]) == 0
    printed = capsys.readouterr().out
    assert "Going on from step 8." in printed
    assert "step 8/8" not in printed
    assert _records(folder) == [four, eight, validation]

    # And evaluating alone says the same once more.
    arguments = [f"--logdir={folder}", "--set=training.log_every=4", "--mode=eval"]
    assert main([*small, *arguments]) == 0
    assert (
        comparison(
            {
                "model": validation["validation_model"],
                "bigram": validation["validation_bigram"],
            },
            unit="byte",
        )
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_losses(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # With dropout, whose seeds a checkpoint has to hold as well.
    small.append("--set=model.dropout=0.2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*small, f"--logdir={whole}"]) == 0
    code = (
        "import os, signal, sys\n"
        "from trainer import progress\n"
        "from trainer.main import main\n"
        "show = progress.Progress.show\n"
        "def show_and_die(self, measurement):\n"
        "    show(self, measurement)\n"
        "    if measurement.step == 6:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "progress.Progress.show = show_and_die\n"
        "main(sys.argv)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *small[1:], f"--logdir={killed}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
    assert _losses(killed) == _losses(whole)[:5]

    capsys.readouterr()
    assert main([*small, f"--logdir={killed}"]) == 0
    assert "Going on from step 4." in capsys.readouterr().out
    assert _losses(killed) == _losses(whole)
    assert _records(killed)[-1] == _records(whole)[-1]
    assert (killed / "sample.txt").read_text() == (whole / "sample.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_stopped_run_in_8_bits_goes_on_with_the_same_losses(
    policy: str,
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Ranges, and the scale of the loss, have to be in a checkpoint as well.
    small += [f"--set=precision.policy={policy}", "--set=precision.quantize=8bit"]
    small += ["--set=precision.quantize_start_step=2"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*small, f"--logdir={whole}"]) == 0
    show = Progress.show

    def show_and_stop(self: Progress, measurement: Measurement) -> None:
        show(self, measurement)
        if measurement.step == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "show", show_and_stop)
    assert main([*small, f"--logdir={stopped}"]) == 1
    monkeypatch.setattr(Progress, "show", show)
    capsys.readouterr()
    assert main([*small, f"--logdir={stopped}"]) == 0
    assert "Going on from step 4." in capsys.readouterr().out
    assert _losses(stopped) == _losses(whole)
    assert _records(stopped)[-1] == _records(whole)[-1]


@pytest.mark.slow
def test_exporting_a_language_model_says_what_runs_where(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small += ["--set=training.num_steps=2"]
    plain, quantized = (f"--logdir={tmp_path / name}" for name in ("plain", "8bit"))
    assert main([*small, plain]) == 0
    assert main([*small, plain, "--mode=export"]) == 0
    assert "No int8 file: the model is not quantized." in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "plain" / "export").iterdir()}
    assert files == {"model.keras", "saved_model"}
    small += ["--set=precision.quantize=8bit"]
    assert main([*small, quantized]) == 0
    assert main([*small, quantized, "--mode=export"]) == 0
    assert "int8 file" in capsys.readouterr().out


def test_what_cannot_be_quantized_is_a_wrong_hyperparameter(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small += ["--set=model.softmax=tied", "--set=precision.quantize=8bit"]
    assert main([*small, f"--logdir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("precision.quantize: "), error


def test_a_folder_of_another_run_is_refused_with_the_difference(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    small += [f"--logdir={folder}", "--set=training.num_steps=1"]
    assert main(small) == 0
    metrics = (folder / "metrics.jsonl").read_text()
    for mode in ("train", "eval"):
        capsys.readouterr()
        assert main([*small, f"--mode={mode}", "--set=model.num_layers=3"]) == 2
        assert capsys.readouterr().err == (
            f"{folder} holds a run of other hyperparameters (its -> yours):\n\n"
            "model.num_layers: 2 -> 3\n\n"
            "Give another --logdir, or its hyperparameters.\n"
        )
    small[1] = "--params=lm.Small"
    assert main(small) == 2
    assert "lm.Tiny -> lm.Small" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_text() == metrics


def test_a_run_that_could_not_start_leaves_the_folder_free(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    # Enough to train on, and found out before the training that too little is left.
    short.write_bytes(b"x" * 50)
    small += [f"--logdir={tmp_path / 'run'}", "--set=training.num_steps=1"]
    assert main([*small, f"--set=data.files={short}"]) == 2
    printed = capsys.readouterr()
    assert "bytes for validation; received 5." in printed.err
    assert "Tracing" not in printed.out
    assert main(small) == 0


def test_ctrl_c_ends_a_run_without_a_traceback(
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.devices.start_tensorflow", interrupted)
    assert main([*small, f"--logdir={tmp_path / 'run'}"]) == 1
    assert capsys.readouterr().err == "\nStopped. The same command goes on.\n"


# The parts.


def test_with_too_few_gpus_the_cpu_takes_all_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpus, hidden = tf.config.list_physical_devices("CPU"), []
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda kind: cpus if kind == "CPU" else ["a GPU"],
    )
    monkeypatch.setattr(
        tf.config, "set_visible_devices", lambda *arguments: hidden.append(arguments)
    )
    devices.start_tensorflow(Pipelining(num_stages=1))
    assert (hidden, capsys.readouterr().out) == ([], "")
    devices.start_tensorflow(Pipelining(num_stages=2, num_replicas=2))
    assert hidden == [([], "GPU")]
    assert capsys.readouterr().out == (
        "4 devices are needed and 1 GPUs are here: using the CPU.\n"
    )


def _measurement(step: int) -> Measurement:
    return Measurement(
        step=step,
        num_steps=200,
        loss=1.23456,
        learning_rate=0.001,
        tokens_per_second=12345.6,
        seconds_left=3725.2,
    )


def test_a_line_of_progress_says_where_the_run_is() -> None:
    stream = io.StringIO()
    Progress(stream).show(_measurement(7))
    assert stream.getvalue() == (
        "step   7/200  loss 1.2346  learning rate 1.00e-03  "
        "12,346 tokens/s  1:02:05 left\n"
    )


def test_a_terminal_gets_one_line_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    bar = Progress(terminal)
    for step in (100, 200):
        bar.show(_measurement(step))
    half, full = terminal.getvalue().split("\r")[1:]
    assert half.startswith("[======      ] step 100/200  loss 1.2346")
    assert full.startswith("[============] step 200/200")
    assert full.endswith("\n")
    assert len(half.removesuffix("\033[K")) == 59


def test_measurements_of_steps_to_be_done_again_are_dropped(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, step=0)
    for step in (1, 2, 3):
        metrics.write(step, {"loss": 0.5})
    metrics.write(3, {"validation_model": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    Metrics(tmp_path, step=2)
    assert _records(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]


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


def test_a_loss_that_is_not_finite_has_a_status_of_its_own(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    wild = ["--set=optimizer.learning_rate=inf", "--set=optimizer.clip_norm=None"]
    assert main([*small, *wild, f"--logdir={folder}"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("Diverged: the loss is nan at step ")
    assert "Try a smaller optimizer.learning_rate." in error


@pytest.mark.slow
def test_replicas_share_the_work(small: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*small, f"--logdir={one}", "--set=training.num_steps=3"]) == 0
    more = ["--set=training.num_steps=3", "--set=pipelining.num_replicas=2"]
    assert main([*small, f"--logdir={two}", *more]) == 0
    for a, b in zip(_losses(one), _losses(two), strict=True):
        assert a == pytest.approx(b, rel=1e-3)
