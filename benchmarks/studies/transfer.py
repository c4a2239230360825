"""In bfloat16 stages exchange half the bytes, and gradients are 3.7e-4 off.

Bytes that compression at stage boundaries saves, and its errors.

    python -m benchmarks.studies.transfer --blocks=8 --stages=4 --microbatches=4

A step of the transformer workload, smaller, with each `transfer_dtype` and without.
`forward KiB` is what one microbatch sends across one boundary, by the plan; `back KiB`
the gradient of that on its way back. Errors are relative to the step without
compression, from the same weights: of the output, of all gradients together
(`||g - g0|| / ||g0||`), and of the weight whose gradient is worst, except weights whose
gradient is zero up to rounding, such as the bias of attention keys.
"""

from __future__ import annotations

import argparse
from typing import get_args

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from benchmarks import tables, workloads
from tfgpipe.stage.codecs import TransferDtype


def measure(
    flags: argparse.Namespace, transfer_dtype: TransferDtype | None
) -> tuple[float, list[np.ndarray]]:
    """Returns the bytes across a boundary; and output and gradients of a step."""
    workload = workloads.transformer(
        num_layers=flags.blocks, batch_size=8, length=64, d_model=128
    )
    layers = workload.make_layers()
    pipelined = tfgpipe.PipelinedLayer(
        layers,
        num_stages=flags.stages,
        num_microbatches=flags.microbatches,
        transfer_dtype=transfer_dtype,
        dtype=flags.policy,
    )
    x, y = map(tf.constant, workload.make_data())
    pipelined.build(x.shape)
    workloads.set_weights(layers)

    @tf.function
    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            output = tf.cast(pipelined(x, training=True), tf.float32)
            loss = tf.reduce_mean((output - y) ** 2)
        return [output, *tape.gradient(loss, pipelined.trainable_variables)]

    received = pipelined.plan().stages[1].received_bytes
    return received, [tensor.numpy() for tensor in step()]


def error(exact: list[np.ndarray], near: list[np.ndarray]) -> float:
    """Returns the relative error of some tensors together."""
    difference = sum(np.sum((a - b) ** 2) for a, b in zip(exact, near, strict=True))
    return float(np.sqrt(difference / sum(np.sum(a**2) for a in exact)))


def main() -> None:
    """Measures each way to compress."""
    flags = _parse()
    tfgpipe.make_logical_cpus(flags.stages)
    size, exact = measure(flags, None)
    rows: list[tables.Row] = []
    for transfer_dtype in (None, *get_args(TransferDtype)):
        received, near = measure(flags, transfer_dtype)
        back = size if transfer_dtype in ("int8", "int8_channel") else received
        least = 1e-5 * max(np.linalg.norm(gradient) for gradient in exact[1:])
        each = [
            error([a], [b])
            for a, b in zip(exact[1:], near[1:], strict=True)
            if np.linalg.norm(a) > least
        ]
        rows.append(
            {
                "transfer_dtype": str(transfer_dtype),
                "forward KiB": received / 2**10,
                "back KiB": back / 2**10,
                "output": f"{error(exact[:1], near[:1]):.1e}",
                "gradients": f"{error(exact[1:], near[1:]):.1e}",
                "worst": f"{max(each):.1e}",
            }
        )
        keras.utils.clear_session()
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures compressed transfers.")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--stages", type=int, default=4, help="K")
    parser.add_argument("--microbatches", type=int, default=4, help="M")
    parser.add_argument("--policy", default="float32", help="of all layers")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
