"""Experiments are found by name, and only what a user names is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tfgpipe_params
from tfgpipe_trainer import experiment, run_dir
from tfgpipe_trainer.experiment import experiments, find
from tfgpipe_trainer.hyperparams import HyperparameterError, from_text
from tfgpipe_trainer.main import main

pytestmark = pytest.mark.pure

MINE = (
    "from tfgpipe_trainer.experiment import Experiment\n"
    "class Mine(Experiment):\n    def network(self): ...\n"
)
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules, which Python finds, as in a working directory."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def written(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        importlib.invalidate_caches()

    yield written
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("foreign", "evilmod", "tfgpipe_params"):
            del sys.modules[name]


def status(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["trainer", *argv])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "..x",
        ".lm.Tiny",
        "lm..Tiny",
        "lm",
        ".",
        "a b.C",
        ".".join("a" * 3000),
        "json.decoder.Missing",
        "json.decoder.x.Missing",
    ],
)
def test_what_is_no_name_of_an_experiment_is_refused(name: str) -> None:
    with pytest.raises(HyperparameterError, match="no such experiment") as error:
        find(name)
    assert len(str(error.value)) < 2000


def test_an_abstract_class_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(HyperparameterError, match=r"abstract class, which lacks netw"):
        find("tfgpipe_trainer.experiment.Experiment")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("foreign/__init__.py", "import nope\n"),
        ("foreign/__init__.py", "raise ValueError('nope')\n"),
        ("foreign/mine.py", "import nope\n"),
    ],
)
def test_what_a_package_lacks_is_said(file: str, text: str, write: Write) -> None:
    write("foreign/mine.py", MINE)
    write(file, text)
    with pytest.raises((ModuleNotFoundError, ValueError), match="nope"):
        find("foreign.mine.Mine")


def test_an_experiment_of_another_package_is_found(write: Write) -> None:
    write("foreign/mine.py", MINE)
    assert find("foreign.mine.Mine").__name__ == "Mine"


def test_a_broken_file_of_params_does_not_hide_a_misspelt_name(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        tfgpipe_params, "__path__", [*tfgpipe_params.__path__, str(tmp_path)]
    )
    write("mine.py", "import nope\n")
    broken = "params/mine.py cannot be imported: ModuleNotFoundError: No module named"
    code, message = status(capsys, "--params=lmm.Tiny")
    assert code == 2
    assert "lmm.Tiny: no such experiment. Did you mean lm.Tiny?" in message
    assert broken in message
    code, message = status(capsys, "--mode=train")
    assert code == 1
    assert "Expected --params=NAME, one of image." in message
    assert broken in message
    assert "lm.Tiny" in experiments()


def test_a_file_that_ends_python_says_so(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("foreign/mine.py", "import sys\nsys.exit(3)\n")
    code, message = status(capsys, "--params=foreign.mine.Mine", "--mode=describe")
    assert code == 1
    assert "Crashed: SystemExit: 3\nThe traceback is in " in message


def _run(tmp_path: Path, first_line: str) -> Path:
    folder = tmp_path / "downloaded"
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    (folder / "params.txt").write_text(f"# {first_line}\nseed = 1\n")
    return folder


@pytest.mark.parametrize("mode", ["eval", "decode", "export", "diff"])
def test_the_folder_of_a_run_has_no_module_imported(
    mode: str, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _run(tmp_path, "evilmod.X")
    write("evilmod.py", f"open({str(tmp_path / 'pwned')!r}, 'w')\n")
    where = ["lm.Tiny", str(folder)] if mode == "diff" else [f"--logdir={folder}"]
    code, message = status(capsys, f"--mode={mode}", *where)
    assert code == 2
    assert "is the run of 'evilmod.X', which params/ does not have" in message
    assert "add --params=evilmod.X" in message
    # Nor has it, where the user names another experiment.
    if mode != "diff":
        code, message = status(capsys, f"--mode={mode}", *where, "--params=lm.Tiny")
        assert code == 2
        assert "evilmod.X -> lm.Tiny" in message
    assert not (tmp_path / "pwned").exists()
    # What the user names is imported.
    code, message = status(capsys, f"--mode={mode}", *where, "--params=evilmod.X")
    assert "evilmod.X: no such experiment" in message
    assert (tmp_path / "pwned").exists()


def test_what_params_has_is_no_matter_of_trust() -> None:
    assert experiment.is_in_params("lm.Tiny")
    assert not experiment.is_in_params("Tiny")
    assert not experiment.is_in_params("tfgpipe_trainer.experiment.Experiment")


@pytest.mark.parametrize("text", ["", "seed = 1\n"])
def test_what_is_no_file_of_hyperparameters_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _run(tmp_path, "lm.Tiny")
    (folder / "params.txt").write_text(text)
    code, message = status(capsys, "--mode=eval", f"--logdir={folder}")
    assert code == 2
    assert "params.txt: expected the hyperparameters of a run, the first " in message


def test_a_file_of_hyperparameters_that_windows_has_changed_is_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "params.txt").write_bytes(b"\xef\xbb\xbf# lm.Tiny\r\nseed = 1\r\n")
    assert run_dir.read(tmp_path) == ("lm.Tiny", "seed = 1\n")


def test_odd_comments_in_the_hyperparameters_of_a_run_are_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _run(
        tmp_path, "lm.Tiny\n# sha256 of data.tokenizer\n# sha256 of x = a = b"
    )
    tokenizer = tmp_path / "words.json"
    tokenizer.write_text("{}")
    code, message = status(
        capsys,
        "--mode=decode",
        f"--logdir={folder}",
        f"--set=data.tokenizer={tokenizer}",
    )
    assert code == 2
    assert "sha256 of data.tokenizer: none -> " in message


def test_a_former_place_of_a_module_is_refused_with_its_new_one() -> None:
    with pytest.raises(
        ImportError, match=r"from the folder of a task, .*tfgpipe_params"
    ):
        importlib.import_module("tfgpipe_trainer.tasks.language_model")
    with pytest.raises(ImportError, match=r"tfgpipe_trainer\.batches"):
        importlib.import_module("tfgpipe_trainer.data.batches")


def test_a_former_name_of_an_experiment_is_refused_but_read(tmp_path: Path) -> None:
    for former, name in experiment.FORMER.items():
        with pytest.raises(HyperparameterError, match=f"expected {name}; received its"):
            find(former)
        (tmp_path / "params.txt").write_text(f"# {former}\nsaving.keep = 2\n")
        assert run_dir.read(tmp_path)[0] == name
        text = run_dir.read(tmp_path)[1]
        assert from_text(text, find(name)).checkpoint.keep == 2
