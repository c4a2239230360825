"""Analysis and splitting of traced TensorFlow graphs; it knows nothing of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.graph import eager_run as eager_run
    from tfgpipe.graph import fake_quant as fake_quant
    from tfgpipe.graph import flops as flops
    from tfgpipe.graph import fusion as fusion
    from tfgpipe.graph import matmul as matmul
    from tfgpipe.graph import memory as memory
    from tfgpipe.graph import partitioner as partitioner
    from tfgpipe.graph import reader as reader
    from tfgpipe.graph.multi_device import MultiDeviceFunction as MultiDeviceFunction

__all__, __getattr__, __dir__ = lazy_exports(__name__)
