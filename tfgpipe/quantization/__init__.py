"""Quantization-aware training: layers that compute as they will in 8 bits."""

from tfgpipe.quantization.application import annotate, apply
from tfgpipe.quantization.config import QuantizeConfig
from tfgpipe.quantization.points import RANGE_UPDATES
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
    "default_8bit",
    "from_tfmot",
]
