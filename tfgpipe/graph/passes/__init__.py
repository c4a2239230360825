"""Rewritings of joint graphs, `JointGraph -> JointGraph`, each in a file of its own."""

from tfgpipe.graph.passes.fusion import ChainCache
from tfgpipe.graph.passes.listed import platform_passes
from tfgpipe.graph.passes.matmul import multiply

__all__ = ["ChainCache", "multiply", "platform_passes"]
