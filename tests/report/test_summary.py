"""What a pipelined model tells of itself: summary, repr, inputs, layers, artifacts."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare

layers = keras.layers
X = np.random.default_rng(0).standard_normal((6, 8)).astype("float32")
OPTIONS = {"num_stages": 2, "num_microbatches": 2}


@keras.saving.register_keras_serializable("test_summary")
class Own(keras.Model):
    """A model with a `call` of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(8, name="first")
        self.second = layers.Dense(8, name="second")

    def call(self, x):
        return self.second(self.first(x))


def stack() -> list:
    return [layers.Dense(8, name=f"d{i}") for i in range(4)]


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), *stack()], name="plain")


def several() -> keras.Model:
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    h = layers.Add(name="sum")([stack()[0](a), stack()[1](b)])
    outputs = {"y": layers.Dense(2, name="y")(h), "z": layers.Dense(3, name="z")(h)}
    return keras.Model({"a": a, "b": b}, outputs, name="several")


def nested() -> keras.Model:
    i = keras.Input((8,), name="i")
    inner = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, name="i0"), layers.Dense(8, name="i1")],
        name="inner",
    )
    shared = layers.Dense(8, name="shared")
    hidden = Own(name="own")(inner(shared(i)))
    return keras.Model(i, layers.Add(name="last")([shared(hidden), i]), name="nested")


def made(kind: str) -> tuple[tfgpipe.PipelinedModel, keras.Model, object]:
    """Returns a pipelined model, its plain one, and what it takes."""
    if kind in ("list", "owns"):
        each = [Own(name="own"), *stack()] if kind == "owns" else stack()
        model = tfgpipe.PipelinedModel(each, name="plain", **OPTIONS)
        model(X)
        return model, model.unpipelined(), X
    source = {"sequential": sequential, "several": several, "nested": nested}[kind]()
    x = {"a": X, "b": X[::-1]} if kind == "several" else X
    return tfgpipe.pipeline(source, **OPTIONS), source, x


KINDS = ("sequential", "several", "nested", "list", "owns")


def shown(model: keras.Model, **options) -> str:
    lines: list[str] = []
    model.summary(line_length=120, print_fn=lines.append, **options)
    return "\n".join(lines)


def cells(text: str) -> dict[str, list[str]]:
    """Returns the cells of each row of a table, by the first."""
    rows = re.findall(r"^│(.*)│$", text, re.MULTILINE)
    split = [[cell.strip() for cell in row.split("│")] for row in rows]
    return {first.split(" (")[0]: others for first, *others in split}


def test_a_summary_tells_stage_and_device_of_each_layer():
    text = shown(made("sequential")[0])
    assert text.splitlines()[:2] == [
        'Model: "plain"',
        "2 stages, 2 microbatches, schedule gpipe",
    ]
    assert cells(text) == {
        f"d{i}": [str(i // 2), f"CPU:{i // 2}", "(None, 8)", "72"] for i in range(4)
    }
    assert " Total params: 288 (1.1 KiB)\n Trainable params: 288" in text


def test_a_summary_of_a_graph_tells_what_each_layer_reads():
    model, _, _ = made("nested")
    rows = cells(shown(model, expand_nested=True, show_trainable=True))
    assert list(rows) == [
        *("i", "shared", "i0", "i1", "own", "└ first", "└ second", "last")
    ]
    stages = [stage.index for stage in model.stages for _ in stage.segment.calls]
    of_shared = sorted({stages[0], stages[4]})
    assert rows["shared"] == [
        ", ".join(map(str, of_shared)),
        "; ".join(f"CPU:{k}" for k in of_shared),
        "(None, 8)",
        "72",
        "i, own",
        "Y",
    ]
    assert rows["i"] == ["-", "-", "(None, 8)", "0", "-", "-"]
    assert rows["last"][3:] == ["0", "shared, i", "-"]
    assert rows["└ first"][0] == rows["own"][0] == str(stages[3])
    assert list(cells(shown(model, layer_range=("i0", "own")))) == ["i0", "i1", "own"]


def test_a_summary_counts_what_keras_counts():
    plain = sequential()
    plain.layers[0].trainable = False
    plain.compile("adam", "mse")
    plain.fit(X, X, verbose=0)
    of_plain: list[str] = []
    plain.summary(print_fn=of_plain.append)
    model = tfgpipe.pipeline(plain, **OPTIONS)
    for text in re.findall(r"[\w-]+ params: [\d,]+", of_plain[0]):
        assert text in shown(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_summary_shows_every_kind_of_model_before_and_after_it_is_saved(
    kind, tmp_path
):
    model, _, x = made(kind)
    before = shown(model)
    assert len(cells(before)) >= 4
    again = compare.reloaded(model, tmp_path)
    assert cells(shown(again)) == cells(before)
    assert (again.input_shape, again.output_shape) == (
        model.input_shape,
        model.output_shape,
    )
    compare.assert_allclose(*map(keras.tree.flatten, (again(x), model(x))), rtol=1e-6)


def test_a_model_that_is_not_built_tells_what_it_knows():
    model = tfgpipe.PipelinedModel(stack(), name="later", **OPTIONS)
    assert cells(shown(model))["d0"] == ["?", "?", "?", "0 (unbuilt)"]
    assert not hasattr(model, "inputs")
    assert model.get_layer("d2").name == "d2"
    assert model.compute_output_shape((None, 8)) == (None, 8)
    with pytest.raises(RuntimeError, match="known only when it is built"):
        model.export("nowhere")


def test_a_summary_is_printed_unless_keras_logs(capsys):
    model, _, _ = made("sequential")
    model.summary()
    assert capsys.readouterr().out.startswith('Model: "plain"\n')
    keras.config.disable_interactive_logging()
    try:
        model.summary()
    finally:
        keras.config.enable_interactive_logging()
    assert not capsys.readouterr().out


def test_columns_end_where_they_are_told_to():
    model, _, _ = made("sequential")
    text = shown(model, positions=[0.4, 0.5, 0.6, 0.8, 1.0])
    assert len(text.splitlines()[2]) in range(110, 121)
    with pytest.raises(ValueError, match=r"Expected 5 numbers, one for each of Layer"):
        shown(model, positions=[0.5, 1.0])
    with pytest.raises(ValueError, match=r"Received \['x', 'd1'\]; the layers are d0,"):
        shown(model, layer_range=("x", "d1"))


def test_a_repr_tells_stages_microbatches_and_schedule():
    model = tfgpipe.pipeline(
        sequential(), num_stages=2, num_microbatches=4, schedule="1f1b"
    )
    assert repr(model) == (
        "<PipelinedModel name=plain, num_stages=2, num_microbatches=4, schedule=1f1b, "
        "partition=[2, 2], built=True>"
    )
    layer = tfgpipe.PipelinedLayer(stack(), name="pipe", **OPTIONS)
    assert repr(layer) == (
        "<PipelinedLayer name=pipe, num_stages=2, num_microbatches=2, schedule=gpipe, "
        "balance=params, built=False>"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_outputs_and_shapes_are_those_of_the_plain_model(kind):
    model, plain, x = made(kind)
    assert model.input_shape == plain.input_shape
    assert model.output_shape == plain.output_shape
    assert len(model.inputs) == len(plain.inputs)
    shapes = keras.tree.map_structure(lambda x: (None, *x.shape[1:]), x)
    expected = plain.compute_output_shape(shapes)
    assert model.compute_output_shape(shapes) == expected
    features = keras.Model(model.input, model.output)(x)
    keras.tree.assert_same_structure(features, plain(x))
    compare.assert_allclose(*map(keras.tree.flatten, (features, plain(x))), rtol=1e-6)


def test_layers_are_found_by_name():
    model, plain, _ = made("nested")
    for name in ("i", "shared", "inner", "own", "last"):
        assert model.get_layer(name) is plain.get_layer(name)
    assert model.get_layer("i1") is plain.get_layer("inner").get_layer("i1")
    assert model.get_layer(index=0) is model.get_layer(model.pipelined.name)
    with pytest.raises(ValueError, match="'nope', which no layer has"):
        model.get_layer("nope")


@pytest.mark.parametrize("kind", KINDS)
def test_an_artifact_gives_what_the_model_gives(kind, tmp_path):
    model, _, x = made(kind)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    for rows in (6, 5):  # Any number of rows.
        some = keras.tree.map_structure(lambda x, n=rows: x[:n], x)
        pairs = zip(
            *map(keras.tree.flatten, (served.serve(some), model(some))), strict=True
        )
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_artifact_asks_for_none_of_the_devices_of_the_stages(tmp_path):
    model, _, _ = made("sequential")
    model.export(tmp_path / "served", verbose=False)
    graph = (tmp_path / "served" / "saved_model.pb").read_bytes()
    assert b"device:CPU:1" not in graph


def test_a_litert_file_gives_what_the_model_gives(tmp_path):
    model, _, _ = made("list")
    path = str(tmp_path / "m.tflite")  # Keras 3.14 takes no other path here.
    model.export(path, format="litert", verbose=False)
    interpreter = tf.lite.Interpreter(path)
    (given,), (result,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    interpreter.resize_tensor_input(given["index"], X.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], X)
    interpreter.invoke()
    values = interpreter.get_tensor(result["index"])
    np.testing.assert_allclose(values, model(X), rtol=1e-5, atol=1e-6)


def test_a_call_of_ones_own_is_in_the_artifact(tmp_path):
    class Doubled(tfgpipe.PipelinedModel):
        def call(self, inputs, training=None):
            return 2 * super().call(inputs, training=training)

    model = Doubled(stack(), **OPTIONS)
    expected = model(X)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(served.serve(X), expected, rtol=1e-6)


def test_a_pipeline_in_a_model_of_ones_own_is_summed_up():
    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.pipe = tfgpipe.PipelinedLayer(stack(), name="pipe", **OPTIONS)

        def call(self, x):
            return self.pipe(x)

    model = Outer()
    model(X)
    lines: list[str] = []
    model.summary(print_fn=lines.append, expand_nested=True)
    assert "pipe (PipelinedLayer)" in lines[0]
    assert model.pipe.compute_output_shape((None, 8)) == (None, 8)
