"""`tfgpipe.tune`: the fastest pipeline of a model on the devices here, by trials.

    each layer's time ─▶ step of each setting, predicted ─▶ the best is built and timed
    (for each M)                     ▲                                  │
                                     └──── layers' times, corrected ◀───┘

After a trial the times of layers are corrected by the measured time of each stage, so
that the next prediction, and the next cut, is for layers as they run inside stages.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._util import argument_checks, readable_bytes, text_table
from tfgpipe.distribution import current_strategy
from tfgpipe.inspection import compiled_copies
from tfgpipe.partition import PipelineConfig
from tfgpipe.pipelined_model import PipelinedModel, pipeline
from tfgpipe.planner.settings import (
    CHOSEN,
    Choices,
    LayerTimes,
    Setting,
    Settings,
    simplest,
)
from tfgpipe.runtime import TimingRecorder
from tfgpipe.simulation import Timeline, costs_of

# Steps whose actions are timed; the first, which allocates memory, is left out.
_TIMED_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting that was built and timed.

    Attributes:
        setting: The setting, with its plan and what was predicted.
        seconds: Measured seconds of a step, the least of some; infinity if memory ran
            out.
        timeline: Times of the actions of a step, or None if memory ran out.
    """

    setting: Setting
    seconds: float
    timeline: Timeline | None = dataclasses.field(repr=False)

    @property
    def row(self) -> tuple[str, ...]:
        """Entries of the table of a `Tuning`."""
        plan, predicted = self.setting.plan, self.setting.predicted
        settings, bubble = plan.settings, "-"
        if self.timeline is not None:
            bubble = f"{100 * self.timeline.bubble:.0f}%"
        return (
            str(settings.num_stages),
            str(settings.schedule.num_devices),
            str(settings.num_microbatches),
            settings.schedule.name,
            str(settings.remat),
            " ".join(map(str, plan.calls_per_stage)),
            f"{1e3 * predicted:,.1f}",
            f"{1e3 * self.seconds:,.1f}" if self.timeline else "out of memory",
            bubble,
            readable_bytes(max(plan.device_bytes)),
        )


_HEADER = (
    *("K", "devices", "M", "schedule", "remat", "layers"),
    *("predicted ms", "measured ms", "bubble", "memory", ""),
)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of `tfgpipe.tune`. `print` it for a table.

    Attributes:
        trials: The settings that were timed, in order.
        next_seconds: Seconds of a step that the best setting left is predicted to take;
            infinity if none is left.
        least_seconds: Lower bound on the seconds of a step in any order of the actions
            of any setting, by the corrected times.
    """

    trials: tuple[Trial, ...]
    next_seconds: float
    least_seconds: float

    @property
    def best(self) -> Trial:
        """The fastest trial."""
        return min(self.trials, key=lambda trial: trial.seconds)

    @property
    def config(self) -> PipelineConfig:
        """The fastest setting."""
        return self.best.setting.config

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `tfgpipe.pipeline` for the fastest setting."""
        default = vars(PipelineConfig(num_microbatches=1))
        return {
            name: value
            for name, value in vars(self.config).items()
            if name in CHOSEN or value != default[name]
        }

    @property
    def gap(self) -> float:
        """The most by which another order or setting may be faster, of the best."""
        return max(1 - self.least_seconds / self.best.seconds, 0.0)

    def __str__(self) -> str:
        rows = [
            (*trial.row, "best" if trial is self.best else "") for trial in self.trials
        ]
        left = "No setting is left"
        if math.isfinite(self.next_seconds):
            milliseconds = f"{1e3 * self.next_seconds:,.1f}"
            left = f"The best setting left is predicted to take {milliseconds} ms"
        table = text_table(_HEADER, rows, left=("schedule", "remat", "layers", ""))
        return (
            f"{table}\n{left}. By the corrected times at most {100 * self.gap:.1f}% "
            "better exists, in any order."
        )


def tune(
    model: keras.Model | Callable[[], keras.Model],
    batch: tuple[Any, ...],
    *,
    steps: int = 5,
    max_trials: int = 12,
    tolerance: float = 0.03,
    print_fn: Callable[[str], Any] | None = print,
    **options: Any,
) -> Tuning:
    """Finds the fastest pipeline of a model on the devices here, by training steps.

    Times each layer, predicts the step of every setting, and trains a few steps of the
    best with a copy of the model; then corrects the times by those of the stages, and
    goes on until no setting left is predicted to be faster by more than `tolerance`.
    The best is then also tried in the order of `schedule="auto"` for its stages.
    `model` itself stays as it is.

    Each trial traces a train step twice, so that all take minutes. What normalizes a
    batch, such as `BatchNormalization`, has other results with another number of
    microbatches: give `num_microbatches` then.

    Example:

    >>> model = keras.Sequential([keras.Input((64,))])
    >>> for _ in range(4):
    ...     model.add(keras.layers.Dense(64, activation="relu"))
    >>> model.compile("adam", "mse")
    >>> x = np.ones((32, 64), "float32")
    >>> tuned = tfgpipe.tune(
    ...     model, (x, x), num_stages=2, num_microbatches=[2, 4], max_trials=2,
    ...     print_fn=None,
    ... )
    >>> pipelined = tfgpipe.pipeline(model, **tuned.options)
    >>> pipelined.config == tuned.config
    True

    Args:
        model: A Functional or Sequential model that is compiled, or a pipeline of one;
            or a function that returns one, for layers without a `get_config`.
        batch: A mini-batch as a dataset for `fit` has it: `(x, y)`,
            `(x, y, sample_weight)`, or `(x,)`.
        steps: Number of steps of which the least time counts.
        max_trials: Number of settings that are tried at most.
        tolerance: Part of a step by which a prediction must be better to be tried.
        print_fn: Function that is called with a line after each trial, or None.
        **options: Fields of `tfgpipe.PipelineConfig`, such as `memory_limit`. Of
            `num_stages`, `num_microbatches`, `schedule` and `remat` also a list to
            choose from. By default these are: powers of two up to the number of
            devices, and twice as many as devices where a schedule has several stages on
            each; powers of two that divide the batch, up to eight for each device; all
            named schedules; and `"none"`, or `"auto"` where that does not fit within
            `memory_limit`.

    Raises:
        ValueError: If no setting can be run; missing memory is said in bytes. Under a
            strategy of several replicas.
        TypeError: If the model is not compiled, or an option has another name.
    """
    argument_checks.check_count("steps", steps)
    argument_checks.check_count("max_trials", max_trials)
    if current_strategy().is_distributed:
        raise ValueError(
            "Trials are on the devices of one process, without replicas. Received a "
            "call in the scope of a strategy. Tune outside of it."
        )
    choices, build = Choices.of(options, batch), compiled_copies(model)
    batch = choices.batch
    settings = Settings(choices, LayerTimes(build(), batch[0]))

    def attempt(setting: Setting, number: int) -> Trial:
        trial = _try(setting, build, batch, steps)
        if print_fn is not None:
            print_fn(_line(number, trial))
        return trial

    return _search(settings, attempt, max_trials, tolerance)


def _search(
    settings: Settings,
    attempt: Callable[[Setting, int], Trial],
    max_trials: int,
    tolerance: float,
) -> Tuning:
    """Tries settings until none left is predicted to be faster."""
    tried: dict[Any, Trial] = {}
    while True:
        left = [x for x in settings.all() if x.key not in tried]
        best = min(tried.values(), key=lambda x: x.seconds, default=None)
        worth = (1 - tolerance) * best.seconds if best else math.inf
        found = simplest(left)
        if best and (found is None or found.predicted >= worth):
            found = settings.in_best_order(best.setting)
        if found is None or found.key in tried or found.predicted >= worth:
            break
        if len(tried) == max_trials:
            break
        trial = tried[found.key] = attempt(found, len(tried) + 1)
        if trial.timeline is not None:
            settings.correct(found, costs_of(trial.timeline), trial.seconds)
    if best is None or math.isinf(best.seconds):
        raise ValueError(
            f"Memory ran out in all of {len(tried)} trials. Give the bytes that a "
            "device has as `memory_limit`, more devices, or a smaller batch."
        )
    next_seconds = min((x.predicted for x in left), default=math.inf)
    return Tuning(tuple(tried.values()), next_seconds, settings.least_seconds())


class _Clock(keras.callbacks.Callback):
    """Times steps.

    Attributes:
        seconds: Seconds of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begins a step."""
        tf.test.experimental.sync_devices()
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Ends a step."""
        tf.test.experimental.sync_devices()
        self.seconds.append(time.perf_counter() - self._start)


def _try(
    setting: Setting,
    build: Callable[[], keras.Model],
    batch: tuple[Any, ...],
    steps: int,
) -> Trial:
    """Trains some steps of a setting."""
    try:
        return _trained(
            pipeline(build(), **vars(setting.config)), setting, batch, steps
        )
    except tf.errors.ResourceExhaustedError:
        return Trial(setting, math.inf, None)
    finally:
        gc.collect()  # Layers and their functions refer to each other.


def _trained(
    model: PipelinedModel, setting: Setting, batch: tuple[Any, ...], steps: int
) -> Trial:
    """Trains some steps of a model."""
    data = tf.data.Dataset.from_tensors(batch).repeat()
    clock, recorder = _Clock(), TimingRecorder()
    quiet: Any = {"verbose": 0, "shuffle": False}
    model.fit(data, steps_per_epoch=1 + steps, **quiet, callbacks=[clock])
    model.recorder = recorder
    model.make_train_function(force=True)
    model.fit(data, steps_per_epoch=_TIMED_STEPS, **quiet)
    return Trial(setting, min(clock.seconds[1:]), recorder.timeline(model.schedule))


def _line(number: int, trial: Trial) -> str:
    """Returns a trial as a line."""
    names = ("K", "devices", "M")
    K, P, M, schedule, policy, layers, predicted, measured, *_ = trial.row
    sizes = ", ".join(f"{n}={x}" for n, x in zip(names, (K, P, M), strict=True))
    return (
        f"trial {number}: {sizes}, {schedule}, remat={policy}, layers {layers}: "
        f"predicted {predicted} ms, measured {measured} ms"
    )
