"""Speed-up of a pipeline over the same layers on one core, and its bound.

    python -m benchmarks.pipeline --workload=transformer --microbatches=2,4,8,16

The baseline is the plain `keras.Sequential` on one core, the candidate the same layers
in a `PipelinedLayer` on K cores, one per device. Each has its own process; they
alternate step by step, from the same weights on the same data, and every loss must
agree. Medians are over `--steps` steps after `--warmup` untimed ones.

Operations of one stage run one after another (`--executor=serial`), as with one core
per device: TensorFlow would otherwise run them in parallel on the cores of stages that
wait. `--microbatches=1` is the control: a pipeline of one microbatch gains nothing.

Columns: milliseconds a step of either side, median and least; `speed-up`, the ratio of
medians; `paired`, the median of the ratios of neighbouring steps, which other load on
the machine affects less; the bound, and how much of it the ratio of medians reaches;
`CPU`, the candidate's CPU time over the baseline's, which shows work that the pipeline
adds, without waiting; `stolen`, how many of the candidate's cores other load on the
machine took. With more than 0.1 stolen, measure again when the machine is quieter.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Literal, get_args

from benchmarks import tables
from benchmarks.worker import Remat, Side, Worker

# Losses of either side differ by float32 rounding, summed in another order.
TOLERANCE = 1e-4
REMATS = get_args(Remat)


def bound(*, num_stages: int, num_microbatches: int, remat: Remat = "none") -> float:
    """Returns the best speed-up over one device that GPipe's schedule allows.

    With one unit of time for the forward of a stage on a microbatch and two for its
    backward, one device needs 3 K M. The pipeline's forwards take M + K - 1 and its
    backwards twice that, plus what is recomputed.

    >>> bound(num_stages=2, num_microbatches=8)
    1.7777777777777777
    >>> bound(num_stages=2, num_microbatches=8, remat="stage")
    1.3333333333333333

    Args:
        num_stages: K.
        num_microbatches: M.
        remat: `"stage"` recomputes every forward once, `"layer"` twice,
            `"except_last"` once but for the last microbatch, `"products"` and `"auto"`
            what is not known here.
    """
    slots = num_microbatches + num_stages - 1
    recomputed = {
        "none": 0,
        "stage": slots,
        "layer": 2 * slots,
        "products": 0,
        "auto": 0,
        # The last microbatch's backward is the first, and waits for nothing.
        "except_last": slots - 1 if num_microbatches > 1 else 0,
    }
    return 3 * num_stages * num_microbatches / (3 * slots + recomputed[remat])


def compare(plain: Worker, pipelined: Worker, *, steps: int, warmup: int) -> tables.Row:
    """Trains both sides in turns and returns what they took.

    Raises:
        ArithmeticError: If the losses of a step differ by more than `TOLERANCE`.
    """
    plain.reset()
    pairs = [(plain.step(), pipelined.step()) for _ in range(warmup + steps)]
    difference = max(abs(a.loss - b.loss) / abs(a.loss) for a, b in pairs)
    if not difference <= TOLERANCE:
        losses = [(a.loss, b.loss) for a, b in pairs]
        raise ArithmeticError(
            f"{pipelined.side} must train as the plain model does, to {TOLERANCE}. "
            f"Received losses (plain, pipelined): {losses}."
        )
    side = pipelined.side
    timed = pairs[warmup:]
    best = bound(
        num_stages=side.num_stages or 1,
        num_microbatches=side.num_microbatches,
        remat=side.remat,
    )
    plain_seconds = statistics.median(a.seconds for a, _ in timed)
    pipelined_seconds = statistics.median(b.seconds for _, b in timed)
    speed_up = plain_seconds / pipelined_seconds
    cpu = [b.cpu_seconds / a.cpu_seconds for a, b in timed]
    return {
        "remat": side.remat,
        "K": side.num_stages,
        "M": side.num_microbatches,
        "one core ms": 1e3 * plain_seconds,
        "least one core": 1e3 * min(a.seconds for a, _ in timed),
        "pipelined ms": 1e3 * pipelined_seconds,
        "least pipelined": 1e3 * min(b.seconds for _, b in timed),
        "speed-up": speed_up,
        "paired": statistics.median(a.seconds / b.seconds for a, b in timed),
        "bound": best,
        "of bound": speed_up / best,
        "CPU": statistics.median(cpu),
        "stolen": statistics.mean(b.stolen_seconds / b.seconds for _, b in timed),
        "loss differs": difference,
    }


def main() -> None:
    """Runs every combination of `--remat` and `--microbatches`."""
    flags = _parse()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < flags.stages:
        raise SystemExit(
            f"{flags.stages} stages on one core each need {flags.stages} cores. "
            f"Received {len(cores)}. Use --stages={len(cores)} or fewer."
        )
    sizes = {"num_layers": flags.layers} if flags.layers else {}
    choices: dict[str, Literal["auto", False] | None] = {"off": False, "auto": "auto"}
    jit_compile = choices.get(flags.jit_compile)
    rows = []
    plain_side = Side(
        workload=flags.workload,
        sizes=sizes,
        jit_compile=jit_compile,
        executor=flags.executor,
        cores=(cores[0],),
    )
    with Worker(plain_side) as plain:
        for remat in flags.remat:
            for num_microbatches in flags.microbatches:
                side = Side(
                    workload=flags.workload,
                    sizes=sizes,
                    num_stages=flags.stages,
                    num_microbatches=num_microbatches,
                    remat=remat,
                    jit_compile=jit_compile,
                    executor=flags.executor,
                    cores=tuple(cores[: flags.stages]),
                )
                with Worker(side) as pipelined:
                    row = compare(
                        plain, pipelined, steps=flags.steps, warmup=flags.warmup
                    )
                rows.append({"workload": flags.workload, **row})
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compares a pipeline with the same layers on one core."
    )
    parser.add_argument(
        "--workload", choices=("mlp", "transformer"), default="transformer"
    )
    parser.add_argument("--stages", type=int, default=2, help="K, one core each")
    parser.add_argument(
        "--microbatches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[2, 4, 8, 16],
        help="values of M, with commas",
    )
    parser.add_argument(
        "--remat",
        type=lambda text: text.split(","),
        default=["none", "stage"],
        help=f"with commas, of {', '.join(REMATS)}",
    )
    parser.add_argument("--layers", type=int, help="default: the workload's own")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps first")
    parser.add_argument(
        "--jit_compile",
        choices=("off", "auto"),
        help="XLA: none, or where Keras and PipelinedLayer choose it by themselves; "
        "without the flag none of the plain model",
    )
    parser.add_argument(
        "--executor",
        choices=("serial", "parallel"),
        default="serial",
        help="whether operations of one stage may run side by side",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
