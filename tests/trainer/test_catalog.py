"""`python -m trainer` lists what there is to run, whatever is in `params/`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tfgpipe_params
from tests.helpers.subprocesses import interpret
from tfgpipe_trainer.commands import catalog
from tfgpipe_trainer.experiment import Experiment, experiments
from tfgpipe_trainer.main import main

pytestmark = pytest.mark.pure

PROGRAM = """
import sys
from tfgpipe_trainer.main import main
assert main(["trainer"]) == 0
assert not {"tensorflow", "keras"} & set(sys.modules)
"""

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the one file of a folder in place of `params/`."""
    monkeypatch.setattr(tfgpipe_params, "__path__", [str(tmp_path)])

    def written(text: str) -> None:
        (tmp_path / "mine.py").write_text(text)
        importlib.invalidate_caches()

    yield written
    sys.modules.pop("tfgpipe_params.mine", None)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["trainer"]) == 0
    return capsys.readouterr().out.splitlines()


def test_all_experiments_are_listed_without_tensorflow() -> None:
    run = interpret(PROGRAM)
    assert (run.returncode, run.stderr) == (0, "")
    printed = run.stdout.splitlines()
    named = [
        line.split()[0]
        for line in printed
        if line.startswith("  ") and line[2:3] != " "
    ]
    assert sorted(named) == sorted(experiments())
    assert max(map(len, printed)) <= 100
    (tiny,) = (line for line in printed if line.startswith("  lm.Tiny "))
    assert tiny.split(maxsplit=1)[1].startswith("1 to 2 minutes ")
    assert "    python -m trainer --params=lm.Tiny --logdir=runs/tiny" in printed


def test_a_file_lists_its_experiments_in_its_own_order() -> None:
    printed = catalog.listing()
    assert printed.index("lm.Tiny ") < printed.index("lm.Medium ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nowhere\n", "ModuleNotFoundError: No module named 'nowhere'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("def broken(:\n", "SyntaxError: invalid syntax (mine.py, line 1)"),
    ],
)
def test_a_file_that_cannot_be_imported_has_a_line(
    text: str, reason: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(text)
    assert f"params/mine.py cannot be imported: {reason}" in lines(capsys)


def test_an_abstract_class_and_one_without_a_docstring_are_listed(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        "from tfgpipe_trainer.experiment import Experiment\n"
        "from tfgpipe_params.lm.task import LanguageModel\n"
        "class Base(Experiment):\n"
        "    '''Not whole.'''\n"
        "class Mine(LanguageModel):\n"
        "    pass\n"
    )
    printed = lines(capsys)
    (base,) = (line for line in printed if line.startswith("  mine.Base "))
    assert base.split(maxsplit=1)[1].startswith("abstract      It lacks ")
    assert "network" in base
    (mine,) = (line for line in printed if line.startswith("  mine.Mine "))
    assert mine.endswith("not measured  No description.")


def test_an_experiment_says_that_accelerators_are_missing(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    docstring = "Large.\\n\\n    Time:      2 hours.\\n"
    write(
        "from tfgpipe_params.lm.task import LanguageModel\n"
        f"class Large(LanguageModel):\n    '''{docstring}'''\n"
        "    num_accelerators = 4\n"
    )
    for here, said in ((3, "needs 4 accelerators"), (4, "2 hours")):
        monkeypatch.setattr(catalog, "num_accelerators_here", lambda n=here: n)
        assert f"  mine.Large  {said}  Large." in lines(capsys)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("20 seconds.", "20 seconds"),
        ("1.5 minutes, half of it tracing.", "1.5 minutes"),
        ("1 to 2 minutes. More where others compute.", "1 to 2 minutes"),
        ("not measured: about 0.3 s a step.", "not measured"),
    ],
)
def test_a_time_is_the_first_words_of_its_line(time: str, expected: str) -> None:
    named = type("Mine", (Experiment,), {"__doc__": f"A.\n\n    Time:      {time}\n"})
    assert catalog.duration(named) == expected


def test_a_reader_that_has_had_enough_is_no_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(*arguments: object, **named: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    assert main(["trainer"]) == 0
