"""What TensorFlow tells of what has run."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfgpipe._compat import executed


@tf.function
def _two_devices(x):
    with tf.device("CPU:0"):
        y = tf.cumsum(x)
    with tf.device("CPU:1"):
        return tf.math.cumprod(y)


def test_graphs_name_the_device_of_each_node_and_what_is_sent():
    graphs = executed.partition_graphs(lambda: _two_devices(tf.ones([3])))
    nodes = [node for graph in graphs for node in graph.node]
    found = {n.op: n.device[-5:] for n in nodes if n.op in ("Cumsum", "Cumprod")}
    assert found == {"Cumsum": "CPU:0", "Cumprod": "CPU:1"}
    sent = [n for n in nodes if n.op == "_Send"]
    ends = [[n.attr[f"{x}_device"].s[-5:] for x in ("send", "recv")] for n in sent]
    assert ends == [[b"CPU:0", b"CPU:1"]]


def test_graphs_are_of_functions_that_run_for_the_first_time():
    twice = tf.function(lambda x: 2 * x)
    x = tf.ones([3])
    first, again = (executed.partition_graphs(lambda: twice(x)) for _ in range(2))
    assert first
    assert not again


def test_the_profiler_writes_what_ran_on_the_host(tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    tf.linalg.matmul(tf.ones([64, 64]), tf.ones([64, 64]))
    tf.profiler.experimental.stop()
    events = executed.profiled_events(tmp_path)
    assert {e.device for e in events} >= {"/host:CPU"}
    assert any("MatMul" in e.name for e in events)
    assert all(e.end >= e.start for e in events)


def test_times_of_streams_are_of_one_clock(tmp_path):
    """Offsets are picoseconds from the start of their line, which is nanoseconds."""
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/device:GPU:0")
    plane.event_metadata[7].name = "MemcpyD2D"
    line = plane.lines.add(name="Stream #14", timestamp_ns=2_000_000_000)
    line.events.add(metadata_id=7, offset_ps=10**12, duration_ps=5 * 10**11)
    (tmp_path / "a.xplane.pb").write_bytes(space.SerializeToString())
    (event,) = executed.profiled_events(tmp_path)
    assert event == executed.ProfiledEvent(
        "/device:GPU:0", "Stream #14", "MemcpyD2D", pytest.approx(3), pytest.approx(3.5)
    )
