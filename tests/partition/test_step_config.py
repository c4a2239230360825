"""Choices that the order and the memory of a step depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tfgpipe import remat, schedules
from tfgpipe.partition import PipelineConfig, StepConfig
from tfgpipe.planner import ParallelConfig

pytestmark = pytest.mark.pure

MESH: dict[str, int] = {"num_replicas": 2, "num_devices": 4, "num_shards": 1}


def named(**values: Any) -> dict[str, Any]:
    """Returns arguments of which type checkers would rather have the values."""
    return values


def test_names_are_found_once_and_values_are_themselves() -> None:
    config = StepConfig(**named(num_microbatches=4, schedule="1f1b", remat="layer"))
    assert config.schedule is schedules.one_f_one_b
    assert config.remat is remat.find("layer")
    assert dataclasses.replace(config) == config


def test_the_planner_has_the_choices_and_defaults_of_a_pipeline() -> None:
    shared = {field.name: field for field in dataclasses.fields(StepConfig)}
    for name, field in shared.items():
        whole = PipelineConfig.__dataclass_fields__[name]
        assert whole.metadata == field.metadata
    planned = ParallelConfig(**MESH, num_microbatches=8)
    assert planned.schedule is schedules.gpipe
    assert planned.remat is remat.find("stage")
    with pytest.raises(ValueError, match="must be one of 'gpipe', '1f1b'"):
        ParallelConfig(**MESH, **named(num_microbatches=8, schedule="2f2b"))
    with pytest.raises(ValueError, match="`num_microbatches` must be an integer"):
        ParallelConfig(**MESH, num_microbatches=0)


def test_stages_of_a_plan_are_those_of_its_devices_or_its_schedule() -> None:
    several = named(schedule="interleaved", stages_per_device=2)
    planned = ParallelConfig(**MESH, num_microbatches=8, **several)
    assert (planned.num_stages, planned.order) == (8, "interleaved x 2")
    own = schedules.gpipe(4, 8)
    planned = ParallelConfig(**MESH, num_microbatches=8, schedule=own)
    assert planned.num_stages == 4
    assert planned.make_schedule(3) is own
    with pytest.raises(TypeError, match="num_stages"):
        ParallelConfig(**MESH, **named(num_microbatches=8, num_stages=4))


def test_a_summary_is_the_first_sentence_of_the_documentation() -> None:
    assert PipelineConfig.summary_of("schedule") == (
        "Order of forwards and backwards on each device."
    )
    for field in dataclasses.fields(PipelineConfig):
        words = PipelineConfig.summary_of(field.name)
        assert words[0].isupper()
        assert words.endswith(".")
