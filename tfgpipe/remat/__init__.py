"""Rematerialisation: what forwards save of each microbatch, and backwards recompute.

| name | held of each microbatch in flight | recomputed at its backward |
|---|---|---|
| `stage` | the inputs of the stage | the stage |
| `layer` | the inputs of the stage | the stage, then each layer as its turn comes |
| `except_last` | the inputs of the stage | the stage, unless its turn comes at once |
| `products` | the inputs of the stage, results of products | what lies between |
| `auto` | the inputs of the stage, what there is memory for | what is cheapest |
| `none` | all activations | nothing |

Each is a value in a file of its own; so is a policy of one's own.
"""

from tfgpipe.remat.auto import AutoRemat
from tfgpipe.remat.forward_graph import DeviceStages, ForwardGraph
from tfgpipe.remat.named import NAMES, Name, RematLike, find, is_named
from tfgpipe.remat.names import NamesRemat
from tfgpipe.remat.policy import Remat
from tfgpipe.remat.products import PRODUCTS, ProductsRemat

__all__ = [
    "NAMES",
    "PRODUCTS",
    "AutoRemat",
    "DeviceStages",
    "ForwardGraph",
    "Name",
    "NamesRemat",
    "ProductsRemat",
    "Remat",
    "RematLike",
    "find",
    "is_named",
]
