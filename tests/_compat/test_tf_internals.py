"""The contract of TensorFlow's strategies and scopes."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers.subprocesses import interpret
from tests.helpers.versions import MOVED
from tfgpipe._compat import tf_internals
from tfgpipe.cluster.addresses import free_ports
from tfgpipe.distribution import replicated_strategy as strategy_lib


def test_a_mirrored_strategy_takes_our_devices():
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    with strategy.scope(), strategy.stage_scope(0):
        variable = tf.Variable([1.0])
    devices = [v.device for v in strategy.experimental_local_results(variable)]
    assert [device[-5:] for device in devices] == ["CPU:0", "CPU:2"], MOVED
    with strategy.scope():
        variable = tf.Variable([1.0])
    devices = [v.device for v in strategy.experimental_local_results(variable)]
    assert [device[-5:] for device in devices] == ["CPU:1", "CPU:3"], MOVED


def test_there_is_a_scope_of_no_strategy():
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    with strategy.scope():
        with tf_internals.without_strategy():
            assert not tf.distribute.has_strategy(), MOVED
            assert not tf.distribute.in_cross_replica_context(), MOVED
        assert tf.distribute.get_strategy() is strategy, MOVED


@pytest.mark.parametrize("eager", [False, True])
def test_a_function_that_makes_variables_is_traced_twice(eager):
    """And once if they are made outside of it."""
    variables, traces = [], []
    scope = tf_internals.eager_variables if eager else tf.init_scope

    @tf.function
    def step(x):
        traces.append(x)
        if not variables:
            with scope():
                variables.append(tf.Variable(2.0))
        return x * variables[0]

    assert step(tf.constant(3.0)) == 6
    assert len(traces) == (1 if eager else 2), MOVED


def test_variables_outside_of_functions_are_those_of_the_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    made = []

    @tf.function
    def step():
        if not made:
            with tf_internals.eager_variables(), strategy.scope():
                made.append(tf.Variable(2.0))
        return made[0] + 1.0

    assert step() == 3
    assert len(strategy.experimental_local_results(made[0])) == 2


@pytest.mark.parametrize("devices", [("CPU:5", "CPU:6"), ("CPU:5",)])
def test_a_variable_is_colocated_with_devices_of_a_strategy(devices):
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    with strategy.scope():
        colocated = tf_internals.colocation(devices)
        with tf.variable_creator_scope(
            lambda create, **kwargs: create(**{**kwargs, "colocate_with": colocated})
        ):
            variable = tf.Variable([1.0])
    copies = strategy.experimental_local_results(variable)
    assert [copy.device[-5:] for copy in copies] == list(devices), MOVED


def test_a_strategy_reads_datasets_where_it_is_told_to():
    """Its devices stand for those of another host."""
    strategy = tf.distribute.MirroredStrategy(["CPU:5"])
    host = "/job:worker/replica:0/task:0/device:CPU:0"
    strategy.extended._input_workers_devices = ((host, ("CPU:5",)),)
    tf_internals.read_datasets_here(strategy)
    dataset = tf.data.Dataset.range(2)
    # On a host that is not there no iterator could be made.
    (first, second) = strategy.experimental_distribute_dataset(dataset)
    assert (int(first), int(second)) == (0, 1), MOVED


def test_a_strategy_makes_a_variable_on_one_replica_alone():
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    with strategy.scope(), strategy_lib.device_scope(("CPU:5",)):
        variable = tf.Variable([1.0])
    assert variable.device.endswith("CPU:5"), MOVED
    assert strategy.experimental_local_results(variable) == (variable,), MOVED


def test_tensorflow_gives_silent_processes_up_when_it_is_told_to():
    """In a process of its own, since TensorFlow must not have started."""
    (port,) = free_ports(1)
    config = {
        "cluster": {"worker": [f"127.0.0.1:{port}"]},
        "task": {"type": "worker", "index": 0},
    }
    code = (
        "import tensorflow as tf\n"
        "from tensorflow.python.eager import context\n"
        "from tfgpipe._compat import tf_internals\n"
        "resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()\n"
        f"tf_internals.{tf_internals.set_heartbeat_timeout.__name__}"
        "(resolver.cluster_spec(), 45.0)\n"
        "tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)\n"
        "found = context.context().config.experimental.coordination_config\n"
        "(job,) = found.coordinated_job_list\n"
        "print(found.heartbeat_timeout_in_ms, found.service_type, job.num_tasks)\n"
    )
    run = interpret(code, TF_CONFIG=json.dumps(config))
    assert run.stdout == "45000 standalone 1\n", MOVED + run.stderr
