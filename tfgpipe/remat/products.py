"""Rematerialisation of all but matrix products and convolutions."""

from __future__ import annotations

import dataclasses

from tfgpipe.remat.forward_graph import ForwardGraph
from tfgpipe.remat.policy import Remat

# Types of TensorFlow's operations.
PRODUCTS = (
    *("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D"),
    *("DepthwiseConv2dNative", "Einsum", "MatMul"),
)


@dataclasses.dataclass(frozen=True)
class ProductsRemat(Remat):
    """Saves the results of some operations, and recomputes what lies between.

    With products, nearly all work is saved and much of the memory is not: JAX's
    `checkpoint_policies.dots_saveable`; that of attention alone is the selective
    recomputation of Korthikanti et al. 2022, section 5. Operations inside the functions
    of a loop or a condition are not looked at.

    >>> from tfgpipe.remat.products import ProductsRemat
    >>> ProductsRemat(ops=("MatMul", "Exp"))
    ProductsRemat(ops=('MatMul', 'Exp'))

    Attributes:
        ops: Types of the operations: those of TensorFlow, `tf.Operation.type`.
    """

    name = "products"

    ops: tuple[str, ...] = PRODUCTS

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))

    @property
    def saves_results(self) -> bool:
        """True."""
        return True

    def saved(self, graph: ForwardGraph) -> list[str]:
        """Returns the results of operations of these types."""
        return graph.results_where(lambda _, kind: kind in self.ops)
