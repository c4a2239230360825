"""Contract of the private names behind `tfgpipe._compat.kernels`."""

from __future__ import annotations

import tensorflow as tf

from tfgpipe._compat import kernels


def _node(build: object) -> tf.compat.v1.NodeDef:
    with tf.Graph().as_default():
        return build().op.node_def  # type: ignore[operator]


def test_a_kernel_has_its_types_and_its_arguments_on_the_host() -> None:
    (found,) = kernels.registered_kernels("StatelessRandomGetKeyCounter")[:1]
    assert isinstance(found, kernels.Kernel)
    on_gpus = [
        each
        for each in kernels.registered_kernels("Reshape")
        if each.device == "GPU" and each.types.get("T") == {tf.float32.as_datatype_enum}
    ]
    assert on_gpus
    assert all(each.host_arguments == {"shape"} for each in on_gpus)


def test_a_kernel_is_found_by_the_types_of_an_operation() -> None:
    floats = _node(lambda: tf.add(tf.zeros([2]), tf.zeros([2])))
    found = kernels.kernel_for(floats, "GPU")
    assert found is not None
    assert not found.host_arguments
    integers = _node(lambda: tf.add(tf.zeros([2], tf.int32), tf.zeros([2], tf.int32)))
    found = kernels.kernel_for(integers, "GPU")
    # TensorFlow adds these on the host.
    assert found is not None
    assert found.host_arguments == {"x", "y", "z"}


def test_some_operations_have_kernels_for_cpus_alone() -> None:
    node = _node(lambda: tf.strings.join(["a", "b"]))
    assert kernels.kernel_for(node, "GPU") is None
    assert kernels.kernel_for(node, "CPU") is not None


def test_the_operations_with_kernels_are_known() -> None:
    found = kernels.operations_with_kernels()
    assert {"MatMul", "Identity", "XlaLaunch"} <= set(found)
    assert found == sorted(set(found))
