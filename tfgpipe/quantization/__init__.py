"""Quantization-aware training: layers that compute as they will in 8 bits."""

from tfgpipe.quantization.application import annotate, apply
from tfgpipe.quantization.comparison import Comparison, compare
from tfgpipe.quantization.config import QuantizeConfig
from tfgpipe.quantization.export import export_int8
from tfgpipe.quantization.plain import plain_copy
from tfgpipe.quantization.points import RANGE_UPDATES
from tfgpipe.quantization.post_training import quantize_after_training
from tfgpipe.quantization.ranges import (
    AllValuesRange,
    FixedRange,
    LastValueRange,
    MovingAverageRange,
    Range,
)
from tfgpipe.quantization.scheme import Scheme, default_8bit
from tfgpipe.quantization.tfmot import from_tfmot
from tfgpipe.quantization.wrapper import FakeQuantize, QuantizeWrapper

__all__ = [
    "RANGE_UPDATES",
    "AllValuesRange",
    "Comparison",
    "FakeQuantize",
    "FixedRange",
    "LastValueRange",
    "MovingAverageRange",
    "QuantizeConfig",
    "QuantizeWrapper",
    "Range",
    "Scheme",
    "annotate",
    "apply",
    "compare",
    "default_8bit",
    "export_int8",
    "from_tfmot",
    "plain_copy",
    "quantize_after_training",
]
