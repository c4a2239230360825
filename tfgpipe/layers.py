"""The layers that users put into models."""

from tfgpipe.stage import DeferredBatchNormalization
from tfgpipe.tensor_parallel import (
    TPMLP,
    TPCrossEntropy,
    TPDense,
    TPEmbedding,
    TPLayerNormalization,
    TPMultiHeadAttention,
)

__all__ = [
    "TPMLP",
    "DeferredBatchNormalization",
    "TPCrossEntropy",
    "TPDense",
    "TPEmbedding",
    "TPLayerNormalization",
    "TPMultiHeadAttention",
]
