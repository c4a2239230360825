"""Published configurations, as they are in the file: consistent, and enough of them."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from benchmarks import published
from tfgpipe import planner

pytestmark = pytest.mark.pure

ROWS = published.read()
COUNTED = [row for row in ROWS if not row.skipped]


def by_family(rows):
    return collections.Counter(row.family for row in rows)


def test_at_least_eighty_rows_of_six_families_are_counted():
    assert len(COUNTED) >= 80
    expected = {"llm-foundry": 29, "nanotron": 26, "vocabulary": 48, "zero bubble": 45}
    assert by_family(COUNTED) == {**expected, "NVIDIA": 14, "MaxText": 11}


def test_rows_that_are_left_out_say_why():
    assert all(len(row.skipped.split()) > 2 for row in ROWS if row.skipped)


@pytest.mark.parametrize("row", COUNTED, ids=lambda row: f"{row.family}-{row.model}")
def test_a_row_is_consistent(row):
    sizes = row.replicas * row.stages * row.shards * row.context_parallel
    assert sizes == row.gpus
    assert row.replicas * row.microbatches * row.microbatch == row.batch
    assert row.heads % row.kv_heads == 0
    assert row.head_width or row.width % row.heads == 0
    assert row.device in planner.TABLE
    assert row.source
    # A speed, in one unit; but for llm-foundry, which has two.
    units = sum(bool(x) for x in (row.tokens, row.mfu, row.samples))
    assert units == 1 + (row.family == "llm-foundry")


@pytest.mark.parametrize(
    "row", [x for x in COUNTED if x.tokens and x.mfu], ids=lambda row: row.model
)
def test_mfu_and_tokens_are_of_the_same_run(row):
    """llm-foundry has both: its MFU is that of its tokens by the formula."""
    tokens = dataclasses.replace(row, tokens=0.0).tokens_per_second
    assert tokens == pytest.approx(row.tokens, rel=0.02)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("MPT 7b", 6.7),
        ("Llama 8B", 8.0),
        ("Llama 405B", 406),
        ("1.34B", 1.34),
        ("80B", 80),
        ("28.3B", 28.4),
        ("16B", 15.8),
        ("1024B", 998),
    ],
)
def test_weights_are_as_many_as_the_name_of_a_model_says(model, billions):
    row = next(row for row in COUNTED if row.model == model)
    sizes = published.workload(row)
    copies = 1 if row.tied and row.stages > 1 else 0
    copies += model == "28.3B"  # Counts the embedding, and not the head.
    count = sizes.parameters - copies * row.vocabulary * row.width
    assert count / 1e9 == pytest.approx(billions, rel=0.02)


def test_mfu_counts_six_flops_a_weight_and_twelve_a_score():
    """Narayanan et al. 2021: 72 l h^2 (1 + n / 6 h + V / 12 l h), without recompute."""
    row = next(row for row in COUNTED if row.family == "vocabulary")
    layers, h, n, V = row.layers, row.width, row.length, row.vocabulary
    expected = 72 * layers * h * h * (1 + n / (6 * h) + V / (12 * layers * h))
    assert row.flops_per_token == pytest.approx(expected)
    seconds_of_a_token = 1 / row.tokens_per_second
    assert expected / seconds_of_a_token / 312e12 == pytest.approx(row.mfu / 100)


def test_equal_settings_are_on_one_side():
    for family in by_family(COUNTED):
        mine = [row for row in COUNTED if row.family == family]
        calibrating, judged = published.halves(mine)
        assert len(calibrating) + len(judged) == len(mine)
        assert not {x.settings for x in calibrating} & {x.settings for x in judged}
        assert {x.device for x in judged} == {x.device for x in calibrating}


def test_a_fit_finds_the_constants_of_rows_that_the_planner_made():
    rows = [row for row in COUNTED if row.model == "MPT 70b"]
    truth = published.Fit({row.device: 0.43 for row in rows}, network_cards=8)
    made = [
        dataclasses.replace(row, tokens=published.predicted_tokens(row, truth))
        for row in rows
    ]
    found = published.calibrate(made)
    assert found.network_cards == 8
    assert found.efficiency == pytest.approx(truth.efficiency, rel=1e-2)


def test_an_overhead_is_what_the_fullest_device_lacks():
    rows = [row for row in COUNTED if row.family == "vocabulary" and row.memory_gib]
    plain = published.Fit({"a100-80g": 0.6}, network_cards=8)
    made = [
        dataclasses.replace(row, memory_gib=published.predicted_gib(row, plain) + 3)
        for row in rows[:4]
    ]
    assert published.calibrate(made).overhead == pytest.approx(3)
