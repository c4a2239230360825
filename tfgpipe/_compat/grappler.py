"""Private TensorFlow API: Grappler, the graph optimizer, on virtual devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.grappler import cluster, item, tf_optimizer

from tfgpipe._compat import functions

# Of DeviceProperties: numbers, and strings by name.
Properties = Mapping[str, Any]


class VirtualCluster:
    """Devices that are not there, for which Grappler optimizes and estimates.

    Args:
        devices: Full names of devices, with their properties: the fields of
            TensorFlow's `DeviceProperties`.
    """

    def __init__(self, devices: Mapping[str, Properties]) -> None:
        self._cluster = cluster.Cluster(
            devices=[
                device_properties_pb2.NamedDevice(
                    name=name,
                    properties=device_properties_pb2.DeviceProperties(**properties),
                )
                for name, properties in devices.items()
            ]
        )

    def optimize_functions(self, graph_def: Any) -> Any:
        """Returns a graph whose functions are optimized; it itself is as before.

        Args:
            graph_def: The graph, whose operations name devices of the cluster. Known
                shapes are added to operations of functions.
        """
        config = tf.compat.v1.ConfigProto()
        options = config.graph_options.rewrite_options
        options.meta_optimizer_iterations = RewriterConfig.ONE
        options.min_graph_nodes = -1
        options.function_optimization = RewriterConfig.OFF
        read = {
            x.partition(":")[0].lstrip("^") for n in graph_def.node for x in n.input
        }
        fetches = [node.name for node in graph_def.node if node.name not in read]
        optimized = tf_optimizer.OptimizeGraph(
            config, _meta_graph(graph_def, fetches), cluster=self._cluster
        )
        # Those that only what is optimized away calls are as they were. New ones are
        # branches, specialized for their call.
        found = {each.signature.name: each for each in optimized.library.function}
        result = copy.deepcopy(graph_def)
        for function in result.library.function:
            function.CopyFrom(found.pop(function.signature.name, function))
        result.library.function.extend(found.values())
        graphs = functions.graphs_of_functions(result.library)
        for function in result.library.function:
            _add_shapes(function, graphs[function.signature.name])
        return result

    def peak_bytes(self, graph: tf.Graph) -> int:
        """Returns Grappler's estimate of the memory that a function needs.

        Args:
            graph: The function, one of `functions.graphs_of_functions`.
        """
        fetches = dict.fromkeys(x.op.name for x in graph.outputs)
        measured = item.Item(_meta_graph(graph.as_graph_def(add_shapes=True), fetches))
        found = self._cluster.DeterminePeakMemoryUsage(measured)
        return sum(peak for peak, _ in found.values() if peak > 0)


def _meta_graph(graph_def: Any, fetches: Iterable[str]) -> Any:
    meta = tf.compat.v1.train.export_meta_graph(graph_def=graph_def, graph=tf.Graph())
    meta.collection_def["train_op"].node_list.value.extend(fetches)
    return meta


def _add_shapes(function: Any, graph: tf.Graph) -> None:
    """Writes the shapes of results into the operations of a function."""
    for node in function.node_def:
        operation = graph.get_operation_by_name(node.name)
        shapes = node.attr["_output_shapes"].list.shape
        del shapes[:]
        shapes.extend(x.shape.as_proto() for x in operation.outputs)
