"""Quantization-aware training: layers that compute as they will in 8 bits.

Importing this package registers its layers, observers and configurations with Keras, so
that files with them load. Functions are loaded from their modules on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports
from tfgpipe.quantization.config import QuantizeConfig as QuantizeConfig
from tfgpipe.quantization.config import annotate as annotate
from tfgpipe.quantization.layers import FakeQuantize as FakeQuantize
from tfgpipe.quantization.layers import QuantizeWrapper as QuantizeWrapper
from tfgpipe.quantization.ranges import AllValuesRange as AllValuesRange
from tfgpipe.quantization.ranges import FixedRange as FixedRange
from tfgpipe.quantization.ranges import LastValueRange as LastValueRange
from tfgpipe.quantization.ranges import MovingAverageRange as MovingAverageRange
from tfgpipe.quantization.tfmot import from_tfmot as from_tfmot

if TYPE_CHECKING:
    from tfgpipe.quantization.application import apply as apply
    from tfgpipe.quantization.export import export_int8 as export_int8
    from tfgpipe.quantization.model_copies import plain_copy as plain_copy
    from tfgpipe.quantization.model_copies import (
        quantize_after_training as quantize_after_training,
    )
    from tfgpipe.quantization.scheme import default_8bit as default_8bit
    from tfgpipe.quantization.tflite import compare as compare

__all__, __getattr__, __dir__ = lazy_exports(__name__)
