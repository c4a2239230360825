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

With g heads of keys and values, which queries share (Ainslie et al. 2023), keys and
values are of width v = g w / a, and 2 w v stands for two of the w^2. A gated perceptron
(Shazeer 2020) has 3 w h parameters, and saves four tensors of width h: the gate before
and after its activation, the other factor, and the product. Flash attention (Dao et al.
2022) saves no scores; the backward computes them again, 2 n^2 w FLOPs.

A mixture has E experts in place of the perceptron, of which a token takes k (Jiang et
al. 2024): E times its parameters and w E of the router, k times its FLOPs and k times
what it saves, with its inputs and outputs, 2 k n w.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from tfgpipe._util import argument_checks
from tfgpipe.costs import (
    LayerCost,
    PassCost,
    TensorBytes,
    Weights,
    dtype_bytes,
)
from tfgpipe.planner.shard_axes import MOST_PARTS
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
    num_key_value_heads: int | None = None,
    gated: bool = False,
    flash: bool = False,
    num_experts: int = 1,
    top_k: int = 1,
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
        num_heads: a, which T divides if it is not of positions.
        length: n.
        vocabulary: Size of the vocabulary.
        dtype: Dtype of activations and weights.
        num_key_value_heads: g, which divides a; then T divides g. Defaults to a.
        gated: True for perceptrons with a gate, as of Llama.
        flash: True for attention that saves no scores.
        num_experts: E, which T divides if it is not 1.
        top_k: k.

    Raises:
        ValueError: If a size is no integer of at least 1, the heads do not divide the
            width, or those of keys the others, there are fewer experts than a token
            takes, or the dtype is unknown.
    """
    shared = num_heads if num_key_value_heads is None else num_key_value_heads
    for argument, value in (
        ("num_key_value_heads", shared),
        ("num_layers", num_layers),
        ("width", width),
        ("mlp_width", mlp_width),
        ("num_heads", num_heads),
        ("length", length),
        ("vocabulary", vocabulary),
        ("num_experts", num_experts),
        ("top_k", top_k),
    ):
        argument_checks.check_count(argument, value, most=2**31)
    if width % num_heads:
        raise ValueError(
            "`num_heads` must divide `width`. Received "
            f"num_heads={num_heads} and width={width}."
        )
    if num_heads % shared:
        raise ValueError(
            "`num_key_value_heads` must divide `num_heads`. Received "
            f"num_key_value_heads={shared} and num_heads={num_heads}."
        )
    if num_experts < top_k:
        raise ValueError(
            "A token takes `top_k` of the experts. Received "
            f"num_experts={num_experts} and top_k={top_k}."
        )
    argument_checks.check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
    w, n, size = width, length, dtype_bytes(dtype)
    crossing = size * n * w
    sizes = _Sizes(w, mlp_width, n, num_heads, shared, num_experts, top_k)
    block = _block(sizes, size, gated=gated, flash=flash)
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
        num_tokens=vocabulary,
    )
    blocks = [dataclasses.replace(block, name=f"block {i}") for i in range(num_layers)]
    return Workload(
        name=name,
        layers=(embedding, *blocks, softmax),
        dtype=dtype,
        remat=ProductsRemat(),
    )


class _Sizes(NamedTuple):
    """Sizes of a block: w, h, n, a, g, E and k."""

    width: int
    mlp_width: int
    length: int
    num_heads: int
    num_key_value_heads: int
    num_experts: int
    top_k: int


def _block(sizes: _Sizes, size: int, *, gated: bool, flash: bool) -> LayerCost:
    """Returns a block, whose numbers have `size` bytes."""
    w, h, n, a, g, E, k = sizes
    v = g * w // a
    factors = 2 if gated else 1  # Of width h, whose product the perceptron narrows.
    scores = 0 if flash else a * n * n
    attention, perceptron = 2 * w * w + 2 * w * v, (1 + factors) * w * h
    router, routed = (w * E, 2 * k * w) if E > 1 else (0, 0)
    products = 2 * n * (attention + router + k * perceptron) + 4 * n * n * w
    again = 2 * n * n * w if flash else 0
    saved = size * (n * (6 * w + 2 * v + 2 * factors * k * h + routed) + 2 * scores)
    # Queries, keys, values, scores, contexts, and both ends of the perceptron.
    kept = size * (n * (4 * w + 2 * v + factors * k * h) + scores)
    biases = 6 * w + 2 * v + E * (w + factors * h)
    crossing = size * n * w
    return LayerCost(
        name="block",
        weights=Weights(attention + router + E * perceptron + biases),
        flops=PassCost(products, 2 * products + again, recompute=0.0),
        # Each saved tensor is written once and read once, in the backward twice.
        traffic=PassCost(2 * saved, 4 * saved),
        tensors=TensorBytes(
            saved=saved,
            # Of the softmax, or the perceptron, the gradients of output and input.
            workspace=2 * size * max(factors * n * k * h, scores),
            inputs=crossing,
            outputs=crossing,
            replicated=5 * crossing,
            saves_inputs=True,
            kept=kept,
        ),
        positions=n,
        max_shards=math.gcd(g, E) if E > 1 else g,
        max_parts=math.gcd(n, MOST_PARTS),
        # With experts only the attention's outputs are summed.
        num_reductions=1 if E > 1 else 2,
        keys_values=2 * size * n * v,
        routing=(E, k) if E > 1 else None,
    )
