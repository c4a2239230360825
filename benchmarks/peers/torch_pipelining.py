"""The workloads on torch.distributed.pipelining, training a step for each line read.

Run by the Python of an environment that has torch and numpy:

    python torch_pipelining.py --workload=mlp --stages=2 --microbatches=8 < steps

It prints a line of JSON once it is ready, and one for each line it reads, with the
seconds that a step took and the loss before its update. Stages are processes of one
core each that exchange tensors with gloo, as the library is made for; `--stages=1` is
the plain model. Layers, initial weights and data are those of `benchmarks.workloads`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import pipelining

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


class Draws:
    """The numbers of `benchmarks.workloads.set_weights`, in its order."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def kernel(self, *shape: int) -> torch.Tensor:
        """Returns the next matrix, in the shape that Keras gives it."""
        value = self._rng.standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(value * np.float32(np.sqrt(2 / np.prod(shape[:-1]))))


class EncoderBlock(nn.Module):
    """A pre-LN transformer encoder block without dropout."""

    def __init__(self, draws: Draws, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=1e-3)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-3)
        self.hidden = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        size = width // heads
        qkv = [draws.kernel(width, heads, size).reshape(width, width).T for _ in "qkv"]
        out = draws.kernel(heads, size, width).reshape(width, width).T
        with torch.no_grad():
            self.attention.in_proj_weight.copy_(torch.cat(qkv))
            self.attention.in_proj_bias.zero_()
            self.attention.out_proj.weight.copy_(out)
            self.attention.out_proj.bias.zero_()
            self.hidden.weight.copy_(draws.kernel(width, 4 * width).T)
            self.hidden.bias.zero_()
            self.project.weight.copy_(draws.kernel(4 * width, width).T)
            self.project.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attends, then transforms each position, each on a residual path."""
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = nn.functional.gelu(self.hidden(self.mlp_norm(x)))
        return x + self.project(y)


def dense(draws: Draws) -> nn.Module:
    """Returns a dense layer of the mlp workload, with its relu."""
    layer = nn.Linear(1024, 1024)
    with torch.no_grad():
        layer.weight.copy_(draws.kernel(1024, 1024).T)
        layer.bias.zero_()
    return nn.Sequential(layer, nn.ReLU())


WORKLOADS = {
    "mlp": (dense, 16, (512, 1024)),
    "transformer": (EncoderBlock, 8, (32, 128, 256)),
}


def serve(rank: int, flags: argparse.Namespace, connection: Connection) -> None:
    """Runs one stage, or all layers, until the pipe closes."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    make_layer, num_layers, shape = WORKLOADS[flags.workload]
    draws = Draws()
    layers = [make_layer(draws) for _ in range(num_layers)]
    x, y = torch.from_numpy(
        np.random.default_rng(0).standard_normal((2, *shape), dtype=np.float32)
    )
    K = flags.stages
    if K > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(flags.port))
        dist.init_process_group("gloo", rank=rank, world_size=K)
    several = flags.schedule in ("interleaved", "zero_bubble") and K > 1
    virtual = 2 * K if several else K
    size = num_layers // virtual
    mine = [
        nn.Sequential(*layers[k * size : (k + 1) * size])
        for k in range(rank, virtual, K)
    ]
    optimizer = torch.optim.SGD([p for m in mine for p in m.parameters()], lr=0.01)
    loss_fn = nn.functional.mse_loss
    if K > 1:
        stages = [
            pipelining.PipelineStage(module, k, virtual, torch.device("cpu"))
            for k, module in zip(range(rank, virtual, K), mine, strict=True)
        ]
        schedule = SCHEDULES[flags.schedule](
            stages if several else stages[0], flags.microbatches, loss_fn=loss_fn
        )
    connection.send(None)
    while True:
        try:
            connection.recv()
        except EOFError:
            break
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if K == 1:
            losses = [loss_fn(mine[0](x), y)]
            losses[0].backward()
        elif rank == 0:
            schedule.step(x)
        elif rank == K - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        connection.send(sum(x.item() for x in losses) / max(len(losses), 1))
    if K > 1:
        dist.destroy_process_group()


def main() -> None:
    """Starts the stages, and lets them train a step for each line read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--port", type=int, default=29531)
    flags = parser.parse_args()
    context = mp.get_context("spawn")
    ours, processes = [], []
    for rank in range(flags.stages):
        connection, theirs = context.Pipe()
        process = context.Process(target=serve, args=(rank, flags, theirs))
        process.start()
        theirs.close()
        ours.append(connection)
        processes.append(process)
    for connection in ours:
        connection.recv()
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for connection in ours:
            connection.send("step")
        losses = [connection.recv() for connection in ours]
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": losses[-1]}), flush=True)
    for connection in ours:
        connection.close()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
