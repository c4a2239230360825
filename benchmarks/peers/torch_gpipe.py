"""The workloads on torchgpipe; `benchmarks.peers.protocol` runs it.

torchgpipe takes all CPU devices for one: their stages share one thread, and autograd
runs all of the backward in another. So nothing overlaps, and a core is left idle.
"""

from __future__ import annotations

import importlib.metadata

import torch
import torchgpipe
from torch import nn

from benchmarks.peers import protocol, torch_layers


def make_step(task: protocol.Task, rank: int) -> protocol.StepFn:
    """Returns the step of a model in `num_stages` partitions."""
    torch.set_num_threads(1)
    K = task.num_stages
    model = torch_layers.read(task, num_stages=K)
    pipeline = torchgpipe.GPipe(
        nn.Sequential(*model.layers),
        balance=[span.stop - span.start for span in model.spans],
        devices=["cpu"] * K,
        chunks=task.num_microbatches,
        checkpoint={"none": "never", "stage": "always"}[task.remat],
    )
    return torch_layers.whole_step(pipeline, model)


if __name__ == "__main__":
    protocol.run(
        make_step,
        torch=torch.__version__,
        torchgpipe=importlib.metadata.version("torchgpipe"),
    )
