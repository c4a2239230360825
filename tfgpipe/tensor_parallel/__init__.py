"""Tensor parallelism: layers with their weights in parts on several devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.tensor_parallel.attention import TPMultiHeadAttention as TPMultiHeadAttention
    from tfgpipe.tensor_parallel.cross_entropy import OutputLoss as OutputLoss
    from tfgpipe.tensor_parallel.cross_entropy import TPCrossEntropy as TPCrossEntropy
    from tfgpipe.tensor_parallel.dense import TPDense as TPDense
    from tfgpipe.tensor_parallel.embedding import TPEmbedding as TPEmbedding
    from tfgpipe.tensor_parallel.mlp import TPMLP as TPMLP
    from tfgpipe.tensor_parallel.normalization import TPLayerNormalization as TPLayerNormalization
    from tfgpipe.tensor_parallel.sharded_layer import dense_weights as dense_weights
    from tfgpipe.tensor_parallel.sharded_layer import set_dense_weights as set_dense_weights

__all__, __getattr__, __dir__ = lazy_exports(__name__)
