"""Codecs: how values are encoded between stages.

| name | forward | backward |
|---|---|---|
| `bfloat16`, `float16` | rounded to that type | rounded to that type |
| `int8` | 255 levels, with a scale for each example | as it is: straight-through |
| `int8_channel` | 255 levels, with a scale for each channel | as it is |

Each is a value; so is a codec of one's own.
"""

from tfgpipe.stage.codecs.codec import Codec, Spec
from tfgpipe.stage.codecs.named import CodecLike, TransferDtype, find
