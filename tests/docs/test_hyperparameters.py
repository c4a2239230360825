"""The tables of hyperparameters are those of the classes."""

from __future__ import annotations

from typing import Literal

import pytest

from docs import hyperparameters
from tfgpipe_params import lm
from tfgpipe_trainer import hyperparams
from tfgpipe_trainer.hyperparams import Hyperparams, field

pytestmark = pytest.mark.pure


def test_every_hyperparameter_has_a_row():
    tables = hyperparameters.tables()
    missing = [n for n in hyperparams.flatten(lm.Tiny()) if f"| `{n}` |" not in tables]
    assert not missing


def test_an_experiment_is_listed_with_what_it_sets():
    (row,) = [
        line
        for line in hyperparameters.tables().splitlines()
        if line.startswith("| `lm.Tiny` |")
    ]
    assert "`pipelining.num_stages=2`" in row
    assert "optimizer.beta_1" not in row  # As it is by default.


class Size(Hyperparams):
    """How big it is."""

    width: Literal["a|b", "wide"] | None = field(default=None, help="One | or *.")


class Network(Hyperparams):
    """Two groups."""

    size: Size = field(default=Size(), help="Size.")
    seed: int = field(default=0, help="Seed.")


def test_a_group_has_a_table_and_what_is_in_none_has_another():
    tables = list(hyperparameters.groups(Network, {"size", "seed"}))
    head = "| name | values | default | |\n|---|---|---|---|\n"
    assert tables == [
        f"**size**: How big it is.\n\n{head}"
        r"| `size.width` | `a\|b`, `wide`, `None` | `None` | One \| or \*. |",
        f"{head}| `seed` | int | `0` | Seed. |",
    ]
