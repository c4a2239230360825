"""Batches that are a function of their step alone: which rows, in which order.

All batches together are one line of examples, epoch after epoch, and step s has the
places `s * batch_size` to `(s + 1) * batch_size - 1` of it. An epoch is a permutation
of all examples, so each comes once in it; a batch may be in two epochs.

    place      0 1 2 3 4 | 5 6 7 8 9 | 10 ...       5 examples, batches of 3
    example    3 0 4 1 2 | 1 4 2 0 3 | 2  ...
    step       0 0 0 1 1 | 1 2 2 2 3 | 3  ...

The example at a place is computed by Grain, from the seed and the place, without a
table. So a run that was killed goes on with the batches it would have had, batches are
made ahead by several threads or processes, and each host makes the rows that it trains
on.
"""

from __future__ import annotations

import abc
import atexit
import dataclasses
import logging
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tfgpipe_trainer.hyperparams import HyperparameterError

if TYPE_CHECKING:
    import tensorflow as tf

# How long Python's end waits for a batch that a process makes.
_CLOSING_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class HostShard:
    """The rows of every batch that one of several hosts reads; by default all rows.

    Attributes:
        index: The host's index, from 0.
        num_hosts: Number of hosts; each reads the same number of rows.
    """

    index: int = 0
    num_hosts: int = 1

    def rows(self, batch_size: int) -> slice:
        """Returns the slice of a batch's rows that is read here.

        Raises:
            HyperparameterError: If the hosts cannot share a batch evenly.
        """
        if batch_size % self.num_hosts:
            raise HyperparameterError(
                f"training.batch_size: expected a multiple of {self.num_hosts}, the "
                f"number of hosts that read it; received {batch_size}."
            )
        size = batch_size // self.num_hosts
        return slice(self.index * size, (self.index + 1) * size)


class Examples(abc.ABC):
    """Examples with random access."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def order(self, seed: int) -> Any:
        """Returns the numbers of examples in the order of training, without end."""
        grain = _import_grain()
        return grain.MapDataset.range(len(self)).seed(seed).shuffle().repeat()

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> Any:
        """Returns examples as a batch: a structure of arrays, `[num_indices, ...]`."""


class ArrayExamples(Examples):
    """Rows of arrays in memory.

    Args:
        arrays: A structure of arrays, such as `(x, y)`, `[num_examples, ...]` each.

    Raises:
        HyperparameterError: If they have no rows, or not the same number of them.
    """

    def __init__(self, arrays: Any) -> None:
        import keras

        self._arrays = keras.tree.map_structure(_standard_float, arrays)
        shapes = [np.shape(each) for each in keras.tree.flatten(self._arrays)]
        sizes = {shape[0] if shape else 0 for shape in shapes}
        if len(sizes) != 1 or 0 in sizes:
            raise HyperparameterError(
                "examples: expected arrays with the same number of rows, at least one; "
                f"received arrays of the shapes {', '.join(map(str, shapes))}."
            )
        (self._size,) = sizes

    def __len__(self) -> int:
        return self._size

    def take(self, indices: np.ndarray) -> Any:
        """Returns the rows of these indices."""
        import keras

        return keras.tree.map_structure(lambda array: array[indices], self._arrays)


class ItemExamples(Examples):
    """Items of a sequence, such as a list or a dataset class of the user's.

    Args:
        items: Has `len(items)` and `items[i]`, one example: a structure of arrays and
            numbers that has the same shapes for each i.
    """

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def take(self, indices: np.ndarray) -> Any:
        """Returns the items of these indices, stacked.

        Raises:
            HyperparameterError: If they have different shapes.
        """
        import keras

        items = [self._items[i] for i in indices.tolist()]
        try:
            found = keras.tree.map_structure(lambda *parts: np.stack(parts), *items)
        except ValueError as error:
            raise HyperparameterError(
                "examples: expected examples of one structure and one shape each; "
                f"received several: {error}. Give arrays as a tuple, such as (x, y)."
            ) from None
        return keras.tree.map_structure(_standard_float, found)


class Mixture(Examples):
    """Examples of several sources, of each the same share of any stretch of training.

    Each source has epochs of its own, in which each of its examples comes once. For
    validation it is all examples of the first source, then of the second, and so on.

    Args:
        sources: Arrays, sequences of examples, or `Examples`, as in `as_examples`.
        weights: Shares of training examples, positive numbers.

    Raises:
        HyperparameterError: If there are not as many weights, or one is not positive.
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float]) -> None:
        if len(sources) != len(weights) or min(weights, default=0) <= 0:
            raise HyperparameterError(
                "examples: expected a positive weight for each source of a mixture; "
                f"received {len(sources)} sources and the weights {list(weights)}."
            )
        self._sources = [as_examples(each) for each in sources]
        self._weights = weights
        self._ends = np.cumsum([len(each) for each in self._sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def order(self, seed: int) -> Any:
        """Returns the numbers of examples, those of each source by its share."""
        grain = _import_grain()
        starts = [0, *self._ends[:-1].tolist()]
        parts = [
            grain.MapDataset.range(start, int(end)).seed(seed).shuffle().repeat()
            for start, end in zip(starts, self._ends, strict=True)
        ]
        return grain.MapDataset.mix(parts, weights=list(self._weights))

    def take(self, indices: np.ndarray) -> Any:
        """Returns examples as a batch."""
        import keras

        which = np.searchsorted(self._ends, indices, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        there = np.unique(which)
        taken = [
            self._sources[k].take(indices[which == k] - starts[k])
            for k in there.tolist()
        ]
        # Rows of each source in turn, then back in their order.
        back = np.argsort(np.argsort(which, kind="stable"), kind="stable")
        return keras.tree.map_structure(
            lambda *arrays: np.concatenate(arrays)[back], *taken
        )


def as_examples(found: Any) -> Examples:
    """Returns an experiment's examples with random access.

    Args:
        found: Arrays in a tuple or dict, a sequence of examples, or `Examples`.

    Raises:
        HyperparameterError: If it is none of these, or empty.
    """
    if isinstance(found, Examples):
        return found
    if isinstance(found, tuple | dict | np.ndarray):
        return ArrayExamples(found)
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise HyperparameterError(
            "examples: expected arrays such as (x, y), a tf.data.Dataset, or a "
            "sequence with len(items) and items[i]; received a "
            f"{type(found).__name__}."
        )
    if not len(found):
        raise HyperparameterError("examples: expected at least one; received none.")
    return ItemExamples(found)


def training_batches(
    examples: Examples,
    *,
    batch_size: int,
    steps: range,
    seed: int,
    shard: HostShard | None = None,
    num_workers: int = 0,
    transform: Callable[[Any, int, slice], Any] | None = None,
) -> tf.data.Dataset:
    """Returns one batch for each step, each example once in an epoch.

    Args:
        examples: The examples to draw from.
        batch_size: Rows of the batch of all hosts.
        steps: The steps.
        seed: Seed of the order.
        shard: Rows of each batch that are read here. Defaults to all.
        num_workers: Processes that make batches; 0 for threads of this one.
        transform: Returns a batch changed, given the batch, its step, and its rows.
    """
    import keras

    rows = (shard or HostShard()).rows(batch_size)
    order = examples.order(seed)

    def batch(step: int) -> Any:
        places = range(step * batch_size + rows.start, step * batch_size + rows.stop)
        taken = examples.take(np.array([order[place] for place in places]))
        if transform is None:
            return taken
        changed = transform(taken, step, rows)
        if not all(hasattr(each, "dtype") for each in keras.tree.flatten(changed)):
            raise HyperparameterError(
                "transform: expected it to return a batch, arrays in the structure of "
                f"examples, such as (x, y); received {changed!r}."
            )
        return changed

    return from_function(batch, steps, num_workers=num_workers)


def validation_batches(
    examples: Examples, *, batch_size: int, num_batches: int | None
) -> tf.data.Dataset:
    """Returns all examples, or as many batches, spread evenly over all of them.

    The last batch may be smaller.
    """
    indices = validation_indices(
        len(examples), batch_size=batch_size, num_batches=num_batches
    )
    return from_function(
        lambda i: examples.take(indices[i]), range(len(indices)), any_size=True
    )


def validation_indices(
    num_examples: int, *, batch_size: int, num_batches: int | None
) -> list[np.ndarray]:
    """Returns the indices of the examples in each validation batch.

    >>> [x.tolist() for x in validation_indices(9, batch_size=2, num_batches=2)]
    [[0, 2], [5, 8]]
    """
    count = num_examples
    if num_batches is not None:
        count = min(count, batch_size * num_batches)
    indices = np.linspace(0, num_examples - 1, count).astype(np.int64)
    return [indices[i : i + batch_size] for i in range(0, count, batch_size)]


def from_function(
    make: Callable[[int], Any],
    steps: range,
    *,
    num_workers: int = 0,
    any_size: bool = False,
) -> tf.data.Dataset:
    """Returns the batches that a function makes of each step, made ahead of time.

    Args:
        make: Returns a batch, a structure of arrays. It is called in threads, or in
            processes, to which it is pickled.
        steps: The steps.
        num_workers: Processes that make batches; 0 for threads of this one.
        any_size: True if batches differ in their number of rows.
    """
    import keras
    import tensorflow as tf

    grain = _import_grain()

    def spec(array: np.ndarray) -> tf.TensorSpec:
        shape = np.shape(array)
        return tf.TensorSpec([None, *shape[1:]] if any_size else shape, array.dtype)

    def check(batch: Any) -> Any:
        shapes = [np.shape(each) for each in keras.tree.flatten(batch)]
        wanted = [tuple(each.shape) for each in keras.tree.flatten(specs)]
        if len(shapes) != len(wanted) or not all(
            map(tf.TensorShape.is_compatible_with, map(tf.TensorShape, wanted), shapes)
        ):
            raise HyperparameterError(
                "examples: expected batches of arrays of the same shapes, after "
                f"`transform` as well; received {shapes} after {wanted}."
            )
        return batch

    ahead = grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)
    batches = grain.MapDataset.range(steps.start, steps.stop).map(make)
    made = batches.to_iter_dataset(ahead)
    if num_workers:
        options = grain.MultiprocessingOptions(num_workers=num_workers)
        made = made.mp_prefetch(options, worker_init_fn=_start_worker)
    specs = keras.tree.map_structure(spec, make(steps.start))
    ends = _until_exit if num_workers else iter
    dataset = tf.data.Dataset.from_generator(
        lambda: map(check, ends(iter(made))), output_signature=specs
    )
    size = tf.data.experimental.assert_cardinality(len(steps))
    return dataset.apply(size).prefetch(tf.data.AUTOTUNE)


def map_steps(make: Callable[[tf.Tensor], Any], steps: range) -> tf.data.Dataset:
    """Returns the batches that TensorFlow operations make of each step, in order."""
    import tensorflow as tf

    dataset = tf.data.Dataset.range(steps.start, steps.stop)
    return dataset.map(
        make, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    ).prefetch(tf.data.AUTOTUNE)


def draw_rows(
    step: tf.Tensor, *, batch_size: int, below: int, seed: int, shard: HostShard | None
) -> tf.Tensor:
    """Returns a number from 0 for each row of a step that is read here, of type int64.

    Args:
        step: The step.
        batch_size: Rows of the batch of all hosts.
        below: Upper bound of the numbers, exclusive.
        seed: Seed of the draws.
        shard: The host's rows: what they get does not depend on the number of hosts.
    """
    import tensorflow as tf

    drawn = tf.random.stateless_uniform(
        [batch_size],
        seed=tf.stack([tf.constant(seed, tf.int64), step]),
        maxval=below,
        dtype=tf.int64,
        alg="philox",
    )
    return drawn[(shard or HostShard()).rows(batch_size)]


def batches_of_dataset(
    dataset: tf.data.Dataset,
    *,
    batch_size: int,
    steps: range,
    shard: HostShard | None = None,
) -> tf.data.Dataset:
    """Returns one batch for each step of a dataset of examples, repeated as needed.

    The steps before the first are read and skipped, so that a run that goes on has the
    batches it would have had if the dataset gives the same examples each time.

    Args:
        dataset: Single examples, not batches.
        batch_size: Rows of the batch of all hosts.
        steps: The steps.
        shard: Rows of each batch that are kept here. Defaults to all.
    """
    import keras

    rows = (shard or HostShard()).rows(batch_size)
    batched = dataset.repeat().batch(batch_size, drop_remainder=True)
    kept = batched.skip(steps.start).take(len(steps))
    if rows == slice(0, batch_size):
        return kept.prefetch(2)
    return kept.map(
        lambda *batch: keras.tree.map_structure(
            lambda x: x[rows], batch if len(batch) > 1 else batch[0]
        )
    ).prefetch(2)


def record_error(error: Exception) -> HyperparameterError | None:
    """Returns the error about examples that an error of TensorFlow repeats, if any.

    What a dataset's function raises comes out of `fit` as an error of TensorFlow, which
    has the words and a traceback in its message.
    """
    pattern = r"HyperparameterError: ((?:data\.\w+|examples): .*?)\n*Traceback"
    found = re.search(pattern, str(error), re.DOTALL)
    return HyperparameterError(found[1]) if found else None


def _until_exit(batches: Any) -> Iterator[Any]:
    """Yields the batches of Grain's processes, which end before Python does.

    By itself Grain ends them at Python's end, also while a thread of TensorFlow reaches
    the last batch and does so too, which it is not made for.
    """
    import keras

    mutex = threading.Lock()
    is_over = False

    def close() -> None:
        nonlocal is_over
        is_over = True
        # A batch may take long: then it is left to Grain.
        if mutex.acquire(timeout=_CLOSING_SECONDS):
            batches.close()
            mutex.release()

    atexit.register(close)
    try:
        while True:
            with mutex:
                if is_over:
                    return
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            # TensorFlow may keep what it is given, and the shared memory that these are
            # in is freed with the last reference.
            batch = keras.tree.map_structure(np.array, batch)
            yield batch
    finally:
        if not is_over:
            close()
        atexit.unregister(close)


def _start_worker(index: int, count: int) -> None:
    """Ends a process that makes batches with its parent, also by `kill -9`."""
    del index, count
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # The parent has said it.
    parent = multiprocessing.parent_process()
    assert parent is not None  # This is a worker.

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True, name="parent watch").start()


def _import_grain() -> ModuleType:
    """Returns Grain, which warns that JAX is absent, and does without it.

    Raises:
        HyperparameterError: If it is not installed.
    """
    log = logging.getLogger("absl")
    log.addFilter(_is_not_about_jax)
    try:
        import grain
    except ImportError:
        raise HyperparameterError(
            "params: expected Grain, which draws and reads examples; received an "
            "environment without. `pip install grain` brings it."
        ) from None
    finally:
        log.removeFilter(_is_not_about_jax)
    return grain


def _is_not_about_jax(record: logging.LogRecord) -> bool:
    return "jax profiler" not in record.getMessage()


def _standard_float(array: Any) -> np.ndarray:
    """Returns an array; float64 becomes `keras.config.floatx()`, as in Keras.

    Raises:
        HyperparameterError: If it holds objects of Python, such as None.
    """
    import keras

    array = np.asarray(array)
    if array.dtype == object:
        raise HyperparameterError(
            "examples: expected arrays of numbers; received one of Python objects, "
            f"such as {next((each for each in array.flat), None)!r}."
        )
    if array.dtype == np.float64:
        return array.astype(keras.config.floatx())
    return array
