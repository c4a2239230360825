"""Functions as TensorFlow traces them, and the calls that Grappler leaves in them."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context


def traced(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def executed_calls(function, *arguments):
    """Returns the functions that are called, once Grappler has been over the graph."""
    current = context.context()
    current.enable_graph_collection()
    try:
        current.export_run_metadata()  # Forgets the graphs of earlier calls.
        function(*arguments)
        graphs = current.export_run_metadata().function_graphs
    finally:
        current.disable_graph_collection()
    nodes = [node for graph in graphs for node in graph.post_optimization_graph.node]
    return [x.attr["f"].func.name for x in nodes if x.op.endswith("PartitionedCall")]
