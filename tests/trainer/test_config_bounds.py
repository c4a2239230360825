"""Groups of hyperparameters refuse what is more than anybody has, at once."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from tfgpipe import PipelineConfig
from tfgpipe_trainer.config import Evaluation, Pipelining, Precision, Training
from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams

pytestmark = pytest.mark.pure

COUNTS = {
    "num_replicas": Pipelining,
    "num_shards": Pipelining,
    "num_stages": Pipelining,
    "num_microbatches": Pipelining,
    "batch_size": Training,
    "num_steps": Training,
    "max_batches": Evaluation,
    "quantize_start_step": Precision,
    "freeze_ranges_step": Precision,
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_is_a_slip_of_the_hand_is_refused(name: str) -> None:
    group: type[Hyperparams] = COUNTS[name]
    for count in (2**31, 10**20, 10**400):
        with pytest.raises(
            HyperparameterError, match=rf"^{name}: expected an int.*les"
        ):
            group(**{name: count})


def test_more_devices_than_anybody_has_are_refused() -> None:
    with pytest.raises(HyperparameterError, match="at most 10000 devices in all"):
        Pipelining(num_stages=100, num_replicas=100, num_shards=2)
    Pipelining(num_stages=100, num_replicas=100)


def test_options_of_a_pipeline_are_those_of_its_configuration() -> None:
    fields = {field.name: field for field in dataclasses.fields(Pipelining)}
    shared = fields.keys() & {x.name for x in dataclasses.fields(PipelineConfig)}
    # A limit in GiB, and words for True and False.
    for name in shared - {"jit_compile"}:
        assert fields[name].metadata["help"] == PipelineConfig.summary_of(name)
    for name in ("balance", "remat", "batch_norm", "jit_compile"):
        assert fields[name].default == PipelineConfig.default_of(name)


def test_every_named_schedule_deals_its_stages() -> None:
    hints = typing.get_type_hints(Pipelining)
    each = {
        name: Pipelining(num_stages=4, schedule=name).resolved_stages_per_device
        for name in typing.get_args(hints["schedule"])
    }
    ones = ("gpipe", "1f1b", "zero_bubble", "eager_1f1b", "auto")
    assert {name for name, v in each.items() if v == 1} == set(ones)
    assert {v for name, v in each.items() if name not in ones} == {2}
    for name, several in {"gpipe": 4, "interleaved": 4, "1f1b": 0}.items():
        if several:
            found = Pipelining(num_stages=4, schedule=name, stages_per_device=several)
            assert found.num_devices == 1
        else:
            with pytest.raises(
                HyperparameterError, match=r"^stages_per_device: .*None"
            ):
                Pipelining(num_stages=4, schedule=name, stages_per_device=2)


def test_stages_that_fold_back_are_two_on_a_device() -> None:
    with pytest.raises(HyperparameterError, match="stages_per_device: expected 2 or"):
        Pipelining(num_stages=8, schedule="zbv", stages_per_device=4)
