"""The table of stages."""

from __future__ import annotations

import keras
import pytest

import tfgpipe
from tests.helpers.sharded_dense import Columns
from tfgpipe.report import tables


def built(model, optimizer="adam"):
    """Returns a model, with the slots of an optimizer."""
    model.compile(optimizer)
    model.optimizer.build(model.trainable_variables)
    return model


def make_model():
    layers = [keras.layers.Dense(8, name=f"d{i}") for i in range(5)]
    layer = tfgpipe.PipelinedLayer(
        layers, partition=[2, 3], num_microbatches=4, name="pipe"
    )
    return keras.Sequential([keras.Input((8,)), layer])


def test_each_stage_has_a_line_that_adds_up():
    model = built(make_model())
    # A stage of n layers has 72 n parameters of 4 bytes, and Adam two slots for each.
    assert tfgpipe.stage_table(model).splitlines() == [
        "pipe: 2 stages, 4 microbatches, remat=stage",
        "stage  device  layers        parameters  weights    slots  share",
        "0      CPU:0   d0, d1               144    576 B  1.1 KiB  40.0%",
        "1      CPU:1   d2 .. d4 (3)         216    864 B  1.7 KiB  60.0%",
    ]


def test_slots_are_unknown_until_the_optimizer_is_built():
    model = make_model()
    model.compile("adam")
    assert tfgpipe.stage_table(model).splitlines()[2].split()[-2] == "-"


def test_a_model_without_a_pipeline_is_refused():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="plain")
    with pytest.raises(ValueError, match="'plain', which holds no PipelinedLayer"):
        tfgpipe.stage_table(model)


def test_a_shared_weight_counts_at_its_owner_which_the_other_stage_names():
    dense = keras.layers.Dense(8, name="shared")
    layers = [dense, keras.layers.Dense(8, name="own"), dense]
    layer = tfgpipe.PipelinedLayer(
        layers, partition=[1, 2], num_microbatches=4, name="pipe"
    )
    layer.build((None, 8))
    assert tfgpipe.stage_table(layer).splitlines()[2:] == [
        "0      CPU:0   shared                            72    288 B      -  50.0%",
        "1      CPU:1   own, shared (of stage 0)          72    288 B      -  50.0%",
    ]


def test_a_stage_in_shards_has_its_devices_and_bytes_told_one_by_one():
    layers = [
        keras.layers.Dense(8, name="d"),
        Columns(8, num_shards=2, name="c0"),
        Columns(8, num_shards=2, name="c1"),
    ]
    layer = tfgpipe.PipelinedLayer(
        layers, partition=[2, 1], num_microbatches=4, name="pipe"
    )
    model = built(keras.Sequential([keras.Input((8,)), layer]))
    # A part of a weight has 32 numbers and of a bias 4, of 4 bytes and with two slots.
    assert tfgpipe.stage_table(model).splitlines() == [
        "pipe: 2 stages in 2 shards, 4 microbatches, remat=stage",
        "stage  device         layers  parameters        weights          slots  share",
        "0      CPU:0 + CPU:1  d, c0          144  432 B + 144 B  864 B + 288 B  66.7%",
        "1      CPU:2 + CPU:3  c1              72  144 B + 144 B  288 B + 288 B  33.3%",
        "sharded weight  shape  axes             numbers each  layers",
        'Columns.kernel  8 x 8  (None, "shard")            32  c0, c1',
        'Columns.bias        8  ("shard",)                  4  c0, c1',
    ]


def test_each_device_of_a_mesh_holds_its_stage():
    model = built(make_model())
    (row,) = tables.device_memory(model)
    assert [shard.lines for stage in row for shard in stage] == [
        ("CPU:0", "d0, d1", "576 B, slots 1.1 KiB"),
        ("CPU:1", "d2 .. d4 (3)", "864 B, slots 1.7 KiB"),
    ]


def test_replicas_hold_copies_inside_their_scope_or_outside():
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    with strategy.scope():
        model = built(make_model())
        inside = tables.device_memory(model)
    first, second = tables.device_memory(model)
    assert inside == [first, second]
    for d, row in enumerate((first, second)):
        assert [shard.lines for stage in row for shard in stage] == [
            (f"CPU:{2 * d}", "d0, d1", "576 B, slots 1.1 KiB"),
            (f"CPU:{2 * d + 1}", "d2 .. d4 (3)", "864 B, slots 1.7 KiB"),
        ]


def test_a_model_without_a_pipeline_holds_nothing_to_show():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="plain")
    with pytest.raises(ValueError, match="'plain', which holds no PipelinedLayer"):
        tables.device_memory(model)


class Gate(keras.layers.Layer):
    """Has two weights, of which the path of one begins like the other's."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1],))
        self.gate = self.add_weight(name="w_gate", shape=(shape[-1],))

    def call(self, x):
        return x * self.w * self.gate


def test_slots_count_once_though_paths_are_the_same():
    layers = [Gate(name="gate") for _ in range(2)]
    layer = tfgpipe.PipelinedLayer(layers, partition=[1, 1], num_microbatches=2)
    model = built(keras.Sequential([keras.Input((8,)), layer]))
    rows = [line.split() for line in tfgpipe.stage_table(model).splitlines()[2:]]
    assert [row[-5:-1] for row in rows] == [["64", "B", "128", "B"]] * 2


def test_the_table_counts_the_factors_that_adafactor_keeps():
    layers = [keras.layers.Dense(8, use_bias=False) for _ in range(2)]
    layer = tfgpipe.PipelinedLayer(layers, partition=[1, 1], num_microbatches=2)
    model = built(keras.Sequential([keras.Input((8,)), layer]), "adafactor")
    rows = [line.split() for line in tfgpipe.stage_table(model).splitlines()[2:]]
    # The velocity's 64 numbers, and 8 for the rows and the columns each.
    assert [row[-3:-1] for row in rows] == [["320", "B"]] * 2
