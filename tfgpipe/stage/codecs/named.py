"""The named codecs."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from tfgpipe._util import argument_checks
from tfgpipe.stage.codecs.cast import BFloat16Codec, Float16Codec
from tfgpipe.stage.codecs.codec import Codec
from tfgpipe.stage.codecs.int8 import ChannelInt8Codec, Int8Codec
from tfgpipe.stage.codecs.uncompressed import Uncompressed

# The name of a codec; None is that of no compression.
TransferDtype = Literal["bfloat16", "float16", "int8", "int8_channel"]

# An argument `transfer_dtype`.
CodecLike: TypeAlias = TransferDtype | Codec | None

_CODECS: dict[str | None, Codec] = {
    None: Uncompressed(),
    **{
        codec.name: codec
        for codec in (BFloat16Codec(), Float16Codec(), Int8Codec(), ChannelInt8Codec())
    },
}


def find(transfer_dtype: Any) -> Codec:
    """Returns the codec of a name, or the codec itself.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(transfer_dtype, Codec):
        return transfer_dtype
    choices = (None, *get_args(TransferDtype))
    hint = " Or give a `tfgpipe.Codec` of your own."
    name = argument_checks.check_choice(
        "transfer_dtype", transfer_dtype, choices, hint=hint
    )
    return _CODECS[name]
