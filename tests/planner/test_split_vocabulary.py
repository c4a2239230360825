"""A head over all devices of a pipeline, beside bounds and published ratios."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.planner_toys import TOY, config, layer, request
from tfgpipe import planner
from tfgpipe.costs import PassCost
from tfgpipe.planner import Link, Workload
from tfgpipe.planner.split_vocabulary import with_split_vocabulary

pytestmark = pytest.mark.pure

# Of blocks and a head only products take time: of 2 examples a block 1 s, a head 4.
FREE = Link(bandwidth=1e12, latency=0.0)
FAST = dataclasses.replace(TOY, bandwidth=1e12, link=FREE, network=FREE)
BLOCK = {"flops": PassCost(50, 100), "traffic": PassCost(), "max_shards": 1}
HEAD = {**BLOCK, "flops": PassCost(200, 400), "num_tokens": 40, "name": "head"}


def model(num_blocks=8, **head):
    layers = [layer(name=f"{i}", **BLOCK) for i in range(num_blocks)]
    last = layer(**{**HEAD, **head})
    return Workload(name="lm", layers=(*layers, last), dtype="float32")


def asked(workload=None, **values):
    usual = {"device": FAST, "num_devices": 4, "batch_size": 24}
    return request(workload or model(), **{**usual, **values})


PIPELINE = {"num_devices": 4, "num_microbatches": 12, "schedule": "1f1b"}


def test_a_step_is_near_the_work_of_one_device():
    found = with_split_vocabulary(asked(), config(**PIPELINE))
    assert found.layers_per_stage == (2, 2, 2, 2, 1, 1, 1, 1, 1)
    # A device has two blocks and a quarter of the head: 3 s forward and 6 back; before
    # it works, and after, a microbatch passes other stages.
    assert 12 * 9 < found.time.pipeline < 12 * 9 + 20
    whole = asked().estimate(config(**PIPELINE))
    # Eight blocks and a head of four in four stages: five on one at the least.
    assert whole.time.pipeline > 12 * 3 * 4
    assert found.config.order == "auto, vocabulary / 4"


def test_each_device_has_its_tokens():
    head = {"count": 4000.0, "saved": 85.0, "inputs": 5.0}
    asked_of = asked(model(**head))
    found = with_split_vocabulary(asked_of, config(**PIPELINE))
    blocks = asked(Workload(name="", layers=model().layers[:-1])).estimate(
        config(**PIPELINE)
    )
    for ours, plain in zip(found.memory, blocks.memory, strict=True):
        assert ours.weights == pytest.approx(plain.weights + 4 * 1000)
        assert ours.slots == pytest.approx(plain.slots + 2 * 4 * 1000)
    assert found.missing_bytes < 0


@pytest.mark.nightly
def test_the_published_gain_is_met():
    """Yeung et al. 2024, table 5: 8 A100s, M=128, over the best cut of layers."""
    for tokens, published in ((131_072, 49.93 / 44.22), (262_144, 50.12 / 38.91)):
        lm = planner.transformer(
            name="lm",
            num_layers=32,
            width=3072,
            mlp_width=4 * 3072,
            num_heads=24,
            length=2048,
            vocabulary=tokens,
            dtype="bfloat16",
            flash=True,
        )
        on = planner.PlanRequest(
            lm, device=planner.TABLE["a100-80g"], num_devices=8, batch_size=128
        )
        each = config(num_devices=8, num_microbatches=128, schedule="1f1b")
        gain = on.estimate(each).time.total / with_split_vocabulary(on, each).time.total
        assert gain == pytest.approx(published, rel=0.02)


def test_a_search_tries_it_and_says_whether_it_pays():
    large = {"flops": PassCost(2000, 4000)}
    given = {
        "device": FAST,
        "num_devices": 4,
        "batch_size": 8,
        "remats": ["none"],
        "num_best": 1,
    }
    found = planner.search(model(4, **large), **given, splits_vocabulary=True)
    assert "vocabulary / 4" not in str(found.best[0].config)  # Replicas are faster.
    (why,) = [x for x in found.rejected if x.name == "vocabulary=split"]
    assert "x the best step" in why.reason
    heavy = {"count": 150_000.0, **large}  # 600 kB each; a replica has no room.
    found = planner.search(model(4, **heavy), **given, splits_vocabulary=True)
    assert "vocabulary / 4" in found.best[0].config.order
    plain = planner.search(model(4, **heavy), **given)
    assert not plain.best or plain.best[0].time.total > found.best[0].time.total


@pytest.mark.parametrize(
    ("workload", "values"),
    [
        (model(num_tokens=0), {}),
        (model(num_tokens=3), {}),
        (model(), {"num_devices": 1}),
        (model(), {"shard_replicas": "weights", "num_replicas": 2}),
    ],
)
def test_what_has_no_such_pipeline_is_refused(workload, values):
    with pytest.raises(ValueError, match="split over the devices of a pipeline"):
        with_split_vocabulary(asked(workload), config(**{**PIPELINE, **values}))
