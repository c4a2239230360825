"""Replicas that are processes of their own, against one process."""

from __future__ import annotations

from pathlib import Path

import keras
import tensorflow as tf

from tests.cluster import pair
from tfgpipe.distribution import process_group


def test_two_processes_train_as_one_and_are_reached_on_loopback_alone(
    tmp_path: Path,
) -> None:
    """Also if they synchronize, and one of them traces more often."""
    pair.check_that_two_train_as_one("synchronized", tmp_path)


def test_keys_of_sums_come_of_what_is_the_same_in_all_processes() -> None:
    keys = process_group.InstanceKeys()
    first, second = keras.optimizers.SGD(), keras.optimizers.SGD()
    weights = [keras.Variable([float(i)]) for i in range(3)]
    assert keys.for_weights(first, weights) == keys.for_weights(
        first, weights
    )  # Traced twice.
    found = [*keys.for_weights(first, weights), *keys.for_weights(second, weights)]
    assert len(set(found)) == 6
    # A frozen weight shifts no other.
    assert keys.for_weights(first, weights[1:]) == found[1:3]

    def group(process: int, stage: int, *shape: int) -> int:
        """Of processes that have a device on each of two tasks."""
        tasks = range(2 * process, 2 * process + 2)
        device = f"/job:worker/replica:0/task:{tasks[stage]}/device:CPU:1"
        processes = process_group.ProcessGroup(
            size=2, index=process, tasks=tasks, device=device
        )
        specs = [tf.TensorSpec(shape, tf.float32)]
        return processes.stage_group_key(process, device, 4, specs)

    assert group(0, 0, 2, 3) == group(1, 0, 2, 3)
    assert len({group(0, 0, 2, 3), group(0, 0, 2, 4), group(0, 1, 2, 3)}) == 3
