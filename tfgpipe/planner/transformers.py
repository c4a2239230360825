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
values are of width v = g w / a, and 2 w v stands for two of the w^2. Heads of a width
of their own, d in place of w / a, make queries and contexts of width a d. A gated
perceptron (Shazeer 2020) has 3 w h parameters, and saves four tensors of width h: the
gate before and after its activation, the other factor, and the product. Flash attention
(Dao et al. 2022) saves no scores; the backward computes them again, 2 n^2 w FLOPs.

Frozen weights have neither gradients nor slots, and a backward takes as many FLOPs of
their products as a forward: gradients of inputs alone. Adapters of rank r (Hu et al.
2022) add r (x + y) trained weights to each matrix of x by y, and 6 n FLOPs for each.

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
    weight_dtype: str = "float32",
    loss_dtype: str | None = None,
    num_key_value_heads: int | None = None,
    head_width: int | None = None,
    gated: bool = False,
    flash: bool = False,
    tied: bool = False,
    num_frozen_layers: int = 0,
    lora_rank: int = 0,
    num_experts: int = 1,
    top_k: int = 1,
    sequence_parallel: bool = False,
    shards_vocabulary: bool = False,
) -> Workload:
    """Returns the workload: embedding, blocks, softmax.

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
        dtype: Dtype of activations and products.
        weight_dtype: Dtype of weights as they are stored, of their gradients and slots.
            That of products for half precision everywhere, in which no copies are held.
        loss_dtype: Dtype of logits in the loss, which holds them and their gradients.
            Defaults to `dtype`.
        num_key_value_heads: g, which divides a; then T divides g. Defaults to a.
        head_width: Width of a head. Defaults to w / a.
        gated: True for perceptrons with a gate, as of Llama.
        flash: True for attention that saves no scores.
        tied: True for a softmax with the embedding's weights, which are counted once,
            where the embedding is: a last stage's copy is left out.
        num_frozen_layers: Number of the first blocks whose weights are frozen, and with
            them the embedding's. They are charged with gradients of inputs, which those
            of the first stage do not need.
        lora_rank: Rank of the adapters at each matrix of the blocks, all other weights
            frozen; 0 for none.
        num_experts: E, which T divides if it is not 1.
        top_k: k.
        sequence_parallel: True for T shards that hold all activations of a block in
            parts (Korthikanti et al. 2022, section 4.2.2), with the same exchanges.
        shards_vocabulary: True for an embedding and a softmax in T shards as well, if
            T divides the vocabulary and the heads.

    Raises:
        ValueError: If a size is no integer of at least 1, the heads do not divide the
            width, or those of keys the others, there are fewer experts than a token
            takes, more blocks are frozen than there are, adapters are for frozen blocks
            or for experts, or a dtype is unknown.
    """
    shared = num_heads if num_key_value_heads is None else num_key_value_heads
    sizes = _Sizes(
        width=width,
        mlp_width=mlp_width,
        length=length,
        num_heads=num_heads,
        num_key_value_heads=shared,
        head_width=max(width // num_heads, 1) if head_width is None else head_width,
        vocabulary=vocabulary,
        num_experts=num_experts,
        top_k=top_k,
    )
    named = zip(
        ("num_layers", *_Sizes.__annotations__), (num_layers, *sizes), strict=True
    )
    for size, count in named:
        argument_checks.check_count(size, count, most=2**31)
    for size, count in (
        ("num_frozen_layers", num_frozen_layers),
        ("lora_rank", lora_rank),
    ):
        argument_checks.check_count(size, count, least=0, most=2**31)
    of_loss = dtype if loss_dtype is None else loss_dtype
    for argument, value in (
        ("dtype", dtype),
        ("weight_dtype", weight_dtype),
        ("loss_dtype", of_loss),
    ):
        choices = ("float32", "bfloat16", "float16")
        argument_checks.check_choice(argument, value, choices)
    _check_heads(sizes, own_width=head_width is not None)
    _check_trained(num_frozen_layers, num_layers, lora_rank, sizes)
    numbers = _Numbers(*map(dtype_bytes, (dtype, weight_dtype, of_loss)))
    whole = math.gcd(vocabulary, shared) if shards_vocabulary else 1
    adapted, frozen = lora_rank > 0, num_frozen_layers > 0
    form = _Form(gated, flash, sequence_parallel, lora_rank)
    embedding = _embedding(sizes, numbers, trained=not (adapted or frozen), most=whole)
    learns = not (adapted or (tied and frozen))
    head = _head(sizes, numbers, trained=learns, tied=tied, most=whole)
    block, first = (
        _block(sizes, numbers, form, trained=trained)
        for trained in (not adapted, False)
    )
    blocks = [
        dataclasses.replace(
            first if i < num_frozen_layers else block, name=f"block {i}"
        )
        for i in range(num_layers)
    ]
    return Workload(
        name=name,
        layers=(embedding, *blocks, head),
        dtype=dtype,
        remat=ProductsRemat(),
    )


class _Sizes(NamedTuple):
    """Sizes of a model: w, h, n, a, g, d, the vocabulary, E and k."""

    width: int
    mlp_width: int
    length: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    vocabulary: int
    num_experts: int
    top_k: int


class _Numbers(NamedTuple):
    """Bytes of a number.

    Attributes:
        activation: Bytes of one of an activation.
        weight: Bytes of a stored weight.
        loss: Bytes of a logit in the loss.
    """

    activation: int
    weight: int
    loss: int


class _Form(NamedTuple):
    """Form of a block: gated, flash, sequence_parallel and lora_rank."""

    gated: bool
    flash: bool
    sequence_parallel: bool
    lora_rank: int


def _check_heads(sizes: _Sizes, *, own_width: bool) -> None:
    """Raises an error if heads do not divide what they are of."""
    w, a, g = sizes.width, sizes.num_heads, sizes.num_key_value_heads
    if not own_width and w % a:
        raise ValueError(
            "`num_heads` must divide `width`. Received "
            f"num_heads={a} and width={w}. Give `head_width` if heads have one of "
            "their own."
        )
    if a % g:
        raise ValueError(
            "`num_key_value_heads` must divide `num_heads`. Received "
            f"num_key_value_heads={g} and num_heads={a}."
        )
    if sizes.num_experts < sizes.top_k:
        raise ValueError(
            "A token takes `top_k` of the experts. Received "
            f"num_experts={sizes.num_experts} and top_k={sizes.top_k}."
        )


def _check_trained(
    num_frozen_layers: int, num_layers: int, rank: int, sizes: _Sizes
) -> None:
    """Raises an error if weights cannot be frozen, or adapted, as asked."""
    if num_frozen_layers > num_layers:
        raise ValueError(
            "`num_frozen_layers` is of the blocks that there are. Received "
            f"num_frozen_layers={num_frozen_layers} and num_layers={num_layers}."
        )
    if rank and (num_frozen_layers or sizes.num_experts > 1):
        raise ValueError(
            "Adapters are at the matrices of all blocks, which have no experts. "
            f"Received lora_rank={rank}, num_frozen_layers={num_frozen_layers} and "
            f"num_experts={sizes.num_experts}."
        )


def _embedding(
    sizes: _Sizes, numbers: _Numbers, *, trained: bool, most: int
) -> LayerCost:
    """Returns the embedding, in at most so many shards."""
    count = sizes.vocabulary * sizes.width
    crossing = numbers.activation * sizes.length * sizes.width
    return LayerCost(
        name="embedding",
        weights=Weights(count, None if trained else 0, numbers.weight),
        traffic=PassCost(2 * crossing, 2 * crossing),
        tensors=TensorBytes(inputs=4 * sizes.length, outputs=crossing),
        positions=sizes.length,
        max_shards=most,
        # Of rows in its forward, and of the softmax's gradients in a backward.
        num_reductions=1,
    )


def _head(
    sizes: _Sizes, numbers: _Numbers, *, trained: bool, tied: bool, most: int
) -> LayerCost:
    """Returns the softmax, in at most so many shards."""
    n, products = sizes.length, 2 * sizes.length * sizes.width * sizes.vocabulary
    crossing = numbers.activation * n * sizes.width
    logits = numbers.loss * n * sizes.vocabulary
    # Gradients of logits in another dtype than products take are cast.
    cast = 0 if numbers.loss == numbers.activation else numbers.activation
    count = 0 if tied else sizes.vocabulary * sizes.width
    backward = (1 + trained) * products
    return LayerCost(
        name="softmax",
        weights=Weights(count, None if trained else 0, numbers.weight),
        flops=PassCost(products, backward, recompute=0.0),
        traffic=PassCost(4 * logits, 4 * logits),
        tensors=TensorBytes(
            saved=crossing + logits,
            workspace=logits + cast * n * sizes.vocabulary,
            inputs=crossing,
            outputs=logits,
            replicated=crossing,
            saves_inputs=True,
            kept=logits,
        ),
        positions=n,
        max_shards=most,
        num_reductions=0,  # Counted with the embedding: of its inputs' gradients.
        num_tokens=sizes.vocabulary,
    )


def _block(
    sizes: _Sizes, numbers: _Numbers, form: _Form, *, trained: bool
) -> LayerCost:
    """Returns a block, whose own weights are trained or frozen."""
    w, h, n, a, g, d, _, E, k = sizes
    size, r = numbers.activation, form.lora_rank
    u, v = a * d, g * d
    factors = 2 if form.gated else 1  # Of width h, whose product is narrowed.
    scores = 0 if form.flash else a * n * n
    attention, perceptron = 2 * w * u + 2 * w * v, (1 + factors) * w * h
    router, routed = (w * E, 2 * k * w) if E > 1 else (0, 0)
    # Adapters: queries and outputs, keys and values, and the perceptron's matrices.
    adapters = r * (2 * (w + u) + 2 * (w + v) + (1 + factors) * (w + h))
    of_weights = 2 * n * (attention + router + k * perceptron)
    of_scores, of_adapters = 4 * n * n * u, 2 * n * adapters
    again = 2 * n * n * u if form.flash else 0
    backward = (1 + trained) * of_weights + 2 * (of_scores + of_adapters) + again
    saved = size * (
        n * (4 * w + 2 * u + 2 * v + 2 * factors * k * h + routed)
        + n * r * (5 + factors)
        + 2 * scores
    )
    # Queries, keys, values, scores, contexts, and both ends of the perceptron.
    kept = size * (n * (2 * w + 2 * u + 2 * v + factors * k * h) + scores)
    biases = 5 * w + u + 2 * v + E * (w + factors * h)
    count = attention + router + E * perceptron + biases + adapters
    crossing = size * n * w
    return LayerCost(
        name="block",
        weights=Weights(count, None if trained else adapters, numbers.weight),
        flops=PassCost(of_weights + of_scores + of_adapters, backward, recompute=0.0),
        # Each saved tensor is written once and read once, in the backward twice.
        traffic=PassCost(2 * saved, 4 * saved),
        tensors=TensorBytes(
            saved=saved,
            # Of the softmax, or the perceptron, the gradients of output and input.
            workspace=2 * size * max(factors * n * k * h, scores),
            inputs=crossing,
            outputs=crossing,
            replicated=0 if form.sequence_parallel else 5 * crossing,
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
