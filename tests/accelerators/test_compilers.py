"""The compilers of accelerators that are not there.

They are skipped without the packages of the extra `compilers`.
"""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tests.helpers.traced_stages import traced
from tfgpipe.accelerators import Compiler, find, missing, stage_functions
from tfgpipe.accelerators.hlo import hlo

ROWS, WIDTH = 256, 512
MATRICES = (tf.TensorSpec([ROWS, WIDTH]), tf.TensorSpec([WIDTH, WIDTH]))


@pytest.fixture(params=["tpu-v5e", "h100-80g"])
def compiler(request):
    if packages := missing(find(request.param)):
        pytest.skip(f"not installed: {', '.join(packages)}")
    with Compiler(request.param) as made:
        yield made


def test_a_product_costs_what_it_does_and_holds_what_it_takes(compiler):
    compiled = compiler.compile(hlo(tf.matmul, *MATRICES))
    assert compiled.error is None
    assert compiled.flops == pytest.approx(2 * ROWS * WIDTH * WIDTH, rel=0.01)
    assert compiled.argument_bytes == 4 * (ROWS * WIDTH + WIDTH * WIDTH)
    assert compiled.output_bytes == pytest.approx(4 * ROWS * WIDTH, rel=0.01)
    total = compiled.argument_bytes + compiled.output_bytes
    # Each once, though a TPU copies to the memory on its chip; parts of sums twice.
    most = 1.1 * total + 2 * compiled.temp_bytes
    assert 0.99 * total <= compiled.bytes_accessed <= most
    assert compiled.code_bytes > 1000
    assert set(compiled.collectives.values()) == {0}


def test_a_convolution_costs_what_it_does(compiler):
    """Of cuDNN's calls XLA counts nothing."""

    def gradients(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = tf.nn.conv2d(x, kernel, strides=1, padding="VALID")
        return [y, *tape.gradient(y, [x, kernel], y)]

    specs = tf.TensorSpec([8, 34, 34, 16]), tf.TensorSpec([3, 3, 16, 32])
    compiled = compiler.compile(hlo(gradients, *specs))
    flops = 3 * 2 * (8 * 32 * 32 * 32) * (3 * 3 * 16)
    assert compiled.flops == pytest.approx(flops, rel=0.1)
    once = 4 * (2 * (8 * 34 * 34 * 16) + 8 * 32 * 32 * 32 + 2 * (3 * 3 * 16 * 32))
    assert compiled.bytes_accessed >= 0.99 * once


def test_an_order_across_an_operation_in_place_is_left_out():
    @tf.function(autograph=False)
    def function(x, row):
        made = tf.identity(x)
        written = tf.raw_ops.InplaceUpdate(x=made, i=[0], v=row)
        with tf.control_dependencies([made]):
            return written + 1.0

    x, row = tf.zeros([2, 3]), tf.ones([1, 3])
    graph = function.get_concrete_function(x, row).graph
    call = tf.function(stage_functions._call_of(graph), autograph=False)
    (result,) = call(x, row)
    assert result.numpy().tolist() == [[2.0] * 3, [1.0] * 3]


def test_functions_of_a_stage_are_compiled(compiler):
    stack = [keras.layers.Dense(4, activation="gelu") for _ in range(2)]
    _, stage = traced(stack, platform="tpu", num_microbatches=2)
    for name in ("forward", "backward"):
        function = getattr(stage.with_remat, name).function
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in function.graph.inputs]
        assert compiler.compile(hlo(function, *specs)).error is None


def test_a_module_that_fails_leaves_the_compiler_as_it_was(compiler):
    wrong = compiler.compile(b"not a module")
    assert "proto" in wrong.error
    assert compiler.compile(hlo(tf.matmul, *MATRICES)).error is None


def test_two_compilers_of_one_kind_run_at_once(compiler):
    """Libtpu would let one process have the machine's TPUs."""
    module = hlo(tf.matmul, *MATRICES)
    with Compiler(compiler.platform) as other:
        assert compiler.compile(module).error is None
        assert other.compile(module).error is None


def test_what_does_not_fit_is_an_error():
    if packages := missing(find("tpu-v5e")):
        pytest.skip(f"not installed: {', '.join(packages)}")
    module = hlo(tf.matmul, tf.TensorSpec([60_000, 80_000]), tf.TensorSpec([80_000, 8]))
    with Compiler("tpu-v5e") as compiler:
        assert "Ran out of memory on HBM" in compiler.compile(module).error


def test_a_partitioned_module_has_collectives(compiler):
    """A product summed over two devices, each with half of the terms."""

    def halves(x, dimensions):
        # XLA's `OpSharding`: tiled (3), so many tiles in each dimension, devices 0, 1.
        sharding = b"\x08\x03\x1a\x02" + bytes(dimensions) + b"\x22\x02\x00\x01"
        attributes = {
            "T": tf.compat.v1.AttrValue(type=x.dtype.as_datatype_enum),
            "sharding": tf.compat.v1.AttrValue(s=sharding),
        }
        graph = tf.compat.v1.get_default_graph()
        made = graph.create_op("XlaSharding", [x], [x.dtype], attrs=attributes)
        return tf.ensure_shape(made.outputs[0], x.shape)

    module = hlo(
        lambda x, y: tf.matmul(halves(x, (1, 2)), halves(y, (2, 1))), *MATRICES
    )
    compiled = compiler.compile(module, num_partitions=2)
    assert compiled.error is None
    assert sum(compiled.collectives.values()) > 0
    assert compiled.collectives["all-reduce"] > 0
    assert compiled.flops == pytest.approx(ROWS * WIDTH * WIDTH, rel=0.02)
    alone = compiler.compile(module)
    assert set(alone.collectives.values()) == {0}


def test_an_update_of_variables_is_compiled(compiler):
    """TensorFlow copies what it assigns, and StableHLO has no copy.

    The gradient of a slice of a vector to a scalar pads a scalar by nothing, which XLA
    writes as it does not read it.
    """
    weight = keras.Variable(keras.ops.ones([WIDTH, WIDTH]))
    optimizer = keras.optimizers.Adam()
    optimizer.build([weight])

    def update(gradient):
        optimizer.apply([gradient], [weight])
        with tf.GradientTape() as tape:
            x = tf.reduce_sum(weight.value)
            tape.watch(x)
            y = x[...] * 2.0
        return tape.gradient(y, x)

    module = hlo(update, MATRICES[1])
    assert b"StridedSliceGrad" in module
    compiled = compiler.compile(module)
    assert compiled.error is None
    assert compiled.argument_bytes > 4 * 4 * WIDTH * WIDTH  # Two slots as well.


def test_a_product_that_triton_cannot_tile_is_of_cublas():
    """With the GPU XLA would try kernels, and leave out those that fail."""
    if packages := missing(find("h100-80g")):
        pytest.skip(f"not installed: {', '.join(packages)}")

    def function(x, y):
        rows = tf.reshape(tf.transpose(x, (0, 3, 1, 2)), [32 * 13, 64])
        return tf.matmul(rows, y, transpose_b=True)

    module = hlo(function, tf.TensorSpec([32, 4, 16, 13]), tf.TensorSpec([64, 64]))
    with Compiler("h100-80g") as compiler:
        compiled = compiler.compile(module)
    assert compiled.error is None
    assert "cuBLAS" in compiled.remark
    assert compiled.flops == pytest.approx(2 * 32 * 13 * 64 * 64, rel=0.01)
