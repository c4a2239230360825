"""Quantization-aware training: layers that compute as they will in 8 bits.

Importing this package registers its layers, observers and configurations with Keras, so
that files with them load.
"""

from tfgpipe.quantization.application import apply
from tfgpipe.quantization.config import QuantizeConfig, annotate
from tfgpipe.quantization.export import export_int8
from tfgpipe.quantization.layers import FakeQuantize, QuantizeWrapper
from tfgpipe.quantization.model_copies import plain_copy, quantize_after_training
from tfgpipe.quantization.ranges import (
    AllValuesRange,
    FixedRange,
    LastValueRange,
    MovingAverageRange,
)
from tfgpipe.quantization.scheme import default_8bit
from tfgpipe.quantization.tflite import compare
from tfgpipe.quantization.tfmot import from_tfmot

__all__ = [
    "AllValuesRange",
    "FakeQuantize",
    "FixedRange",
    "LastValueRange",
    "MovingAverageRange",
    "QuantizeConfig",
    "QuantizeWrapper",
    "annotate",
    "apply",
    "compare",
    "default_8bit",
    "export_int8",
    "from_tfmot",
    "plain_copy",
    "quantize_after_training",
]
