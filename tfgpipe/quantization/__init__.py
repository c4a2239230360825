"""Quantization-aware training: layers that compute as they will in 8 bits."""

from tfgpipe.quantization.application import annotate, apply
from tfgpipe.quantization.config import QuantizeConfig
from tfgpipe.quantization.ranges import (
    AllValuesRange,
    FixedRange,
    LastValueRange,
    MovingAverageRange,
    Range,
)
from tfgpipe.quantization.scheme import Scheme, default_8bit
from tfgpipe.quantization.wrapper import FakeQuantize, QuantizeWrapper

__all__ = [
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
]
