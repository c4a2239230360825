"""A decoder-only transformer as a workload, from its sizes alone.

For models too large to make, and to check the planner on paper. A block of width w, on
n positions with a heads, a perceptron of width h inside, for an example:

    parameters   4 w^2 + 2 w h + 9 w + h          biases and two norms included
    forward      2 n (4 w^2 + 2 w h) + 4 n^2 w    FLOPs; a backward takes twice that
    saved        n (8 w + 2 h) + 2 a n^2          for the backward

Saved are, of width w: the input, both norms' outputs, q, k, v, the attention's output
and the sum after it; of width h: the perceptron before and after its activation; and
the attention's scores after softmax and dropout (Korthikanti et al. 2022, section 4.1,
count the same tensors).
"""

from __future__ import annotations

import dataclasses

from tfgpipe._util import argument_checks
from tfgpipe.costs import LayerCost, PassCost, TensorBytes, Weights, dtype_bytes
from tfgpipe.planner.workload import Workload
from tfgpipe.remat import ProductsRemat


def transformer(
    *,
    name: str,
    num_layers: int,
    width: int,
    mlp_width: int,
    num_heads: int,
    length: int,
    vocabulary: int,
    dtype: str = "float32",
) -> Workload:
    """Returns the workload: embedding, blocks, softmax with weights of its own.

    >>> lm = tfgpipe.planner.transformer(
    ...     name="lm", num_layers=2, width=8, mlp_width=32, num_heads=2, length=4,
    ...     vocabulary=100,
    ... )
    >>> [layer.name for layer in lm.layers]
    ['embedding', 'block 0', 'block 1', 'softmax']
    >>> lm.layers[1].weights.count
    872

    Args:
        name: Name of the workload.
        num_layers: Number of blocks.
        width: w.
        mlp_width: h.
        num_heads: a, which T divides.
        length: n.
        vocabulary: Size of the vocabulary.
        dtype: Dtype of activations and weights.

    Raises:
        ValueError: If a size is no integer of at least 1, the heads do not divide the
            width, or the dtype is unknown.
    """
    for argument, value in (
        ("num_layers", num_layers),
        ("width", width),
        ("mlp_width", mlp_width),
        ("num_heads", num_heads),
        ("length", length),
        ("vocabulary", vocabulary),
    ):
        argument_checks.check_count(argument, value, most=2**31)
    if width % num_heads:
        raise ValueError(
            "`num_heads` must divide `width`. Received "
            f"num_heads={num_heads} and width={width}."
        )
    argument_checks.check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
    w, h, n, a = width, mlp_width, length, num_heads
    size = dtype_bytes(dtype)
    products = 2 * n * (4 * w * w + 2 * w * h) + 4 * n * n * w
    saved = size * (n * (8 * w + 2 * h) + 2 * a * n * n)
    # Queries, keys, values, scores, contexts, and both ends of the perceptron.
    kept = size * (n * (6 * w + h) + a * n * n)
    crossing = size * n * w
    block = LayerCost(
        name="block",
        weights=Weights(4 * w * w + 2 * w * h + 9 * w + h),
        flops=PassCost(products, 2 * products, recompute=0.0),
        # Each saved tensor is written once and read once, in the backward twice.
        traffic=PassCost(2 * saved, 4 * saved),
        tensors=TensorBytes(
            saved=saved,
            # Of the softmax, or the perceptron, the gradients of output and input.
            workspace=2 * size * max(n * h, a * n * n),
            inputs=crossing,
            outputs=crossing,
            replicated=5 * crossing,
            saves_inputs=True,
            kept=kept,
        ),
        positions=n,
        max_shards=a,
    )
    embedding = LayerCost(
        name="embedding",
        weights=Weights(vocabulary * w),
        traffic=PassCost(2 * crossing, 2 * crossing),
        tensors=TensorBytes(inputs=4 * n, outputs=crossing),
        positions=n,
    )
    logits = size * n * vocabulary
    softmax = LayerCost(
        name="softmax",
        weights=Weights(vocabulary * w),
        flops=PassCost(2 * n * w * vocabulary, 4 * n * w * vocabulary, recompute=0.0),
        traffic=PassCost(4 * logits, 4 * logits),
        tensors=TensorBytes(
            saved=crossing + logits,
            workspace=logits,
            inputs=crossing,
            outputs=logits,
            saves_inputs=True,
            kept=logits,
        ),
        positions=n,
    )
    blocks = [dataclasses.replace(block, name=f"block {i}") for i in range(num_layers)]
    return Workload(
        name=name,
        layers=(embedding, *blocks, softmax),
        dtype=dtype,
        remat=ProductsRemat(),
    )
