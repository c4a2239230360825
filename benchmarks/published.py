"""The planner's predictions beside training runs that others published.

    python -m benchmarks.published
    python -m benchmarks.published --families=nanotron,NVIDIA --json=published.json
    python -m benchmarks.published --exchange

`benchmarks/published.csv` has a row for each published configuration, with its source.
Compared are tokens a second on a device, and the GiB of the fullest one. A source that
has MFU counts 6 FLOPs for each weight of a matrix, the head's among them, and 12 n u
for each token of a block, with n positions and heads of width u in all; that gives its
tokens. Rows with a reason in `skipped` are not predicted.

In each family and kind of device every second setting calibrates, and the others are
judged; rows of equal settings are on the same side. Calibrated are

    efficiency   of each kind of device in a family, the median over its rows
    cards        of each family: 1, or as many network cards of a group as it has
                 devices, whichever is off by less in the mean; the latter where both
                 are the same
    overhead     GiB of each family whose source has memory: the device's runtime, and
                 what its allocator holds beyond tensors, the median over its rows

All else is from the row and the planner's table of devices. What the programs do that
this library does otherwise is in the workload and the configuration:

* All but nanotron and this library sum gradients amid the backwards.
* Slices of weights are gathered for each block in each pass.
* Megatron's weights and gradients have 2 bytes, and slots 12: two moments, and a copy
  of the weight. nanotron sums gradients in 4 bytes, and shares out the 4 of the copy
  with the slots; its shards save the inputs of products gathered.
* The softmax is of float32. In FP8, products take half as long as in bfloat16.
* Replicas of parts of sequences (CP) are replicas of shorter sequences, which is what
  they are if keys and values go round behind products.
* A ring on a TPU's torus sends both ways, so that links are twice as fast.
* With fewer microbatches than stages, 1F1B is GPipe.
* The papers on vocabulary and zero bubble say GB, taken for the GiB of PyTorch's
  counters, as nanotron's are.

What programs hold is settled by these sources where they say it, and by all rows where
they do not; the constants, by half of them. `--exchange` calibrates by the other half.

A minute.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from tfgpipe import planner, remat, schedules
from tfgpipe.planner import Device, Estimate, ParallelConfig, Workload

FILE = Path(__file__).with_suffix(".csv")
GIB = 2**30
# Data sheet of the H100, without sparsity.
FP8_PEAK = 1979e12
# As one setting of NVIDIA's rows differs between releases, by 8%, and by 2%.
APART = 0.05
# Rounds of a fit, of which each divides an efficiency by the median error it leaves.
ROUNDS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A published configuration, as a row of the file has it.

    Attributes:
        family: Rows that are calibrated together.
        source: Paper or file.
        model: Its name there.
        layers: Number of blocks.
        width: Embedding dimension.
        mlp_width: Hidden units of the perceptron.
        heads: Number of heads.
        kv_heads: Number of heads of keys and values.
        head_width: Width of a head. 0 for the width of all over their number.
        vocabulary: Size of the vocabulary.
        tied: 1 if the head has the embedding's weights.
        gated: 1 if the perceptron has a gate.
        flash: 1 if attention saves no scores.
        lora_rank: Rank of adapters; 0 for none.
        device: Name in `planner.TABLE`, or of a device that is not there.
        gpus: Number of devices.
        replicas: D.
        stages: K, the devices of a pipeline.
        shards: T.
        context_parallel: Parts of a sequence.
        stages_per_device: v.
        schedule: Name of the schedule; "fsdp" for blocks that are gathered in turn.
        layout: Blocks of a stage: "equal", with the vocabulary at the ends;
            "one_fewer" at the ends, in place of the vocabulary; or "balanced".
        batch: Sequences of a step.
        microbatch: Sequences of a microbatch.
        microbatches: M.
        length: Positions.
        remat: Policy of rematerialisation.
        sharding: State that replicas share out: "none", "slots" or "weights".
        precision: Type of products.
        tokens: Published tokens a second on a device, or 0.
        mfu: Published MFU in percent, or 0.
        samples: Published sequences a second on a device, or 0.
        memory_gib: Published GiB of the fullest device, or 0.
        skipped: Reason for which the row is not predicted, or nothing.
    """

    family: str
    source: str
    model: str
    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: int
    gated: int
    flash: int
    lora_rank: int
    device: str
    gpus: int
    replicas: int
    stages: int
    shards: int
    context_parallel: int
    stages_per_device: int
    schedule: str
    layout: str
    batch: int
    microbatch: int
    microbatches: int
    length: int
    remat: str
    sharding: Any
    precision: str
    tokens: float
    mfu: float
    samples: float
    memory_gib: float
    skipped: str

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a token by which MFU is counted."""
        each = self.head_width or self.width // self.heads
        u, v = self.heads * each, self.kv_heads * each
        block = self.width * (2 * u + 2 * v + (2 + self.gated) * self.mlp_width)
        weights = self.layers * block + self.vocabulary * self.width
        return 6 * weights + 12 * self.layers * u * self.length

    @property
    def peak(self) -> float:
        """Peak FLOP/s of products."""
        if self.precision == "float8":
            return FP8_PEAK
        return planner.TABLE[self.device].peak(self.precision)

    @property
    def tokens_per_second(self) -> float:
        """Published tokens a second on a device."""
        if self.tokens:
            return self.tokens
        if self.samples:
            return self.samples * self.length
        return self.mfu / 100 * self.peak / self.flops_per_token

    @property
    def settings(self) -> tuple[object, ...]:
        """All but what was measured, and where it is published."""
        values = dataclasses.asdict(self)
        for name in ("source", "tokens", "mfu", "samples", "memory_gib"):
            del values[name]
        return tuple(values.values())


def read(path: Path = FILE) -> list[Published]:
    """Returns the rows of the file."""
    convert: dict[Any, Callable[[str], Any]] = {
        "int": lambda text: int(text or 0),
        "float": lambda text: float(text or 0),
    }
    kinds = {x.name: convert.get(x.type, str) for x in dataclasses.fields(Published)}
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Published(**{name: kinds[name](text) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]


@functools.cache
def workload(row: Published) -> Workload:
    """Returns the model of a row."""
    own_sums = row.family == "nanotron"
    found = planner.transformer(
        name=row.model,
        num_layers=row.layers,
        width=row.width,
        mlp_width=row.mlp_width,
        num_heads=row.heads,
        num_key_value_heads=row.kv_heads,
        head_width=row.head_width or None,
        length=row.length,
        vocabulary=row.vocabulary,
        dtype="bfloat16",
        weight_dtype="float32" if own_sums else "bfloat16",
        loss_dtype="float32",
        gated=bool(row.gated),
        flash=bool(row.flash),
        # A pipeline has the weights at both ends.
        tied=bool(row.tied) and row.stages == 1,
        lora_rank=row.lora_rank,
        sequence_parallel=True,
        shards_vocabulary=True,
    )
    if not own_sums:
        return found
    layers = [
        dataclasses.replace(
            x, tensors=dataclasses.replace(x.tensors, replicated=2 * x.tensors.inputs)
        )
        if x.name.startswith("block")
        else x
        for x in found.layers
    ]
    return dataclasses.replace(found, layers=tuple(layers))


def parallel_config(row: Published) -> ParallelConfig:
    """Returns the configuration of a row."""
    if row.schedule == "fsdp":
        each, schedule = row.layers, "looped_bfs"
    else:
        each, schedule = row.stages_per_device, row.schedule
    if row.microbatches < row.stages:
        schedule = "gpipe"
    policy: Any = schedules.find(schedule)
    if row.schedule == "fsdp":
        policy = schedules.Gather(policy, every_pass=True)
    return ParallelConfig(
        num_replicas=row.replicas * row.context_parallel,
        num_devices=row.stages,
        num_shards=row.shards,
        num_microbatches=row.microbatches,
        stages_per_device=each,
        schedule=policy,
        remat=remat.find(row.remat),
        shard_replicas=row.sharding,
        sum_when="last" if row.family == "nanotron" else "early",
    )


def layers_per_stage(row: Published) -> tuple[int, ...] | None:
    """Returns the number of layers in each stage, or None for the best partition.

    The first layer of a model is its embedding, and the last its softmax.
    """
    if row.schedule == "fsdp":
        return (2, *[1] * (row.layers - 2), 2)
    num_stages = row.stages * row.stages_per_device
    if row.layout == "one_fewer":
        return ((row.layers + 2) // num_stages,) * num_stages
    if row.layout == "equal":
        each = row.layers // num_stages
        return (1 + each, *[each] * (num_stages - 2), each + 1)
    return None


@dataclasses.dataclass(frozen=True)
class Fit:
    """What is calibrated of a family.

    Attributes:
        efficiency: Of each kind of device.
        network_cards: Rings that a collective of several groups runs at once.
        overhead: GiB beside tensors.
    """

    efficiency: Mapping[str, float]
    network_cards: int = 1
    overhead: float = 0.0

    def __str__(self) -> str:
        each = (f"{value:.2f} of {name}" for name, value in self.efficiency.items())
        known = f"; overhead {self.overhead:.1f} GiB" if self.overhead else ""
        return (
            f"efficiency {', '.join(each)}; network_cards {self.network_cards}{known}"
        )


def device(row: Published, fit: Fit) -> Device:
    """Returns the device of a row."""
    found = planner.TABLE[row.device]
    ways = 2 if row.device.startswith("tpu") else 1
    return dataclasses.replace(
        found,
        efficiency=fit.efficiency[row.device],
        network_cards=fit.network_cards,
        flops={"bfloat16": row.peak},
        link=dataclasses.replace(found.link, bandwidth=ways * found.link.bandwidth),
        reserved=0.0,
    )


def estimate(row: Published, fit: Fit) -> Estimate:
    """Returns the planner's estimate of a row."""
    request = planner.PlanRequest(
        workload(row),
        device=device(row, fit),
        num_devices=row.gpus,
        batch_size=row.batch,
        num_slots=2 if row.family == "nanotron" else 6,
    )
    return request.estimate(parallel_config(row), layers_per_stage(row))


def predicted_tokens(row: Published, fit: Fit) -> float:
    """Returns the predicted tokens a second on a device."""
    seconds = estimate(row, fit).time.total
    return row.batch * row.length / seconds / row.gpus


def predicted_gib(row: Published, fit: Fit) -> float:
    """Returns the predicted GiB of the fullest device."""

    def total(held: Any) -> float:
        if row.family != "nanotron":
            return float(held.total)
        share = 1 / row.replicas if row.sharding == "slots" else 1.0
        # Of 6 bytes of a weight 4 are the optimizer's.
        return float(held.total - held.weights * 4 / 6 * (1 - share))

    return max(map(total, estimate(row, fit).memory)) / GIB + fit.overhead


def halves(rows: Sequence[Published]) -> tuple[list[Published], list[Published]]:
    """Returns the rows that calibrate, and those that are judged."""
    both: tuple[list[Published], list[Published]] = ([], [])
    for name in dict.fromkeys(row.device for row in rows):
        mine = [row for row in rows if row.device == name]
        for i, settings in enumerate(dict.fromkeys(row.settings for row in mine)):
            both[i % 2].extend(row for row in mine if row.settings == settings)
    return both


def calibrate(rows: Sequence[Published]) -> Fit:
    """Returns the constants with which the rows of a family are off by least."""
    names = [*dict.fromkeys(row.device for row in rows)]
    # A TPU's groups are whole slices.
    most = 1 if any(name.startswith("tpu") for name in names) else 8
    # Where no ring leaves a group, that of NVIDIA's systems: a card for each device.
    fits = [
        fit_efficiency(rows, network_cards)
        for network_cards in dict.fromkeys((most, 1))
    ]
    fit = min(fits, key=lambda fit: statistics.mean(map(abs, log_errors(rows, fit))))
    known = [row for row in rows if row.memory_gib]
    if not known:
        return fit
    missing = [row.memory_gib - predicted_gib(row, fit) for row in known]
    return dataclasses.replace(fit, overhead=max(statistics.median(missing), 0.0))


def fit_efficiency(rows: Sequence[Published], network_cards: int) -> Fit:
    """Returns the efficiencies with which half of the rows are predicted too fast."""
    found = {row.device: 0.6 for row in rows}
    for _ in range(ROUNDS):
        fit = Fit(dict(found), network_cards)
        for name in found:
            mine = [row for row in rows if row.device == name]
            off = math.exp(statistics.median(log_errors(mine, fit)))
            found[name] = min(found[name] / off, 1.0)
    return Fit(found, network_cards)


def log_errors(rows: Sequence[Published], fit: Fit) -> list[float]:
    """Returns the logarithms of predicted over published speeds."""
    return [math.log(predicted_tokens(x, fit) / x.tokens_per_second) for x in rows]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A row, and what the planner predicts of it.

    Attributes:
        row: The row.
        is_judged: False if it calibrated.
        tokens: Predicted tokens a second on a device.
        gib: Predicted GiB of the fullest device, or 0.
    """

    row: Published
    is_judged: bool
    tokens: float
    gib: float

    @property
    def time_error(self) -> float:
        """Relative error of the time of a step."""
        return self.row.tokens_per_second / self.tokens - 1

    @property
    def memory_error(self) -> float:
        """Relative error of memory."""
        return self.gib / self.row.memory_gib - 1


def judge(
    rows: Sequence[Published], *, exchanged: bool = False
) -> tuple[list[Judged], Fit]:
    """Returns the predictions of a family's rows, and its constants.

    Args:
        rows: The rows of a family that are not left out.
        exchanged: True to calibrate by the half that is judged otherwise.
    """
    calibrating, judged = halves(rows)[:: -1 if exchanged else 1]
    fit = calibrate(calibrating)
    found = [
        Judged(
            row,
            is_judged,
            predicted_tokens(row, fit),
            predicted_gib(row, fit) if row.memory_gib else 0.0,
        )
        for is_judged, half in ((False, calibrating), (True, judged))
        for row in half
    ]
    return found, fit


def pairs(found: Sequence[Judged]) -> Iterator[tuple[Judged, Judged]]:
    """Yields the pairs of judged rows of which one is faster, by other settings."""
    judged = [x for x in found if x.is_judged]
    for a, b in itertools.combinations(judged, 2):
        differ = a.row.tokens_per_second != b.row.tokens_per_second
        if differ and a.row.settings != b.row.settings:
            yield a, b


def are_apart(a: Published, b: Published) -> bool:
    """Returns whether two speeds differ by more than repeated runs may."""
    x, y = sorted((a.tokens_per_second, b.tokens_per_second))
    return y > (1 + APART) * x


def percent_in_order(both: Sequence[tuple[Judged, Judged]]) -> float | str:
    """Returns the percentage of pairs of which the planner has the same one faster."""
    right = [
        (a.tokens > b.tokens) == (a.row.tokens_per_second > b.row.tokens_per_second)
        for a, b in both
    ]
    return 100 * statistics.mean(right) if right else ""


def detail(found: Judged) -> tables.Row:
    """Returns the row of one configuration."""
    row = found.row
    v = f" x {row.stages_per_device}" if row.stages_per_device > 1 else ""
    parts = f" CP={row.context_parallel}" if row.context_parallel > 1 else ""
    return {
        "family": row.family,
        "model": row.model,
        "device": row.device,
        "configuration": (
            f"D={row.replicas} K={row.stages} T={row.shards}{parts} "
            f"M={row.microbatches} b={row.microbatch} n={row.length} "
            f"V={row.vocabulary} {row.schedule}{v} {row.layout} {row.remat}"
        ),
        "judged": int(found.is_judged),
        "published tokens/s": row.tokens_per_second,
        "predicted tokens/s": found.tokens,
        "time off by %": 100 * found.time_error,
        "published GiB": row.memory_gib or "",
        "predicted GiB": found.gib or "",
        "memory off by %": 100 * found.memory_error if row.memory_gib else "",
    }


def summary(name: str, found: Sequence[Judged]) -> tables.Row:
    """Returns the row of a family: judged rows alone."""
    judged = [x for x in found if x.is_judged]
    times = [100 * abs(x.time_error) for x in judged]
    held = [100 * abs(x.memory_error) for x in judged if x.row.memory_gib]
    both = [*pairs(found)]
    alike = [(a, b) for a, b in both if a.row.model == b.row.model]
    apart = [(a, b) for a, b in both if are_apart(a.row, b.row)]
    return {
        "family": name,
        "rows": len(found),
        "judged": len(judged),
        "time, median %": statistics.median(times),
        "time, worst %": max(times),
        "memory, rows judged": len(held),
        "memory, median %": statistics.median(held) if held else "",
        "memory, worst %": max(held) if held else "",
        "pairs": len(both),
        "in order, %": percent_in_order(both),
        "of one model": len(alike),
        "in order, %, of one model": percent_in_order(alike),
        f"apart by {100 * APART:.0f}%": len(apart),
        "in order, %, apart": percent_in_order(apart),
    }


def main(args: Sequence[str] | None = None) -> None:
    """Prints predictions beside published figures, constants, and errors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", help="with commas; all if left out")
    parser.add_argument(
        "--exchange", action="store_true", help="calibrate by the other half"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args(args)
    rows = read()
    names = [*dict.fromkeys(row.family for row in rows if not row.skipped)]
    details, summaries = [], []
    for name in flags.families.split(",") if flags.families else names:
        mine = [row for row in rows if row.family == name and not row.skipped]
        found, fit = judge(mine, exchanged=flags.exchange)
        details += [*map(detail, found)]
        summaries.append(summary(name, found))
        print(f"{name}: {fit}.")
    print(tables.draw(details))
    reasons = [f"{row.family}: {row.skipped}" for row in rows if row.skipped]
    for reason in dict.fromkeys(reasons):
        print(f"{reasons.count(reason)} rows left out of {reason}.")
    print(tables.draw_markdown(summaries))
    if flags.json:
        tables.write_json(flags.json, [*details, *summaries])


if __name__ == "__main__":
    main()
