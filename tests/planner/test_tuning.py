"""`tfgpipe.tune`: trials end at the fastest setting, and leave the model as it is."""

import itertools
import json

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tfgpipe import schedules
from tfgpipe.costs import profiler
from tfgpipe.planner import tuning

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
BATCH = (X, X)
# Per layer, with a heavy last one, and what each call takes beside its rows.
WORK = (1, 1, 1, 1, 1, 4)
A_CALL = 3
NAMES = ("1f1b", "zero_bubble", "interleaved")


def model(compiled=True):
    made = keras.Sequential([keras.Input((8,))])
    for _ in WORK:
        made.add(keras.layers.Dense(8, activation="tanh"))
    if compiled:
        made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


def devices(count):
    return [f"CPU:{p}" for p in range(count)]


def true_costs(calls_per_stage, num_microbatches):
    """Returns the costs of stages on a machine that the test has made up."""
    ends = [0, *itertools.accumulate(calls_per_stage)]
    rows = len(X) / num_microbatches
    work = [sum(WORK[a:b]) for a, b in itertools.pairwise(ends)]
    forward = [w * (rows + A_CALL) for w in work]
    return tfgpipe.Costs(forward=forward, backward=[2 * f for f in forward])


def step_time(schedule, calls_per_stage):
    costs = true_costs(calls_per_stage, schedule.num_microbatches)
    return tfgpipe.simulate(schedule, costs).timeline


@pytest.fixture
def machine(monkeypatch):
    """Has layers seem alike where they are timed alone, and trials tell the truth."""

    def run(setting, build, batch, steps):
        plan = setting.plan
        timeline = step_time(plan.settings.schedule, plan.calls_per_stage)
        return tuning.Trial(setting, timeline.step_time + 5, timeline)

    monkeypatch.setattr(profiler, "_min_seconds", lambda *_: 1.0)
    monkeypatch.setattr(tuning, "_try", run)


def fastest():
    """Returns the least step of all cuts of all settings, by trying each."""
    found = []
    for M, K in itertools.product((1, 2, 4, 8, 16), (1, 2, 4)):
        for name in NAMES:
            try:
                schedule = schedules.make(
                    name, num_stages=K, num_microbatches=M, num_devices=min(K, 2)
                )
            except ValueError:
                continue
            for ends in itertools.combinations(range(1, len(WORK)), K - 1):
                cut = [b - a for a, b in itertools.pairwise((0, *ends, len(WORK)))]
                found.append(step_time(schedule, cut).step_time + 5)
    return min(found)


def test_it_ends_at_the_fastest_setting_of_a_machine_it_did_not_know(machine):
    found = tfgpipe.tune(
        model(), BATCH, devices=devices(2), schedule=NAMES, max_trials=30, print_fn=None
    )
    first, best = found.trials[0], found.best
    assert abs(first.setting.predicted / first.seconds - 1) > 0.5
    assert best.setting.predicted == pytest.approx(best.seconds, rel=0.05)
    assert best.seconds <= 1.03 * fastest()
    assert found.least_seconds <= best.seconds
    assert found.gap == pytest.approx(1 - found.least_seconds / best.seconds)
    assert len(found.trials) < 15


def test_the_order_that_a_search_finds_is_tried_where_it_is_better(machine):
    given = {"devices": devices(3), "num_stages": 3, "num_microbatches": 4}
    named = tfgpipe.tune(model(), BATCH, schedule=["1f1b"], print_fn=None, **given)
    assert {x.setting.plan.settings.schedule.name for x in named.trials} == {"1f1b"}
    found = tfgpipe.tune(model(), BATCH, print_fn=None, **given)
    assert found.best.seconds <= named.best.seconds


def test_fewer_trials_than_it_takes_say_what_is_left(machine):
    found = tfgpipe.tune(
        model(), BATCH, devices=devices(2), max_trials=1, print_fn=None
    )
    assert len(found.trials) == 1
    assert np.isfinite(found.next_seconds)
    assert "best" in str(found)
    assert "predicted to take" in str(found)


@pytest.fixture(scope="module")
def tuned():
    made = model()
    before = [v.numpy() for v in made.variables]
    found = tfgpipe.tune(
        made,
        (*BATCH, None),
        devices=devices(2),
        num_stages=[2],
        num_microbatches=[2, 4],
        max_trials=2,
        steps=1,
        print_fn=None,
    )
    compare.assert_equal(made.variables, before)
    return found


def test_what_is_found_trains_as_the_plain_model(tuned):
    pair = compare.model_pair(lambda: model(compiled=False), **tuned.options)
    compare.train_alike(pair, X, X, 16)
    assert pair[1].config == tuned.config
    assert pair[1].schedule.orders == tuned.best.setting.plan.settings.schedule.orders


def test_what_is_found_is_saved_as_text(tuned):
    text = json.dumps(tuned.config.saved_arguments())
    assert tfgpipe.PipelineConfig.from_saved(json.loads(text)) == tuned.config


def test_an_order_that_was_found_is_saved_as_text(machine):
    given = {"devices": devices(3), "num_stages": 3, "num_microbatches": 4}
    settings = tuning.Settings(
        tuning.Choices.of(given, BATCH), tuning.LayerTimes(model(), X)
    )
    config = settings.in_best_order(settings.all()[0]).config
    text = json.dumps(config.saved_arguments())
    assert tfgpipe.PipelineConfig.from_saved(json.loads(text)) == config


def test_a_trial_measures_every_action(tuned):
    for trial in tuned.trials:
        assert 0 < trial.seconds < float("inf")
        schedule = trial.timeline.schedule
        assert len(trial.timeline.spans) == len(schedule.slots)


def test_a_memory_limit_has_it_recompute_or_says_what_is_missing(machine):
    given = {
        "devices": devices(2),
        "num_stages": 2,
        "num_microbatches": 4,
        "schedule": "gpipe",
        "print_fn": None,
    }
    free = tfgpipe.tune(model(), BATCH, **given)
    assert free.config.remat.name == "none"
    options = {"num_stages": 2, "num_microbatches": 4, "balance": "memory"}
    lean = tfgpipe.plan(model(), remat="none", sample=X, **options)
    limit = max(lean.device_bytes) - 1
    close = tfgpipe.tune(model(), BATCH, memory_limit=limit, **given)
    assert close.config.remat.name == "auto"
    assert 0 < sum(close.best.setting.costs.recompute) < 4
    with pytest.raises(ValueError, match=r"The leanest lacks [\d,]+ bytes"):
        tfgpipe.tune(model(), BATCH, memory_limit=100, **given)


def test_a_pipeline_is_tuned_as_the_model_it_is_of(machine):
    piped = tfgpipe.pipeline(
        model(), num_stages=2, num_microbatches=2, devices=devices(2)
    )
    found = tfgpipe.tune(
        piped,
        BATCH,
        devices=devices(2),
        num_microbatches=4,
        print_fn=None,
        max_trials=1,
    )
    assert found.config.num_microbatches == 4


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"stages": 2}, TypeError, "num_stages"),
        ({"partition": [2, 4]}, TypeError, "to tune with"),
        ({"schedule": ["1f1b", "none"]}, ValueError, "schedule"),
        ({"num_microbatches": 0}, ValueError, "num_microbatches"),
        ({"steps": 0}, ValueError, "steps"),
        ({"batch": X}, ValueError, "tuple"),
        ({"batch": (X, X[:3])}, ValueError, "row for each example"),
        ({"model": model}, TypeError, "not compiled"),
        ({"model": 3}, TypeError, "function"),
        ({"num_stages": 9}, ValueError, "No setting"),
        ({"batch": (X[:, :4], X)}, ValueError, "(?!No setting)"),
    ],
)
def test_wrong_arguments_are_refused(wrong, error, message):
    given = {"model": model(), "batch": BATCH, "print_fn": None, **wrong}
    if wrong.get("model") is model:
        given["model"] = model(compiled=False)
    with pytest.raises(error, match=message):
        tfgpipe.tune(given.pop("model"), given.pop("batch"), **given)


def test_under_a_strategy_it_says_so():
    with (
        tfgpipe.PipelineStrategy(num_replicas=2, num_stages=2).scope(),
        pytest.raises(ValueError, match="outside"),
    ):
        tfgpipe.tune(model(), BATCH)


def test_trials_are_printed(machine, capsys):
    tfgpipe.tune(model(), BATCH, devices=devices(2), max_trials=1)
    assert "trial 1: K=" in capsys.readouterr().out
