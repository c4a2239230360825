"""Plans of experiments."""

from __future__ import annotations

import pytest

from tfgpipe_trainer import plan

ASKED = ["plan", "--params=lm.Tiny", "--device=h100-80g", "--devices=4"]


def test_an_experiment_is_planned(capsys):
    smaller = ["--set=training.batch_size=8", "--set=precision.policy=mixed_bfloat16"]
    assert plan.main([*ASKED, *smaller]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("lm.Tiny on 4 x h100-80g: ")
    assert "a step of 8 examples in bfloat16" in printed.out
    assert "num_shards" not in printed.err


def test_shards_are_the_planners_to_choose(capsys):
    smaller = [*ASKED, "--set=training.batch_size=4", "--best=1"]
    assert plan.main(smaller) == 0
    whole = capsys.readouterr()
    assert plan.main([*smaller, "--set=pipelining.num_shards=2"]) == 0
    sharded = capsys.readouterr()
    assert "  T=2 " in whole.out  # It says why not.
    assert sharded.out == whole.out
    assert "pipelining.num_shards=2 is left aside: every T is tried.\n" in sharded.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "the following arguments are required: --params"),
        ([*ASKED, "--params=lm.Tinny"], "Did you mean lm.Tiny?"),
        ([*ASKED, "--set=model.widht=3"], "Did you mean model.width?"),
    ],
)
def test_what_is_wrong_is_said_with_status_1(arguments, words, capsys):
    with pytest.raises(SystemExit) as raised:
        plan.main(arguments)
    assert raised.value.code == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.endswith("Try `python -m trainer.plan --help`.\n")
