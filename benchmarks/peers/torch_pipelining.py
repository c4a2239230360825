"""The workloads on torch.distributed.pipelining; `benchmarks.peers.protocol` runs it.

Stages are processes that exchange tensors with gloo, as the library is made for. It has
no rematerialisation of its own: `torch.utils.checkpoint` around each stage.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from benchmarks.peers import protocol, torch_layers

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


def make_step(task: protocol.Task, rank: int) -> protocol.StepFn:
    """Returns the step of the plain model, or of a process' stages."""
    torch.set_num_threads(1)
    layers, inputs, targets = torch_layers.read(task)
    if task.schedule == "plain":
        return torch_layers.whole_step(nn.Sequential(*layers), inputs, targets)
    return _stages_step(task, rank, layers, inputs, targets)


def _stages_step(
    task: protocol.Task,
    rank: int,
    layers: list[nn.Module],
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> protocol.StepFn:
    K = task.num_stages
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.port))
    dist.init_process_group("gloo", rank=rank, world_size=K)
    several = task.schedule in ("interleaved", "zero_bubble")
    virtual = 2 * K if several else K
    size = len(layers) // virtual
    numbers = range(rank, virtual, K)
    mine: list[nn.Module] = [
        nn.Sequential(*layers[k * size : (k + 1) * size]) for k in numbers
    ]
    if task.remat == "stage":
        mine = [torch_layers.Rematerialised(module) for module in mine]
    stages = [
        pipelining.PipelineStage(module, k, virtual, torch.device("cpu"))
        for k, module in zip(numbers, mine, strict=True)
    ]
    schedule = SCHEDULES[task.schedule](
        stages if several else stages[0],
        task.num_microbatches,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = torch_layers.make_optimizer(*mine)

    def step() -> float | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == K - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        return torch.stack(losses).mean().item() if rank == K - 1 else None

    return step


if __name__ == "__main__":
    protocol.run(make_step, torch=torch.__version__)
