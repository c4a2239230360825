"""Times the actions of a real step, by operations that read the host's clock.

Each action gets two operations that read the clock of the host, one that all its inputs
come before and one that comes after all its results:

    what it reads ─▶ start ─▶ action ─▶ results ─▶ end ─▶ the device's next action

A timed step runs in the same order, and takes two clock readings per action longer,
some microseconds each; one that is not timed holds none of this. On a device that works
asynchronously, such as a GPU, the end waits until one element of the results is on
the host, and a start that was read too early is moved to the end of the action before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfgpipe.devices import device_type, host_device, ordering_token
from tfgpipe.schedules import Action, Schedule, kinds
from tfgpipe.simulation import Span, Timeline
from tfgpipe.stage import NamedTensors


class StepTimer:
    """The clock readings of one step, while it is being emitted.

    Attributes:
        actions: The actions that were timed, in the order of emission, each with True
            if it recomputes.
    """

    def __init__(self) -> None:
        self.actions: dict[Action, bool] = {}
        self._readings: list[tf.Tensor] = []
        self._tokens: dict[tuple[str, str], tf.Tensor] = {}

    def start(
        self, action: Action, device: str, others: Sequence[str], feeds: NamedTensors
    ) -> tuple[NamedTensors, tf.Tensor]:
        """Reads the clock before an action, once its inputs are there.

        Args:
            action: The action.
            device: Its device.
            others: The devices of its other shards.
            feeds: The tensors that it reads, on any device.

        Returns:
            What it is to read, and the reading.
        """
        devices, here = (device, *others), {}
        for name, tensor in feeds.items():
            # Copies are there when what they are of has arrived.
            with tf.device(tensor.device if tensor.device in devices else device):
                here[name] = tf.identity(tensor)
        with tf.control_dependencies(list(here.values())):
            return here, self._begun(action, self._token(action, device))

    def end(
        self,
        action: Action,
        device: str,
        start: tf.Tensor,
        results: Sequence[tf.Tensor],
        *,
        recomputes: bool,
    ) -> tf.Tensor:
        """Reads the clock after an action, and returns the reading.

        Args:
            action: The action.
            device: Its device.
            start: The reading before it.
            results: Its outputs.
            recomputes: True if it began with another forward.
        """
        if device_type(device) != "CPU":
            some = [tf.reshape(x, [-1])[:1] for x in results if x.dtype != tf.variant]
            with tf.device(host_device(device)):
                results = [tf.identity(x) for x in some]
        with tf.control_dependencies(results):
            end = self._ended(action, self._token(action, device))
        self.actions[action] = recomputes
        self._readings += [start, end]
        return end

    def readings(self) -> tf.Tensor:
        """Returns start and end of all actions in seconds, `[actions, 2]`."""
        return tf.reshape(tf.stack(self._readings), [-1, 2])

    def _begun(self, action: Action, token: tf.Tensor) -> tf.Tensor:
        """Returns a reading before an action, which names its device's resource."""
        del action
        return _read_clock(token)

    def _ended(self, action: Action, token: tf.Tensor) -> tf.Tensor:
        """Returns a reading after an action, which names its device's resource."""
        del action
        return _read_clock(token)

    def _token(self, action: Action, device: str) -> tf.Tensor:
        """Returns a resource that orders the readings of a device, or of its copies.

        TensorFlow runs the operations of a function that have effects, as reading the
        clock is one, in the order in which they were made, on whatever device, unless
        they name a resource: then those that name the same. Without, every action would
        wait for the one before it on another device.
        """
        name = f"clock of {action.describe()}" if action.kind.is_copy else "clock"
        if (name, device) not in self._tokens:
            self._tokens[name, device] = ordering_token(name)
        return self._tokens[name, device]


@tf.function(autograph=False)
def _read_clock(token: tf.Tensor) -> tf.Tensor:
    """Returns the time in seconds, and names a resource."""
    del token
    return tf.timestamp()


class Recorder:
    """Base class of recorders, which a model calls when it traces a step."""

    def step(self) -> StepTimer:
        """Returns a timer for a step that is traced."""
        return StepTimer()

    def record(self, timer: StepTimer, replica: int) -> None:
        """Keeps what a timer has read, whenever the step runs."""

    def record_gradients(
        self, k: int, gradients: Mapping[str, tf.Tensor | None], scale: tf.Tensor
    ) -> None:
        """Keeps gradients of stage k, of a loss times `scale`, by weights' paths."""


class TimingRecorder(Recorder):
    """Keeps the readings of the last step, of each replica in this process.

    A step may be traced several times: one of fewer rows has other actions. So what is
    kept of a step says which trace it is of.
    """

    def __init__(self) -> None:
        self._traced: list[dict[Action, bool]] = []
        # By replica, which trace the last step was of, and its readings.
        self._latest: dict[int, tuple[tf.Variable, tf.Variable]] = {}

    def record(self, timer: StepTimer, replica: int) -> None:
        """Keeps the readings of a step, whenever it runs."""
        if replica not in self._latest:
            with tf.init_scope(), tf.device("CPU:0"):
                none = tf.zeros([0, 2], tf.float64)
                self._latest[replica] = (
                    tf.Variable(0, trainable=False, dtype=tf.int64),
                    tf.Variable(none, trainable=False, shape=[None, 2]),
                )
        if timer.actions not in self._traced:
            self._traced.append(timer.actions)
        trace, readings = self._latest[replica]
        trace.assign(self._traced.index(timer.actions))
        readings.assign(timer.readings())

    def timeline(self, schedule: Schedule) -> Timeline:
        """Returns the last step of the first replica in this process.

        Raises:
            RuntimeError: If there has been none.
        """
        if not self._latest:
            raise RuntimeError("No step has been timed yet. Train one.")
        trace, readings = self._latest[min(self._latest)]
        actions = self._traced[int(trace.numpy())]
        return make_timeline(schedule, actions, readings.numpy())


def make_timeline(
    schedule: Schedule, actions: Mapping[Action, bool], readings: np.ndarray
) -> Timeline:
    """Returns readings as a timeline that starts at zero.

    What an action recomputes is part of its function, and is taken to last as long as
    the forward that it repeats.

    Args:
        schedule: The schedule that the devices followed.
        actions: The actions that were timed, each with True if it recomputes.
        readings: Start and end of each, `[actions, 2]`, in seconds.
    """
    num_microbatches = 1 + max(action.microbatch for action in actions)
    schedule = schedule.first_microbatches(num_microbatches)
    times = dict(zip(actions, readings - readings.min(), strict=True))
    spans = []
    for device, order in enumerate(schedule.orders):
        free = 0.0
        for action in order:
            start, end = map(float, times[action])
            if not action.kind.is_copy:
                start = max(start, free)
                free = end = max(start, end)
            spent = (action.stage, action.microbatch, device)
            if actions[action]:
                forward = times[action.of(kinds.FORWARD)]
                middle = min(start + float(forward[1] - forward[0]), end)
                spans.append(Span(kinds.RECOMPUTE, *spent, start, middle))
                start = middle
            spans.append(Span(action.kind, *spent, start, end))
    return Timeline(schedule, tuple(spans))
