"""Tensor parallelism: layers with their weights sharded over several devices.

Importing this package registers the layers with Keras, so that files with them load.
"""

from tfgpipe.tensor_parallel.attention import MultiHeadAttention as TPMultiHeadAttention
from tfgpipe.tensor_parallel.cross_entropy import OutputLoss, TPCrossEntropy
from tfgpipe.tensor_parallel.dense import TPMLP
from tfgpipe.tensor_parallel.dense import Dense as TPDense
from tfgpipe.tensor_parallel.embedding import Embedding as TPEmbedding
from tfgpipe.tensor_parallel.experts import TPMixtureOfExperts
from tfgpipe.tensor_parallel.normalization import (
    LayerNormalization as TPLayerNormalization,
)
from tfgpipe.tensor_parallel.positionwise import TPPositionwise
from tfgpipe.tensor_parallel.sequence import TPSequenceAttention
from tfgpipe.tensor_parallel.sharded_layer import full_weights, set_full_weights

__all__ = [
    "TPMLP",
    "OutputLoss",
    "TPCrossEntropy",
    "TPDense",
    "TPEmbedding",
    "TPLayerNormalization",
    "TPMixtureOfExperts",
    "TPMultiHeadAttention",
    "TPPositionwise",
    "TPSequenceAttention",
    "full_weights",
    "set_full_weights",
]
