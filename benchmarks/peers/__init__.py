"""This library beside others on the same workload, step by step in turns.

    python -m benchmarks.peers.environments peer-envs
    python -m benchmarks.peers --environments=peer-envs --microbatches=4,8

The first makes an environment for each peer: `torch.distributed.pipelining`,
torchgpipe, and a pipeline of JAX's `shard_map`. The second measures those that are
there, and says of the others why they are left out; `--torch=PYTHON` names an
environment elsewhere. `benchmarks/RESULTS.md` has what came out.

Each side trains the same layers from the same weights on the same data with the same
optimizer, in processes of its own with one core a stage. `plain` is the framework's own
training step on one core. Of a side whose losses are not the plain Keras model's in
every step no time is told. Columns: milliseconds a step, median and least; the median
of the ratios to this library's 1F1B in neighbouring steps; the CPU time of all of a
side's threads, and how many cores that kept busy; the loss of the first and the last
step.

`decoder`, `resnet50` and `translation` are torch's alone. `decoder` is timed with
dropout, whose masks no two sides share: its losses are compared by `--small`, without
dropout. Pipelines normalize each microbatch of `resnet50`, so that their losses are
compared with this library's 1F1B, and those of plain models with Keras'.
"""
