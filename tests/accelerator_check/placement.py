"""What ran where: the graphs of the devices, beside the prediction."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tests.accelerator_check import models
from tests.accelerator_check.devices import Machine
from tests.accelerator_check.prediction import read_prediction
from tests.accelerator_check.report import Recorder
from tfgpipe._compat import executed

# What is copied but computes nothing, and has any type.
_PLUMBING = re.compile(
    r"_.*|.*Identity.*|Const|NoOp|.*PartitionedCall|Placeholder|.*Variable.*|.*Handle"
)
_FLOATS = {x.as_datatype_enum for x in (tf.float32, tf.float16, tf.bfloat16)}


def placement_part(recorder: Recorder, machine: Machine, folder: Path) -> None:
    """Compares the graphs that devices have run with the prediction."""
    models.need(machine, 2)
    predicted = read_prediction(folder)["float32"]
    # As in a dry run: what XLA compiles has no operations to look at.
    model, batch = models.language_model(machine, jit_compile=False)
    graphs = executed.partition_graphs(lambda: model.train_on_batch(*batch))
    sent = _copies_between_stages(graphs, machine.kind)
    for ends in sorted({*sent, *predicted["copies"]}):
        recorder.row(
            "Copies from stage to stage in a step",
            copies=ends,
            predicted=predicted["copies"].get(ends, 0),
            ran=sent[ends],
        )
    if dict(sent) != predicted["copies"]:
        recorder.failed("Between stages other tensors are copied than predicted")
    if machine.kind != "GPU":
        recorder.left_out("operations on the host: the devices are the host's")
        return
    here = collections.Counter(
        node.op
        for graph in graphs
        for node in graph.node
        if re.search(r"CPU:\d+$", node.device) and not _PLUMBING.fullmatch(node.op)
        if {x.type for x in node.attr.values()} & _FLOATS
    )
    for op in sorted({*here, *predicted["on_host"]}):
        recorder.row(
            "Operations on numbers that ran on the host, by type",
            operation=op,
            nodes=here[op],
            predicted="yes" if op in predicted["on_host"] else "no",
        )
    recorder.text(f"{sum(here.values())} nodes that compute numbers are on the host.")
    host = collections.Counter(
        f"{a} to {b}"
        for graph in graphs
        for node in graph.node
        if node.op in ("_Send", "_HostSend")
        for a, b in [_ends(node)]
        if a != b and "CPU" in a + b
    )
    for ends, count in sorted(host.items()):
        recorder.row("Copies from and to the host, nodes", copies=ends, nodes=count)


def _ends(node: Any) -> tuple[str, str]:
    ends = (node.attr[f"{end}_device"].s.decode() for end in ("send", "recv"))
    source, target = (end.rpartition("device:")[2] for end in ends)
    return source, target


def _copies_between_stages(
    graphs: Iterable[Any], kind: str
) -> collections.Counter[str]:
    """Counts results of stage functions that stage functions of other devices read."""
    graphs = list(graphs)
    kinds = {(g, n.name): n.op for g, x in enumerate(graphs) for n in x.node}
    readers: dict[str, list[str]] = collections.defaultdict(list)
    for graph in graphs:
        recv = {
            n.name: n.attr["tensor_name"].s for n in graph.node if n.op.endswith("Recv")
        }
        for node in graph.node:
            for name in {x.partition(":")[0] for x in node.input} & recv.keys():
                readers[recv[name]].append(node.name.rpartition("/")[2])
    sent = collections.Counter[str]()
    for g, graph in enumerate(graphs):
        for node in graph.node:
            if not node.op.endswith("Send"):
                continue
            made_by = kinds[g, node.input[0].partition(":")[0].removeprefix("^")]
            a, b = _ends(node)
            read_by = readers[node.attr["tensor_name"].s]
            if (
                made_by.endswith("PartitionedCall")
                and a != b
                and a.startswith(kind)
                and b.startswith(kind)
                and any(name.startswith("stage_") for name in read_by)
            ):
                ends = (x.rpartition(":")[2] for x in (a, b))
                sent[" to ".join(ends)] += 1
    return sent
