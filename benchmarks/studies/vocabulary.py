"""A vocabulary on both of two stages makes a step 1.59 times as fast as on the last.

A vocabulary on the devices of all stages, beside one on the last.

    python -m benchmarks.studies.vocabulary
    python -m benchmarks.studies.vocabulary --published

The first trains a decoder on two logical CPU devices, a thread each: with equal blocks
in each stage and the head on the last, with the best cut of whole layers, and with
`tfgpipe.layers.SplitVocabulary`. Columns: the gain over equal blocks that a simulation
of the layers' measured times predicts, and the one of whole steps, in turns.

`--published` compares simulated steps with Yeung et al. 2024, "Balancing Pipeline
Parallelism with Vocabulary Parallelism" (arXiv 2411.05288), table 5: on A100s, with 128
microbatches, the MFU with equal blocks and with the best cut of whole layers, over that
with the vocabulary on all stages. Simulated are FLOPs alone: no transfer costs
anything, and all products run at the same rate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import tfgpipe
from benchmarks import tables
from tfgpipe import Costs, schedules
from tfgpipe._util import stage_spans
from tfgpipe.partition import best_partition

VOCABULARIES = (32768, 65536, 131072, 262144)
# GPUs: blocks, width.
SIZES = {8: (32, 3072), 16: (48, 4096), 32: (64, 5120)}
# (GPUs, length): percent MFU at each vocabulary, with equal blocks and the vocabulary
# at the ends, with the best cut of whole layers, and with the vocabulary on all stages.
PUBLISHED = {
    (8, 2048): (
        (46.16, 40.48, 33.11, 25.23),
        (46.01, 46.37, 44.22, 38.91),
        (50.42, 50.28, 49.93, 50.12),
    ),
    (8, 4096): (
        (47.05, 41.87, 35.00, 26.75),
        (46.93, 46.78, 47.44, 43.01),
        (50.98, 50.98, 50.83, 50.66),
    ),
    (16, 2048): (
        (45.66, 40.09, 32.44, 24.21),
        (45.56, 42.82, 38.65, 36.98),
        (49.02, 50.62, 50.54, 50.66),
    ),
    (16, 4096): (
        (47.56, 41.21, 33.88, 25.33),
        (47.41, 43.07, 43.15, 40.15),
        (50.93, 50.97, 50.71, 51.22),
    ),
    (32, 2048): (
        (42.81, 37.28, 28.97, 20.86),
        (43.48, 37.29, 36.32, 29.16),
        (45.85, 45.92, 45.90, 46.11),
    ),
    (32, 4096): (
        (43.68, 38.11, 30.05, 21.63),
        (44.01, 38.12, 37.87, 31.03),
        (46.41, 46.44, 46.68, 46.83),
    ),
}
NUM_MICROBATCHES = 128


def split_seconds(blocks: Sequence[float], head: float, M: int) -> float:
    """Returns the step of blocks in stages, and a head in a part on each device.

    Args:
        blocks: Seconds of the forward of each stage.
        head: Seconds of the forward of the whole head.
        M: Number of microbatches.
    """
    P = len(blocks)
    forward = [*blocks, *[head / P] * P, 0.0]
    costs = Costs(
        forward=forward,
        backward=[2 * x for x in forward],
        kept_bytes=[1.0] * P + [0.0] * (P + 1),
    )
    return order_seconds(costs, P, M, memory_limit=P + 2)  # Microbatches.


def order_seconds(costs: Costs, P: int, M: int, **options: Any) -> float:
    """Returns the least step that is found for blocks, parts of a head, and a loss."""
    line = schedules.DataFlow.line(P).sources
    flow = schedules.DataFlow((*line, *[(P - 1,)] * P, tuple(range(P, 2 * P))))
    placement = [*range(P), *range(P), P - 1]
    found = tfgpipe.best_schedule(
        costs, placement, M, flow=flow, splits_backwards=False, effort=1, **options
    )
    return found.step_time


def whole_seconds(stages: Sequence[float], M: int) -> float:
    """Returns the 1F1B step of stages with these seconds of a forward."""
    costs = Costs(forward=[*stages], backward=[2 * x for x in stages])
    order = schedules.one_f_one_b(len(stages), M)
    return tfgpipe.simulate(order, costs).timeline.step_time


def cut_seconds(layers: Sequence[float], P: int) -> list[float]:
    """Returns the seconds of the forward of each stage of the best cut of layers."""
    spans = stage_spans(best_partition(layers, num_stages=P))
    return [sum(layers[span]) for span in spans]


def published_rows() -> list[tables.Row]:
    """Returns a row for each published setting."""
    rows: list[tables.Row] = []
    for (P, s), published in PUBLISHED.items():
        num_blocks, h = SIZES[P]
        block = 24 * h * h * (1 + s / (6 * h))
        for V, equal, cut, split in zip(VOCABULARIES, *published, strict=True):
            head = 2 * h * V
            blocks = [block * num_blocks / P] * P
            best = cut_seconds([block] * num_blocks + [head], P)
            step = split_seconds(blocks, head, NUM_MICROBATCHES)
            at_ends = [*blocks[:-1], blocks[-1] + head]
            simulated = [
                step / whole_seconds(x, NUM_MICROBATCHES) for x in (at_ends, best)
            ]
            rows.append({"GPUs": P, "length": s, "vocabulary": V})
            for name, x, mfu in zip(
                ("equal", "cut"), simulated, (equal, cut), strict=True
            ):
                rows[-1] |= {
                    f"{name}, published": mfu / split,
                    f"{name}, simulated": x,
                    f"{name}, off by %": 100 * (x / (mfu / split) - 1),
                }
    return rows


def print_published() -> None:
    """Prints the table, and how many entries are within a tenth."""
    rows = published_rows()
    print(tables.draw(rows))
    off = [abs(row[f"{name}, off by %"]) for row in rows for name in ("equal", "cut")]
    print(
        f"{sum(x <= 10 for x in off)} of {len(off)} within 10%, the largest "
        f"{max(off):.1f}%, {statistics.mean(off):.1f}% in the mean."
    )


def make_models(flags: Any) -> tuple[Any, Any, Any]:
    """Returns a decoder with its head on the last stage, and with one in parts."""
    import keras

    from benchmarks.workloads import EncoderBlock

    V, D = flags.vocabulary, flags.width

    def trunk() -> tuple[Any, Any]:
        tokens = keras.Input((flags.length,), dtype="int32")
        x = keras.layers.Embedding(V, D)(tokens)
        for _ in range(flags.blocks):
            x = EncoderBlock(causal=True)(x)
        return tokens, keras.layers.LayerNormalization()(x)

    tokens, x = trunk()
    whole = keras.Model(tokens, keras.layers.Dense(V, use_bias=False)(x))
    vocabulary = tfgpipe.layers.SplitVocabulary(V, D, num_parts=2)
    tokens, x = trunk()
    targets = keras.Input((flags.length,), dtype="int32")
    split = keras.Model([tokens, targets], vocabulary.cross_entropy(x, targets))
    return whole, split, vocabulary


def measured_rows(flags: Any) -> list[tables.Row]:
    """Returns a row for each way to place the vocabulary."""
    import keras
    import numpy as np

    from benchmarks.studies.tune import in_turns, stepper

    whole, split, vocabulary = make_models(flags)
    M, devices = flags.microbatches, ["CPU:0", "CPU:1"]
    half = flags.blocks // 2
    common = {"num_microbatches": M, "remat": "none"}
    timed = {"batch_size": flags.batch, "balance": "time"}
    equal = (1 + half, flags.blocks + 2 - half)
    plan = tfgpipe.plan(whole, num_stages=2, **common, **timed)
    stages = vocabulary.stages(split, devices=devices, **timed)
    # The same models and microbatches as below, on one device.
    equal_costs, cut_costs, split_costs = (
        tfgpipe.plan(model, partition=partition, **common, **timed).costs
        for model, partition in (
            (whole, equal),
            (whole, plan.calls_per_stage),
            (split, stages["partition"]),
        )
    )
    order = schedules.one_f_one_b(2, M)
    predicted = [
        *(
            tfgpipe.simulate(order, x).timeline.step_time
            for x in (equal_costs, cut_costs)
        ),
        order_seconds(split_costs, 2, M),
    ]
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, flags.vocabulary, (flags.batch, flags.length + 1))
    x, y = drawn[:, :-1].astype("int32"), drawn[:, 1:].astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Compiled, a stage runs on one thread; else one that waits for none uses both.
    pipelined = {**common, "jit_compile": True}
    ways: dict[str, tuple[Any, Any]] = {}
    for name, partition in (
        ("equal blocks", equal),
        ("best cut", plan.calls_per_stage),
    ):
        model = tfgpipe.pipeline(
            keras.models.clone_model(whole),
            partition=partition,
            devices=devices,
            schedule="1f1b",
            **pipelined,
        )
        ways[f"{name} {list(partition)}"] = model, (x, y)
        model.compile("sgd", loss)
    model = tfgpipe.pipeline(split, **stages, **pipelined)
    model.compile("sgd", tfgpipe.tensor_parallel.OutputLoss())
    ways["all stages"] = model, ((x, y), y)
    steps = {name: stepper(model, batch) for name, (model, batch) in ways.items()}
    times = in_turns(steps, flags.rounds)
    first = next(iter(times.values()))
    return [
        {
            "vocabulary on": name,
            "predicted gain": predicted[0] / seconds,
            "measured gain": statistics.median(
                a / b for a, b in zip(first, times[name], strict=True)
            ),
            "ms": 1e3 * statistics.median(times[name]),
        }
        for name, seconds in zip(times, predicted, strict=True)
    ]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    flags = parser.parse_args()
    if flags.published:
        print_published()
        return
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tfgpipe.make_logical_cpus(2)
    print(tables.draw(measured_rows(flags)))


if __name__ == "__main__":
    main()
