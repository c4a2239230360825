"""The workloads on a pipeline in JAX; `benchmarks.peers.protocol` runs it.

JAX has no pipeline of its own; this is the usual one. `shard_map` runs the same program
on all devices, each with its stage's weights. In each of M + K - 1 ticks a device runs
its stage and passes the result to the next device by `ppermute`:

    tick        0    1    2    3
    device 0    0    1    2    -      microbatches of M = 3, K = 2
    device 1    -    0    1    2

In a tick marked `-` it computes all the same, on numbers that nobody reads.
Differentiating the loop gives GPipe's backward, the ticks in reverse. Each device is a
process with one core, or all are in one process, where XLA's threads are shared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.peers import protocol

# An array for each name, of all layers: [L, ...].
Stacked = dict[str, Any]
Loss = Callable[[Stacked, Any, Any], Any]


def mlp(weights: Stacked, x: Any) -> Any:
    """Returns the output of one layer of the mlp workload."""
    return jax.nn.relu(x @ weights["kernel"] + weights["bias"])


def encoder_block(weights: Stacked, x: Any) -> Any:
    """Returns the output of one layer of the transformer workload."""

    def norm(name: str, x: Any) -> Any:
        normal = jax.nn.standardize(x, axis=-1, epsilon=protocol.EPSILON)
        return normal * weights[f"{name}.gamma"] + weights[f"{name}.beta"]

    def heads(name: str, x: Any) -> Any:
        kernel = weights[f"attention.{name}.kernel"]
        bias = weights[f"attention.{name}.bias"]
        return jnp.einsum("btd,dhs->bths", x, kernel) + bias

    y = norm("attention_norm", x)
    y = jax.nn.dot_product_attention(*(heads(n, y) for n in ("query", "key", "value")))
    y = jnp.einsum("bths,hsd->btd", y, weights["attention.attention_output.kernel"])
    x = x + y + weights["attention.attention_output.bias"]
    y = norm("mlp_norm", x) @ weights["hidden.kernel"] + weights["hidden.bias"]
    y = jax.nn.gelu(y, approximate=False) @ weights["output_projection.kernel"]
    return x + y + weights["output_projection.bias"]


LAYERS = {"mlp": mlp, "transformer": encoder_block}


def make_step(task: protocol.Task, rank: int) -> protocol.StepFn:
    """Returns the step of the plain model, or of a process' stages."""
    K, M = task.num_stages, task.num_microbatches
    per_process = K // task.num_processes
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={per_process} "
        "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    )
    if task.num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{task.port}", task.num_processes, rank)
    mesh = Mesh(np.array(jax.devices()), ("stage",))

    def place(value: np.ndarray, spec: Any) -> Any:
        return jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, spec), lambda index: value[index]
        )

    given = protocol.read(task)
    x, y, layers = given.x, given.y, given.layers
    weights = {
        name: place(np.stack([layer.weights[name] for layer in layers]), P("stage"))
        for name in layers[0].weights
    }
    if task.schedule == "plain":
        loss_of = plain_loss(task)
    else:
        # [B, ...] -> [M, B/M, ...]
        x, y = (value.reshape(M, -1, *value.shape[1:]) for value in (x, y))
        loss_of = jax.shard_map(
            pipeline_loss(task),
            mesh=mesh,
            in_specs=(P("stage"), P(), P()),
            out_specs=P(),
        )
    inputs, targets = place(x, P()), place(y, P())

    def train(weights: Stacked, inputs: Any, targets: Any) -> tuple[Any, Stacked]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, inputs, targets)
        rate = protocol.LEARNING_RATE
        return loss, jax.tree.map(lambda w, g: w - rate * g, weights, gradients)

    compiled = jax.jit(train, donate_argnums=0).lower(weights, inputs, targets)
    run = compiled.compile()

    def step() -> float | None:
        nonlocal weights
        loss, weights = run(weights, inputs, targets)
        jax.block_until_ready(weights)
        return float(loss) if rank == 0 else None

    return step


def run_layers(task: protocol.Task, weights: Stacked, x: Any) -> Any:
    """Returns what comes out of all the layers that there are weights of."""
    for number in range(len(next(iter(weights.values())))):
        x = LAYERS[task.workload]({n: w[number] for n, w in weights.items()}, x)
    return x


def plain_loss(task: protocol.Task) -> Loss:
    """Returns the loss of the plain model."""
    return lambda weights, x, y: jnp.mean((run_layers(task, weights, x) - y) ** 2)


def pipeline_loss(task: protocol.Task) -> Loss:
    """Returns the loss of the pipeline, as each device computes it."""
    K, M = task.num_stages, task.num_microbatches

    def stage(weights: Stacked, x: Any) -> Any:
        return run_layers(task, weights, x)

    if task.remat == "stage":
        stage = jax.checkpoint(stage)

    def loss(weights: Stacked, x: Any, y: Any) -> Any:
        k = lax.axis_index("stage")

        def tick(received: Any, t: Any) -> tuple[Any, Any]:
            fed = x[jnp.minimum(t, M - 1)]
            out = stage(weights, jnp.where(k == 0, fed, received))
            m = t - (K - 1)
            mean = jnp.mean((out - y[jnp.maximum(m, 0)]) ** 2)
            counts = (k == K - 1) & (m >= 0)
            sent = lax.ppermute(out, "stage", [(i, i + 1) for i in range(K - 1)])
            return sent, jnp.where(counts, mean, 0.0)

        nothing = lax.pcast(jnp.zeros_like(x[0]), "stage", to="varying")
        _, losses = lax.scan(tick, nothing, jnp.arange(M + K - 1))
        return lax.psum(jnp.sum(losses), "stage") / M

    return loss


if __name__ == "__main__":
    protocol.run(make_step, jax=jax.__version__, jaxlib=jax.lib.__version__)
