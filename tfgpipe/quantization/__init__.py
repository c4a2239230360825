"""Quantization-aware training: layers that compute as they will in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.quantization.application import annotate as annotate
    from tfgpipe.quantization.application import apply as apply
    from tfgpipe.quantization.comparison import Comparison as Comparison
    from tfgpipe.quantization.comparison import compare as compare
    from tfgpipe.quantization.config import QuantizeConfig as QuantizeConfig
    from tfgpipe.quantization.export import export_int8 as export_int8
    from tfgpipe.quantization.plain import plain_copy as plain_copy
    from tfgpipe.quantization.points import RANGE_UPDATES as RANGE_UPDATES
    from tfgpipe.quantization.post_training import quantize_after_training as quantize_after_training
    from tfgpipe.quantization.ranges import AllValuesRange as AllValuesRange
    from tfgpipe.quantization.ranges import FixedRange as FixedRange
    from tfgpipe.quantization.ranges import LastValueRange as LastValueRange
    from tfgpipe.quantization.ranges import MovingAverageRange as MovingAverageRange
    from tfgpipe.quantization.ranges import Range as Range
    from tfgpipe.quantization.scheme import Scheme as Scheme
    from tfgpipe.quantization.scheme import default_8bit as default_8bit
    from tfgpipe.quantization.tfmot import from_tfmot as from_tfmot
    from tfgpipe.quantization.wrapper import FakeQuantize as FakeQuantize
    from tfgpipe.quantization.wrapper import QuantizeWrapper as QuantizeWrapper

__all__, __getattr__, __dir__ = lazy_exports(__name__)
