"""The command line, for an experiment of which Keras makes the layers."""

from __future__ import annotations

from tests.pure.planner.test_main import ASKED
from tfgpipe.planner import __main__ as program


def test_an_experiment_is_planned(capsys, tmp_path):
    picture = tmp_path / "memory.png"
    smaller = ["--set=training.batch_size=8", "--parts", f"--picture={picture}"]
    assert program.main([*ASKED, *smaller]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lm.Tiny on 4 x h100-80g: ")
    assert "a step of 8 rows in float32" in out
    assert "Why others lose" in out
    assert "gradients" in out
    assert picture.exists()


def test_status_2_says_that_nothing_fits(capsys, tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text('[tiny]\nlike = "tpu-v3-16g"\nmemory = 1e6\n')
    arguments = [f"--device_file={path}", "--device=tiny", "--microbatches=1"]
    assert program.main([*ASKED, *arguments]) == 2
    assert "Nothing fits" in capsys.readouterr().out


def test_devices_that_nothing_divides_among_are_refused(capsys):
    assert program.main([*ASKED, "--devices=1000000000"]) == 1
    error = capsys.readouterr().err
    assert "no layout divides it. Use a multiple of" in error
    assert error.endswith("Try `python -m tfgpipe.planner --help`.\n")
