"""Hyperparameters of a pipeline name the choices of the library."""

from __future__ import annotations

import typing

from tfgpipe import remat, schedules
from tfgpipe.partition import balances
from tfgpipe.stage import codecs, normalization
from tfgpipe_trainer.config import Pipelining


def test_choices_are_those_of_the_library() -> None:
    hints = {
        name: typing.get_args(hint)
        for name, hint in typing.get_type_hints(Pipelining).items()
    }
    assert hints["balance"] == balances.NAMES
    assert hints["remat"] == remat.NAMES
    assert hints["schedule"] == (*schedules.NAMES, "auto")
    assert hints["transfer_dtype"] == ("none", *typing.get_args(codecs.TransferDtype))
    assert hints["batch_norm"] == typing.get_args(normalization.BatchNorm)
