"""What policies save and recompute, beside numbers by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tfgpipe import remat, schedules
from tfgpipe.remat import Remat

pytestmark = pytest.mark.pure

# Of five layers: what their backwards read, and what they take.
ACTIVATIONS, INPUTS = (10, 20, 30, 40, 50), (1, 2, 3, 4, 5)


@dataclasses.dataclass(frozen=True)
class InPairs(Remat):
    keeps_all: bool = False

    def segment(self, num_layers: int) -> int:
        return 2


@pytest.mark.parametrize(
    ("policy", "repeated", "saved", "recomputed"),
    [
        (remat.find("none"), [0] * 5, 150, 0),
        (remat.find("stage"), [1] * 5, 0, 150),
        (remat.find("except_last"), [1] * 5, 0, 150),
        (remat.find("layer"), [2, 2, 2, 2, 1], 0, 50 + 2 + 3 + 4 + 5),
        (InPairs(), [2, 2, 2, 2, 1], 0, 70 + 3 + 5),
        (InPairs(keeps_all=True), [1] * 5, 3 + 5, 70),
    ],
)
def test_bytes_of_five_layers_are_those_by_hand(policy, repeated, saved, recomputed):
    assert policy.recomputed(5) == repeated
    assert policy.saved_bytes(ACTIVATIONS, INPUTS) == saved
    assert policy.recomputed_bytes(ACTIVATIONS, INPUTS) == recomputed


def test_what_operations_save_is_not_recomputed():
    """Of five layers, whose products save 3, 4, 5, 6 and 7 bytes."""
    policy, kept = remat.find("products"), (3, 4, 5, 6, 7)
    assert policy.recomputed(5) == [1] * 5
    assert policy.saved_bytes(ACTIVATIONS, INPUTS, kept) == 25
    assert policy.recomputed_bytes(ACTIVATIONS, INPUTS, kept) == 150 - 25
    # Others save whole layers or nothing.
    for name, saved, again in (("stage", 0, 150), ("none", 150, 0)):
        policy = remat.find(name)
        assert policy.saved_bytes(ACTIVATIONS, INPUTS, kept) == saved
        assert policy.recomputed_bytes(ACTIVATIONS, INPUTS, kept) == again


def test_a_kept_microbatch_repeats_nothing_but_segments():
    assert remat.find("except_last").recomputed(3, kept=True) == [0, 0, 0]
    assert remat.find("layer").recomputed(3, kept=True) == [1, 1, 1]


def test_segments_follow_one_another():
    spans = InPairs().segments(5)
    assert spans == (slice(0, 2), slice(2, 4), slice(4, 5))
    assert remat.find("stage").segments(5) == (slice(0, 5),)


@pytest.mark.parametrize("name", remat.NAMES)
def test_which_microbatches_are_kept(name):
    """Of 1F1B with two stages: the second runs a backward after each forward."""
    schedule = schedules.one_f_one_b(2, 4)
    kept = [
        [m for m in range(4) if remat.find(name).keeps(schedule, k, m)]
        for k in range(2)
    ]
    everything = [[0, 1, 2, 3]] * 2
    expected = {"none": everything, "except_last": [[3], [0, 1, 2, 3]]}
    assert kept == expected.get(name, [[], []])


def test_a_policy_is_found_by_its_name_or_is_one():
    for name in remat.NAMES:
        assert str(remat.find(name)) == name
        assert remat.is_named(remat.find(name))
    own = InPairs(keeps_all=True)
    assert remat.find(own) is own
    assert not remat.is_named(own)
    assert InPairs.from_config(own.get_config()) == own
    with pytest.raises(ValueError, match=r"`remats` must be .* Received 'stag'\. Or "):
        remat.find("stag", argument="remats")
