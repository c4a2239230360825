"""Two forms of the product in a dense layer's gradient, on one core.

    python -m benchmarks.products

`dy @ W^T` beside `(W @ dy^T)^T`, between which `tfgpipe.products` chooses: median
milliseconds, and how much faster the second is.
"""

from __future__ import annotations

import os
import statistics
import time

from benchmarks import tables

ROWS = (32, 64, 128, 256, 512, 1024)
WEIGHTS = ((1024, 1024), (1024, 256), (256, 1024), (256, 256))


def main() -> None:
    """Measures both forms and prints a table."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    forms = {
        "dy W^T": lambda dy, w: tf.matmul(dy, w, transpose_b=True),
        "(W dy^T)^T": lambda dy, w: tf.transpose(tf.matmul(w, dy, transpose_b=True)),
    }
    rows = []
    for shape in WEIGHTS:
        for number in ROWS:
            dy = tf.random.normal((number, shape[1]))
            # As many as do not fit into a cache, as in a model.
            some = range(max(4, 2**23 // (shape[0] * shape[1])))
            weights = [tf.random.normal(shape) for _ in some]
            seconds: dict[str, list[float]] = {name: [] for name in forms}
            functions = {
                name: tf.function(
                    lambda dy, form=form, weights=weights: [
                        form(dy, w) for w in weights
                    ]
                )
                for name, form in forms.items()
            }
            for turn in range(8):
                for name, function in functions.items():
                    start = time.perf_counter()
                    function(dy)
                    if turn:
                        seconds[name].append(time.perf_counter() - start)
            medians = {
                name: 1e3 * statistics.median(some) / len(weights)
                for name, some in seconds.items()
            }
            first, second = medians.values()
            rows.append(
                {"rows": number, "W": shape, **medians, "faster": first / second}
            )
    print(tables.draw(rows))


if __name__ == "__main__":
    main()
