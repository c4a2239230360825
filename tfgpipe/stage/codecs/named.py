"""The named codecs."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from tfgpipe._util import choices
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
    return choices.find(
        "transfer_dtype", transfer_dtype, Codec, _CODECS, public="tfgpipe.Codec"
    )
