"""Codecs: how values are encoded between stages.

| name | forward | backward |
|---|---|---|
| `bfloat16`, `float16` | rounded to that type | rounded to that type |
| `int8` | 255 levels, with a scale for each example | as it is: straight-through |
| `int8_channel` | 255 levels, with a scale for each channel | as it is |

Each is a value; so is a codec of one's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.stage.codecs.codec import Codec as Codec
    from tfgpipe.stage.codecs.codec import Spec as Spec
    from tfgpipe.stage.codecs.named import CodecLike as CodecLike
    from tfgpipe.stage.codecs.named import TransferDtype as TransferDtype
    from tfgpipe.stage.codecs.named import argument_of as argument_of
    from tfgpipe.stage.codecs.named import find as find

__all__, __getattr__, __dir__ = lazy_exports(__name__)
