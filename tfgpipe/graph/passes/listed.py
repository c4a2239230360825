"""The passes over a joint graph, in their order, for the kernels that run it.

Each is in a file of its own, and results without any of them are equal to rounding.
"""

from __future__ import annotations

import functools
from typing import Literal

from tfgpipe.graph.joint_graph import Pass
from tfgpipe.graph.passes.batched_einsum import batched_matmuls
from tfgpipe.graph.passes.batched_matmul import flat_matmuls
from tfgpipe.graph.passes.cross_entropy import fusible_cross_entropies
from tfgpipe.graph.passes.fake_quant_on_device import fake_quant_on_device
from tfgpipe.graph.passes.fusion import ChainCache, fuse_chains
from tfgpipe.graph.passes.gradient_factors import with_factors
from tfgpipe.graph.passes.matmul import faster_matmuls
from tfgpipe.graph.passes.weight_masks import defer_masks


def platform_passes(
    kernels: Literal["cpu", "gpu", "tpu"] | None,
    *,
    accumulates: bool,
    chain_cache: ChainCache | None,
) -> tuple[Pass, ...]:
    """Returns the passes over a joint graph.

    Args:
        kernels: The TensorFlow kernels that run it, or None for XLA's.
        accumulates: True if gradients are summed over microbatches.
        chain_cache: Functions of chains to share, or None if XLA compiles no chains.
    """
    found: list[Pass] = [defer_masks] if accumulates else []
    if kernels == "cpu":
        # Factors are found before the product has the form in which it runs.
        found += [batched_matmuls, flat_matmuls, with_factors, faster_matmuls]
    else:
        found.append(fake_quant_on_device)
    if chain_cache is not None:
        found.append(fusible_cross_entropies)
        found.append(functools.partial(fuse_chains, cache=chain_cache))
    return tuple(found)
