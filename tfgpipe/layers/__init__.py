"""The layers that users put into models."""

from tfgpipe.layers.split_vocabulary import SplitVocabulary
from tfgpipe.stage import normalization
from tfgpipe.tensor_parallel import (
    TPMLP,
    TPCrossEntropy,
    TPDense,
    TPEmbedding,
    TPLayerNormalization,
    TPMixtureOfExperts,
    TPMultiHeadAttention,
    TPPositionwise,
    TPSequenceAttention,
)

DeferredBatchNormalization = normalization.DeferredBatchNormalization

__all__ = [
    "TPMLP",
    "DeferredBatchNormalization",
    "SplitVocabulary",
    "TPCrossEntropy",
    "TPDense",
    "TPEmbedding",
    "TPLayerNormalization",
    "TPMixtureOfExperts",
    "TPMultiHeadAttention",
    "TPPositionwise",
    "TPSequenceAttention",
]
