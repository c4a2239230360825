"""A dry run says what a step on GPUs would do, without any."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tfgpipe._compat import functions
from tfgpipe.accelerators import (
    DryRun,
    dry_runs,
    find,
    missing,
    placement,
    stage_functions,
    steps,
)
from tfgpipe.accelerators.hlo import hlo
from tfgpipe.accelerators.placement import HOST
from tfgpipe.runtime import step as runtime_step

K, M, ROWS, WIDTH = 2, 4, 8, 16


class Pooled(keras.layers.Layer):
    """An operation that has no kernel for GPUs."""

    def call(self, x: Any) -> Any:
        """Pools in random regions."""
        images = tf.reshape(x, [-1, 4, 4, 1])
        pooled, _, _ = tf.nn.fractional_max_pool(images, [1.0, 1.3, 1.3, 1.0], seed=1)
        return x + tf.reduce_mean(pooled)


class Looped(keras.layers.Layer):
    """A loop whose body reads a number on the host, five times."""

    def call(self, x: Any) -> Any:
        """Repeats a fake quantization whose range is computed from the input."""
        for_range = tf.stop_gradient(tf.reduce_max(x))

        def body(i: Any, y: Any) -> Any:
            return i + 1, tf.quantization.fake_quant_with_min_max_vars(
                y, -1.0, for_range
            )

        return tf.while_loop(lambda i, _: i < 5, body, [0, x])[1]


def _transformer(dtype: str) -> keras.Model:
    """A model with embeddings that have a mask, and attention with dropout."""
    x = inputs = keras.Input((6,), dtype=dtype)
    x = keras.layers.Embedding(20, 8, mask_zero=True)(x)
    for _ in range(2):
        h = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(
            x, x, use_causal_mask=True
        )
        x = keras.layers.Dropout(0.2)(keras.layers.Add()([x, h]))
    outputs = keras.layers.Dense(20)(x)
    model = tfgpipe.pipeline(
        keras.Model(inputs, outputs), num_stages=K, num_microbatches=M
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(clipnorm=1.0), loss)
    return model


def _model(*layers: keras.layers.Layer, **arguments: Any) -> keras.Model:
    dense = [keras.layers.Dense(WIDTH, name=f"dense_{i}") for i in range(2)]
    model = tfgpipe.PipelinedModel(
        [dense[0], *layers, dense[1]],
        num_stages=K,
        num_microbatches=M,
        partition=[1 + len(layers), 1],
        **{"schedule": "1f1b", **arguments},
    )
    model.compile("adam", "mse")
    return model


def _sharded() -> keras.Model:
    """Attention and perceptron in two shards, of sequences of `ROWS` microbatches."""
    x = inputs = keras.Input((6, 8))
    for _ in range(K):
        attention = tfgpipe.layers.TPMultiHeadAttention(
            2, key_dim=4, dropout=0.1, num_shards=2
        )
        x = x + attention(x, x, use_causal_mask=True)
        x = x + tfgpipe.layers.TPMLP(16, units=8, num_shards=2)(x)
    model = tfgpipe.pipeline(keras.Model(inputs, x), num_stages=K, num_microbatches=M)
    model.compile("sgd", "mse")
    return model


def _step(
    model: keras.Model, *shape: int, platform: Literal["GPU", "TPU"] | None = "GPU"
) -> steps.Step:
    spec = tf.TensorSpec(shape)
    return steps.trace(model, (spec, spec), platform=platform)


def _calls(step: steps.Step) -> dict[tf.Operation, str]:
    """Returns the calls of stage functions, with the names of these."""
    library = {f.signature.name: f for f in step.graph.as_graph_def().library.function}
    return {
        op: steps.innermost(op.node_def.attr["f"].func.name, library)
        for op in step.graph.get_operations()
        if op.type.endswith("PartitionedCall") and op.name.startswith("stage_")
    }


def _run(model: keras.Model, platform: str = "h100-80g") -> DryRun:
    spec = tf.TensorSpec([ROWS, WIDTH])
    return tfgpipe.dry_run(model, batch=(spec, spec), platform=platform)


@pytest.fixture(scope="module")
def plain() -> DryRun:
    """Two dense layers."""
    return _run(_model())


def test_all_operations_of_dense_layers_have_kernels(plain: DryRun) -> None:
    assert not plain.on_host
    assert "Every operation on a GPU has a kernel there." in str(plain)


def test_activations_and_gradients_cross_once_a_microbatch(plain: DryRun) -> None:
    crossing = [
        (x.source, x.target, x.count, x.num_bytes)
        for x in plain.transfers
        if x.reader.startswith("stage_") and x.count == M and x.target >= 0
    ]
    size = 4 * ROWS * WIDTH
    assert sorted(crossing) == [(0, 1, M, size), (1, 0, M, size)]


def test_nobody_waits_in_the_loop_of_dense_layers(plain: DryRun) -> None:
    assert not [x for x in plain.transfers if x.in_loop and x.waits]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_nobody_waits_for_seeds_and_indices_of_a_microbatch(dtype: str) -> None:
    spec = tf.TensorSpec([ROWS, 6], dtype)
    report = tfgpipe.dry_run(
        _transformer(dtype), batch=(spec, spec), platform="h100-80g", compiles=False
    )
    waits = [x for x in report.transfers if x.waits]
    assert not [x for x in waits if x.in_loop]
    # The seeds of the layers that draw, as they are before the step.
    assert [(x.reader, x.count) for x in waits] == [("stage_host", 2)] * K
    # No index of a gradient to be added, but those of the embeddings.
    copied = {x.reader for x in report.transfers if x.source == HOST and x.in_loop}
    assert "(i)" not in copied
    assert "(segment_ids)" in copied or dtype == "int64"


def test_nobody_waits_for_the_range_of_a_fake_quantization() -> None:
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
    model = tfgpipe.PipelinedModel(
        tfgpipe.quantization.apply(layers), num_stages=K, num_microbatches=M
    )
    model.compile("adam", "mse")
    model.build((None, WIDTH))
    report = _run(model)
    assert not [x for x in report.transfers if x.in_loop and x.waits]


def test_functions_are_counted(plain: DryRun) -> None:
    calls = {(f.name, f.device): f.calls for f in plain.functions}
    names = ("stage_forward", "stage_backward")
    assert calls.items() >= {((name, p), M) for name in names for p in range(K)}
    # At least what a forward makes.
    assert all(f.peak_bytes >= 4 * ROWS // M * WIDTH for f in plain.functions)


def test_the_planner_counts_weights_as_they_are(plain: DryRun) -> None:
    weights = 4 * (WIDTH * WIDTH + WIDTH)
    assert [held.weights for held in plain.estimate.memory] == [weights, weights]
    assert [held.slots for held in plain.estimate.memory] == [2 * weights, 2 * weights]


def test_microbatches_that_are_kept_are_not_planned_as_recomputed() -> None:
    kept, stage = (_run(_model(remat=name)) for name in ("except_last", "stage"))
    assert "remat=except_last" in str(kept)
    assert kept.estimate.memory == stage.estimate.memory
    again = [each.estimate.time.recompute for each in (kept, stage)]
    assert again[0] == pytest.approx(again[1] * (M - 1) / M)


def test_a_schedule_of_ones_own_is_planned_as_it_is() -> None:
    own = tfgpipe.schedules.one_f_one_b(K, M)
    named, custom = (
        _run(_model(schedule=schedule)).estimate
        for schedule in ("1f1b", dataclasses.replace(own, name="custom"))
    )
    assert (custom.time, custom.memory) == (named.time, named.memory)


def test_functions_that_xla_compiles_are_counted() -> None:
    """Keras has XLA compile a convolution in groups, on CPUs."""
    conv = keras.layers.Conv2D(WIDTH, 1, groups=2)
    images, flat = keras.layers.Reshape((1, 1, WIDTH)), keras.layers.Flatten()
    report = _run(_model(images, conv, flat))
    assert not report.on_host
    assert all(f.peak_bytes > 0 for f in report.functions)


def test_an_operation_without_a_kernel_is_named_with_its_layer() -> None:
    report = _run(_model(Pooled(name="pooled"), remat="none"))
    found = {each.op: each for each in report.on_host}
    pooling = found["FractionalMaxPool"]
    assert report.on_host[pooling] == M
    assert pooling.name.startswith("pooled")
    (line,) = [
        x for x in str(report).splitlines() if x.startswith("FractionalMaxPool ")
    ]
    assert line.split()[-3:] == ["pooled", "GPU:0", str(M)]


def test_a_loop_counts_as_often_as_it_runs() -> None:
    report = _run(_model(Looped(name="looped"), remat="none"))
    waits = {
        x.reader: x.count
        for x in report.transfers
        if x.in_loop and x.layer.startswith("looped") and x.waits
    }
    # In the loop, and in that of its gradient.
    assert waits == {"(min)": 2 * 5 * M, "(max)": 2 * 5 * M}


def test_stages_need_no_kernels_of_tpus() -> None:
    """XLA compiles them whole; single numbers between them are all that is left."""
    report = _run(_model(), "tpu-v5e")
    assert {(x.source, x.target) for x in report.transfers} == {(0, 1), (1, 0)}
    assert not {x.op for x in report.on_host} & {"MatMul", "Relu", "Split", "AddN"}
    assert "without a kernel, compiled on demand or run on the host" in str(report)
    assert "TPU:1" in str(report)


def test_what_is_not_compiled_is_said() -> None:
    spec = tf.TensorSpec([ROWS, WIDTH])
    report = tfgpipe.dry_run(
        _model(), batch=(spec, spec), platform="h100-80g", compiles=False
    )
    assert str(report).endswith("Not compiled: compiles=False.")


def test_functions_and_updates_are_compiled() -> None:
    if packages := missing(find("h100-80g")):
        pytest.skip(f"not installed: {', '.join(packages)}")
    report = _run(_model())
    assert not report.left_out
    for each in report.functions:
        assert each.compiled is not None
        assert each.compiled.error is None
    assert sorted(report.updates) == list(range(K))
    size = 4 * (WIDTH * WIDTH + WIDTH)
    # Weights, two slots, gradients.
    assert all(4 * size <= x.argument_bytes < 5 * size for x in report.updates.values())


@pytest.mark.parametrize("schedule", tfgpipe.schedules.NAMES)
@pytest.mark.parametrize(
    ("platform", "few_operations"), [("GPU", 0), (None, 0), (None, 2**12)]
)
def test_what_is_written_in_place_is_read_by_nothing_else(
    schedule: str,
    platform: Literal["GPU"] | None,
    few_operations: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it is ordered by data alone, whatever runs at the same time.

    And there is no variable of a reference type, whose writes are ordered by nothing.
    """
    monkeypatch.setattr(runtime_step, "FEW_OPERATIONS", few_operations)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2 * K)]
    model = tfgpipe.PipelinedModel(
        layers, num_stages=2 * K, num_microbatches=M, schedule=schedule
    )
    model.compile("adam", "mse")
    step = _step(model, ROWS, WIDTH, platform=platform)
    graphs = functions.graphs_of_functions(step.graph.as_graph_def().library)
    calls, num_written = _calls(step), 0
    for name, graph in (("", step.graph), *graphs.items()):
        for op in graph.get_operations():
            assert not any(x.dtype._is_ref_dtype for x in op.outputs), op.type
            if not op.type.startswith("Inplace"):
                continue
            x = op.inputs[0]
            assert x.consumers() == [op]
            while x.op.type in ("Identity", "Reshape"):
                x, same = x.op.inputs[0], x.op
                assert x.consumers() == [same]
            assert x.op.type == "Placeholder"
            index = [each.name for each in graph.inputs].index(x.name)
            callers = [call for call, function in calls.items() if function == name]
            assert callers
            assert all(call.inputs[index].consumers() == [call] for call in callers)
            num_written += 1
    assert num_written


def test_no_shape_goes_from_shard_to_shard() -> None:
    """XLA needs those of reshapes as constants, and permutations likewise."""
    step = _step(_sharded(), ROWS, 6, 8)
    graphs = functions.graphs_of_functions(step.graph.as_graph_def().library)
    calls = _calls(step).items()
    parts = {name for op, name in calls if not placement.is_on_host(op.name)}
    for name in parts:
        passed = {x.dtype for x in (*graphs[name].inputs, *graphs[name].outputs)}
        assert tf.int32 not in passed
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in graphs[name].inputs]
        assert hlo(stage_functions._call_of(graphs[name]), *specs)


def test_platforms_of_a_kind_share_a_trace() -> None:
    model, spec = _model(), tf.TensorSpec([ROWS, WIDTH])
    platforms = [find("a100-40g"), find("h100-80g")]
    reports = dry_runs(model, batch=(spec, spec), platforms=platforms)
    first, second = reports
    assert [x.platform.name for x in (first, second)] == ["a100-40g", "h100-80g"]
    names = [[each.function for each in x.functions] for x in (first, second)]
    assert names[0] == names[1]


def test_a_model_stays_as_it_is() -> None:
    model = _model()
    model.build((None, WIDTH))
    before = [v.numpy() for v in model.variables]
    _run(model)
    after = [v.numpy() for v in model.variables]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_arrays_are_a_batch_as_well(plain: DryRun) -> None:
    x = np.zeros((ROWS, WIDTH), "float32")
    report = tfgpipe.dry_run(_model(), batch=(x, x), platform="h100-80g")
    sizes = [(each.source, each.target, each.num_bytes) for each in report.transfers]
    assert sizes == [(x.source, x.target, x.num_bytes) for x in plain.transfers]


@pytest.mark.parametrize(
    ("batch", "platform", "message"),
    [
        ((None, WIDTH), "h100-80g", "all sizes of a batch"),
        ((ROWS, WIDTH), "h100", "Did you mean h100-80g"),
    ],
)
def test_what_cannot_be_told_is_refused(
    batch: Any, platform: str, message: str
) -> None:
    spec = tf.TensorSpec(batch)
    with pytest.raises(ValueError, match=message):
        tfgpipe.dry_run(_model(), batch=(spec, spec), platform=platform)


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`batch` is what a step .* Received None"):
        tfgpipe.dry_run(_model(), batch=None, platform="h100-80g")


def test_a_model_without_a_pipeline_is_refused() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"with a pipeline.*tfgpipe\.pipeline"):
        tfgpipe.dry_run(model, batch=tf.zeros([2, 4]), platform="h100-80g")
