"""Products of few rows are up to 3.6 times as fast in the form that is chosen.

The three matrix products of a dense layer, plain and by `tfgpipe.graph.passes`.

    python -m benchmarks.studies.matmul

For a microbatch of some rows and weights W: `x W` of the forward, `dy W^T` and `x^T dy`
of the backward, on one core. Median milliseconds of both forms where they differ, and
how much faster the second is. Padded copies of weights are computed for each product
here; in a pipeline they are hoisted.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from benchmarks import tables

ROWS = (32, 64, 128, 256, 512, 1024)
WEIGHTS = ((1024, 1024), (1024, 256), (256, 1024), (256, 256))
# Which of x `[rows, inputs]`, W and dy `[rows, outputs]` are multiplied, and how.
PRODUCTS: dict[str, tuple[int, int, dict[str, bool]]] = {
    "x W": (0, 1, {}),
    "dy W^T": (2, 1, {"transpose_b": True}),
    "x^T dy": (0, 2, {"transpose_a": True}),
}


def main() -> None:
    """Measures both forms and prints a table."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    import tensorflow as tf

    from tfgpipe.graph import passes

    tf.config.threading.set_intra_op_parallelism_threads(1)
    rows = []
    for name, (left, right, transposed) in PRODUCTS.items():
        for shape in WEIGHTS:
            for number in ROWS:
                shapes = ((number, shape[0]), shape, (number, shape[1]))
                # As many as do not fit into a cache, as in a model.
                some = range(max(4, 2**23 // (shape[0] * shape[1])))
                given = [
                    tuple(tf.random.normal(shapes[i]) for i in (left, right))
                    for _ in some
                ]
                seconds = _compare(
                    {
                        "plain": lambda a, b, how=transposed: tf.matmul(a, b, **how),
                        "chosen": lambda a, b, how=transposed: passes.multiply(
                            a, b, **how
                        ),
                    },
                    given,
                )
                if seconds is None:
                    continue
                medians = {
                    form: 1e3 * statistics.median(some) / len(given)
                    for form, some in seconds.items()
                }
                faster = medians["plain"] / medians["chosen"]
                sizes = {"product": name, "rows": number, "W": shape}
                rows.append({**sizes, **medians, "faster": faster})
                print(tables.draw(rows[-1:]), flush=True)
    print(tables.draw(rows))


def _compare(forms: dict[str, Any], given: list[Any]) -> dict[str, list[float]] | None:
    """Returns the seconds of each form in turns, or None if the forms are the same."""
    import tensorflow as tf

    functions = {
        name: tf.function(lambda given, form=form: [form(a, b) for a, b in given])
        for name, form in forms.items()
    }
    sizes = {
        len(function.get_concrete_function(given).graph.get_operations())
        for function in functions.values()
    }
    if len(sizes) == 1:
        return None
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(8):
        for name, function in functions.items():
            start = time.perf_counter()
            function(given)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
