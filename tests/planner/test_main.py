"""The command line, for a model that Keras makes."""

from __future__ import annotations

import pytest

from tests.planner.small_models import ASKED
from tfgpipe.planner import __main__ as program


def test_a_model_is_planned(capsys, tmp_path):
    picture = tmp_path / "memory.png"
    more = ["--policy=mixed_bfloat16", "--parts", f"--picture={picture}"]
    assert program.main([*ASKED, *more, "--optimizer=sgd"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tests.planner.small_models.dense on 4 x h100-80g: 288 ")
    assert "a step of 8 examples in bfloat16" in out
    assert "Why others were rejected" in out
    assert "gradients" in out
    assert picture.exists()


def test_status_2_says_that_nothing_fits(capsys, tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text('[tiny]\nlike = "tpu-v3-16g"\nmemory = 100\n')
    arguments = [f"--device_file={path}", "--device=tiny", "--microbatches=1"]
    assert program.main([*ASKED, *arguments]) == 2
    assert "Nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--devices=1000000000", "no configuration divides it. Use a multiple of"),
        ("--batch_size=0", "`batch_size` is a number of at least 1."),
        ("--optimizer=adamm", "adamm"),
    ],
)
def test_what_cannot_be_planned_is_refused(argument, words, capsys):
    with pytest.raises(SystemExit) as raised:
        program.main([*ASKED, argument])
    assert raised.value.code == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.endswith("Try `python -m tfgpipe.planner --help`.\n")
