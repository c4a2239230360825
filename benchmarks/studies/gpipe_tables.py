"""The planner has the memory of GPipe's tables within 15% in all cells but one.

GPipe's published tables beside what the planner predicts of them.

    python -m benchmarks.studies.gpipe_tables

Huang et al. 2019, arXiv 1811.06965v5, section 3: Table 1, the largest models on so many
accelerators; Table 2, throughput over K and M on TPUs; Table 3, on GPUs without NVLink.
Where the paper leaves a number open, what is taken here is named in `ASSUMED`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import tables
from benchmarks.studies.amoebanet import amoebanet_d
from tfgpipe import planner, remat, schedules
from tfgpipe.partition import best_partition
from tfgpipe.planner import ParallelConfig, PlanRequest, Workload

GB, GIB = 1e9, 2**30

ASSUMED = """\
AmoebaNet: cut by FLOPs, a cell a layer; bfloat16 activations; M=4 in Table 1, the one
power of two that fits all its rows.
Transformer: float32 activations, M=32, a sequence each, in Table 1; in Tables 2 and 3
the blocks alone, since Lingvo's embedding and softmax are outside the pipeline.
All: activations are of the fullest accelerator times their number; recomputation
begins early; batches as in Table 1 whatever K and M are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One published number, and the predicted one.

    Attributes:
        table: Where it is in the paper.
        row: What it is of.
        what: What it says.
        published: The published number.
        predicted: The predicted one.
    """

    table: str
    row: str
    what: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """How far the prediction is off, relatively."""
        return self.predicted / self.published - 1


# For each number of accelerators, 0 for one without GPipe: the model's sizes, millions
# of parameters, memory of parameters and of activations, in GB, of Transformers in GiB.
AMOEBANETS: Mapping[int, tuple[tuple[int, int], float, float, float]] = {
    0: ((18, 208), 82, 1.05, 6.26),
    1: ((18, 416), 318, 3.8, 3.46),
    2: ((18, 544), 542, 6.45, 8.11),
    4: ((36, 544), 1050, 12.53, 15.21),
    8: ((72, 512), 1800, 24.62, 26.24),
}
# The paper has the memory of the first the other way round: 282.2 million parameters of
# 12 bytes are 3.15 GiB.
TRANSFORMERS: Mapping[int, tuple[int, float, float, float]] = {
    0: (3, 282.2, 3.15, 11.7),
    1: (13, 785.8, 8.8, 6.4),
    8: (103, 5300, 59.5, 50.9),
    32: (415, 21000, 235.1, 199.9),
    128: (1663, 83900, 937.9, 796.1),
}
# Normalized throughput: for each M, of K = 2, 4, 8.
KS = (2, 4, 8)
TABLE_2: Mapping[str, Mapping[int, tuple[float, ...]]] = {
    "AmoebaNet-D (18, 256)": {
        1: (1, 1.13, 1.38),
        4: (1.07, 1.26, 1.72),
        32: (1.21, 1.84, 3.48),
    },
    "Transformer-48": {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
}
TABLE_3: Mapping[str, Mapping[int, tuple[float, ...]]] = {
    "AmoebaNet-D (18, 128)": {32: (1, 1.7, 2.7)},
    "Transformer-24": {32: (1, 1.8, 3.3)},
}


def transformer(num_layers: int) -> Workload:
    """Returns the paper's Transformer-L: section 3 has its sizes."""
    return planner.transformer(
        name=f"Transformer-{num_layers}",
        num_layers=num_layers,
        width=2048,
        mlp_width=8192,
        num_heads=32,
        length=1024,
        vocabulary=32_000,
    )


def config(num_devices: int, num_microbatches: int) -> ParallelConfig:
    """Returns GPipe on K accelerators; plain training for 0."""
    return ParallelConfig(
        num_replicas=1,
        num_devices=max(num_devices, 1),
        num_shards=1,
        num_microbatches=num_microbatches,
        schedule=schedules.gpipe,
        remat=remat.find("stage" if num_devices else "none"),
        recompute_when="early",
    )


def by_flops(workload: Workload, num_stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage, FLOPs balanced."""
    flops = [layer.flops.forward for layer in workload.layers]
    return best_partition(flops, num_stages=num_stages)


def table_1() -> Iterator[Cell]:
    """Yields memory of parameters and activations of the largest models."""
    for K, ((L, D), millions, held, kept) in AMOEBANETS.items():
        model = amoebanet_d(num_layers=L, num_filters=D)
        yield from _memory(
            model, K, 4 if K else 1, 128, "tpu-v2-8g", (millions, held, kept), GB
        )
    for K, (L, millions, held, kept) in TRANSFORMERS.items():
        model = transformer(L)
        yield from _memory(
            model, K, 32 if K else 1, 32, "tpu-v3-16g", (millions, held, kept), GIB
        )


def _memory(
    model: Workload,
    num_devices: int,
    num_microbatches: int,
    batch_size: int,
    device: str,
    published: tuple[float, float, float],
    unit: float,
) -> Iterator[Cell]:
    K = max(num_devices, 1)
    request = PlanRequest(
        model,
        device=planner.TABLE[device],
        num_devices=K,
        batch_size=batch_size,
        num_slots=1,  # RMSProp's.
    )
    memory = request.memory(config(num_devices, num_microbatches), by_flops(model, K))
    most = max(each.total - each.state for each in memory)
    name = f"{model.name}, " + (f"Pipeline-{K}" if num_devices else "Naive-1")
    for what, number, predicted in zip(
        ("million parameters", "parameter memory", "peak activation memory"),
        published,
        (
            model.parameters / 1e6,
            sum(each.state for each in memory) / unit,
            K * most / unit,
        ),
        strict=True,
    ):
        yield Cell(
            table="1", row=name, what=what, published=number, predicted=predicted
        )


def largest() -> Iterator[Cell]:
    """Yields the largest models that fit, as millions of parameters.

    Of AmoebaNets of as many layers, the most filters; of Transformers, the most blocks
    on each accelerator, one less on the one that has the softmax.
    """
    for K, ((L, _), millions, _, _) in AMOEBANETS.items():
        sizes = [amoebanet_d(num_layers=L, num_filters=D) for D in range(16, 1025, 16)]
        yield _largest(sizes, K, 4 if K else 1, 128, "tpu-v2-8g", millions)
    for K, (_, millions, _, _) in TRANSFORMERS.items():
        if K <= 8:  # All accelerators between are alike, however many there are.
            most = max(K, 1)
            models = [transformer(n * most - (K > 0)) for n in range(2, 20)]
            yield _largest(models, K, 32 if K else 1, 32, "tpu-v3-16g", millions)


def _largest(
    models: Sequence[Workload],
    num_devices: int,
    num_microbatches: int,
    batch_size: int,
    device: str,
    millions: float,
) -> Cell:
    K = max(num_devices, 1)
    found = 0.0
    for model in models:
        request = PlanRequest(
            model,
            device=planner.TABLE[device],
            num_devices=K,
            batch_size=batch_size,
            num_slots=1,
        )
        chosen = config(num_devices, num_microbatches)
        if request.fits(chosen, request.memory(chosen, by_flops(model, K))):
            found = model.parameters / 1e6
    kind = models[0].name.partition("-")[0]
    return Cell(
        table="1",
        row=f"largest {kind}, " + (f"Pipeline-{K}" if num_devices else "Naive-1"),
        what="million parameters",
        published=millions,
        predicted=found,
    )


def tables_2_and_3() -> Iterator[Cell]:
    """Yields throughput, as a multiple of the first of its model."""
    for table, published, of_amoebanet, of_transformer in (
        ("2", TABLE_2, "tpu-v2-8g", "tpu-v3-16g"),
        ("3", TABLE_3, "p100-16g", "p100-16g"),
    ):
        for name, rows in published.items():
            if name.startswith("AmoebaNet"):
                model = amoebanet_d(num_layers=18, num_filters=_filters(name))
                device, batch_size = of_amoebanet, 128
            else:
                whole = transformer(int(name.rpartition("-")[2]))
                model = dataclasses.replace(whole, layers=whole.layers[1:-1])
                device, batch_size = of_transformer, 32
            if table == "2":  # TPUs multiply in bfloat16.
                model = dataclasses.replace(model, dtype="bfloat16")
            first = None
            for (M, numbers), (j, K) in itertools.product(rows.items(), enumerate(KS)):
                request = PlanRequest(
                    model,
                    device=planner.TABLE[device],
                    num_devices=K,
                    batch_size=batch_size,
                    num_slots=1,
                )
                found = request.estimate(config(K, M), by_flops(model, K))
                first = first or found.time.total
                yield Cell(
                    table=table,
                    row=name,
                    what=f"M={M} K={K}",
                    published=numbers[j],
                    predicted=first / found.time.total,
                )


def _filters(name: str) -> int:
    return int(name.rpartition(", ")[2].rstrip(")"))


def ordered_alike(cells: Sequence[Cell]) -> tuple[int, int]:
    """Returns how many pairs of cells are in the published order, and of how many."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(cells, 2)
        if not math.isclose(a.published, b.published)
    ]
    right = sum(
        (a.published < b.published) == (a.predicted < b.predicted) for a, b in pairs
    )
    return right, len(pairs)


def main() -> None:
    """Prints all cells."""
    cells = [*table_1(), *largest(), *tables_2_and_3()]
    print(
        tables.draw(
            [
                {
                    "table": cell.table,
                    "row": cell.row,
                    "what": cell.what,
                    "published": cell.published,
                    "predicted": cell.predicted,
                    "error": f"{100 * cell.error:+.1f}%",
                }
                for cell in cells
            ]
        )
    )
    for name in TABLE_2:
        right, num = ordered_alike(
            [c for c in cells if (c.table, c.row) == ("2", name)]
        )
        print(f"Table 2, {name}: {right} of {num} pairs are in the published order.")
    print(ASSUMED)


if __name__ == "__main__":
    main()
