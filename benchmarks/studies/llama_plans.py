"""Planned, Llama 70B has 798 tokens/s on each of 64 H100s, where 867 are published.

Plans for Llama 3 on H100s, beside configurations that NVIDIA publishes.

    python -m benchmarks.studies.llama_plans

Workloads of the sizes in table 3 of Grattafiori et al. 2024: grouped queries, gated
perceptrons, attention that saves no scores, 8,192 positions, bfloat16, Adam. The first
row of each model and number of GPUs is the fastest plan of all schedules; the second
is the published layout, D x K x T with v chunks a device, as the planner estimates it;
the last two have no pipeline, but weights in slices over D replicas, gathered for v
stages in turn, with T shards and with sequences in T parts, as a published one.
Columns: seconds a step, tokens a second on a GPU, GiB of the fullest GPU; published are
tokens a second of the second in FP8, whose products take half as long, and of the last
in bfloat16.

Five minutes; `--models=8B` for one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from benchmarks import tables
from tfgpipe import planner, remat, schedules

LENGTH = 8192


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on GPUs.

    Attributes:
        model: Its name.
        num_gpus: Number of GPUs.
        batch_size: Sequences of a step.
        layout: D, K, T and v of NVIDIA's, of which microbatches are single sequences.
        published: Tokens a second on a GPU there, in FP8.
        slices: D, T, v and M of weights in slices.
        published_of_slices: Tokens a second on a GPU, in bfloat16.
    """

    model: str
    num_gpus: int
    batch_size: int
    layout: tuple[int, int, int, int] | None = None
    published: float | None = None
    slices: tuple[int, int, int, int] | None = None
    published_of_slices: float | None = None


# Megatron-LM, `examples/llama/README.md`; slices: Megatron-Bridge's archive.
CASES = (
    Case("8B", 64, 512),
    Case("8B", 1024, 2048),
    Case("70B", 64, 128, (2, 8, 4, 5), 1621, (32, 2, 32, 2), 867),
    Case("70B", 1024, 2048),
)
# Layers, width, of the perceptron, heads.
SIZES = {
    "8B": (32, 4096, 14336, 32),
    "70B": (80, 8192, 28672, 64),
    "405B": (126, 16384, 53248, 128),
}


def workload(name: str, **other: Any) -> planner.Workload:
    """Returns a model.

    Args:
        name: Its name.
        **other: Arguments of `planner.transformer` that it has not.
    """
    num_layers, width, mlp_width, num_heads = SIZES[name]
    return planner.transformer(
        name=name,
        num_layers=num_layers,
        width=width,
        mlp_width=mlp_width,
        num_heads=num_heads,
        length=LENGTH,
        vocabulary=128_256,
        dtype="bfloat16",
        **{"num_key_value_heads": 8, "gated": True, "flash": True, **other},
    )


def row(case: Case, estimate: planner.Estimate, published: float | None) -> tables.Row:
    """Returns a row."""
    seconds = estimate.time.total
    return {
        "model": case.model,
        "GPUs": case.num_gpus,
        "batch": case.batch_size,
        "configuration": str(estimate.config),
        "s": seconds,
        "tokens/s/GPU": case.batch_size * LENGTH / seconds / case.num_gpus,
        "GiB": estimate.fullest.total / 2**30,
        "published": published,
    }


def rows(case: Case) -> list[tables.Row]:
    """Returns the rows of a case."""
    model, device = workload(case.model), planner.TABLE["h100-80g"]
    found = planner.search(
        model, device=device, num_devices=case.num_gpus, batch_size=case.batch_size
    )
    results = [row(case, best, None) for best in found.best[:1]]
    request = planner.PlanRequest(
        model, device=device, num_devices=case.num_gpus, batch_size=case.batch_size
    )
    if case.layout is not None:
        D, K, T, v = case.layout
        config = planner.ParallelConfig(
            num_replicas=D,
            num_devices=K,
            num_shards=T,
            stages_per_device=v,
            num_microbatches=case.batch_size // D,
            schedule=schedules.interleaved,
            remat=remat.find("auto"),
            shard_replicas="slots",
        )
        results.append(row(case, request.estimate(config), case.published))
    if case.slices is not None:
        D, T, v, M = case.slices
        axes: dict[Any, float | None] = {
            "units": None,
            "positions": case.published_of_slices,
        }
        for axis, published in axes.items():
            config = planner.ParallelConfig(
                num_replicas=D,
                num_devices=1,
                num_shards=T,
                shard_axis=axis,
                stages_per_device=v,
                num_microbatches=M,
                schedule=schedules.find("looped_bfs+gather"),
                remat=remat.find("auto"),
                shard_replicas="weights",
            )
            results.append(row(case, request.estimate(config), published))
    return results


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="8B,70B", help="with commas")
    names = parser.parse_args().models.split(",")
    print(tables.draw([x for case in CASES if case.model in names for x in rows(case)]))


if __name__ == "__main__":
    main()
