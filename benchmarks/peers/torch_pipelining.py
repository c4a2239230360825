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
    if task.schedule == "plain":
        model = torch_layers.read(task, num_stages=1)
        chain = torch_layers.Chain(model.layers)
        if task.compiled:
            chain.compile()
        return torch_layers.whole_step(chain, model)
    return _stages_step(task, rank)


def _stages_step(task: protocol.Task, rank: int) -> protocol.StepFn:
    K = task.num_stages
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.port))
    dist.init_process_group("gloo", rank=rank, world_size=K)
    several = task.schedule in ("interleaved", "zero_bubble")
    virtual = 2 * K if several else K
    model = torch_layers.read(task, num_stages=virtual)
    numbers = range(rank, virtual, K)
    mine: list[nn.Module] = [model.stages[k] for k in numbers]
    if task.remat == "stage":
        mine = [torch_layers.Rematerialised(module) for module in mine]
    if task.compiled:
        for module in mine:
            module.compile()
    stages = [
        pipelining.PipelineStage(module, k, virtual, torch.device("cpu"))
        for k, module in zip(numbers, mine, strict=True)
    ]
    schedule = SCHEDULES[task.schedule](
        stages if several else stages[0],
        task.num_microbatches,
        loss_fn=torch_layers.loss_of,
    )
    optimizer = torch_layers.make_optimizer(*mine)

    def step() -> float | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(model.inputs, **model.given)
        elif rank == K - 1:
            schedule.step(target=model.targets, losses=losses, **model.given)
        else:
            schedule.step(**model.given)
        optimizer.step()
        return torch.stack(losses).mean().item() if rank == K - 1 else None

    return step


if __name__ == "__main__":
    protocol.run(make_step, torch=torch.__version__)
