"""The configuration of a pipeline, and the faces that are made of it."""

from __future__ import annotations

import dataclasses
import inspect
import re

import keras
import pytest

import tfgpipe
from tfgpipe._util import docstrings
from tfgpipe.partition import LayerOptions, ModelOptions, PipelineConfig, balances
from tfgpipe.partition.config import PlanOptions

FIELDS = {field.name: field for field in dataclasses.fields(PipelineConfig)}
FACES = {
    tfgpipe.PipelinedLayer: LayerOptions,
    tfgpipe.PipelinedModel: ModelOptions,
    tfgpipe.pipeline: ModelOptions,
    tfgpipe.plan: PlanOptions,
}


def dense(num_layers=3):
    return [keras.layers.Dense(4) for _ in range(num_layers)]


def test_every_field_is_documented_and_is_an_option_of_a_model():
    documented = docstrings.entries(PipelineConfig.__doc__)
    assert list(documented) == list(FIELDS)
    assert set(ModelOptions.__annotations__) == set(FIELDS)


@pytest.mark.parametrize("face", FACES)
def test_signature_and_documentation_of_a_face_have_every_option(face):
    options = FACES[face].__annotations__
    function = face.__init__ if inspect.isclass(face) else face
    parameters = inspect.signature(function).parameters
    assert set(options) <= set(parameters)
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    documented = docstrings.entries(face.__doc__)
    whole = docstrings.entries(PipelineConfig.__doc__)
    for name in options:
        assert documented[name] == whole[name]
        default = FIELDS[name].metadata["default"]
        required = default is dataclasses.MISSING
        assert parameters[name].default == (inspect._empty if required else default)
    private = {name for name in parameters if name[0] == "_"} | {"self"}
    assert set(parameters) - private <= set(documented)


def test_saved_configurations_have_every_option():
    layer = tfgpipe.PipelinedLayer(dense(), num_stages=2, num_microbatches=2)
    model = tfgpipe.PipelinedModel(dense(), num_stages=2, num_microbatches=2)
    assert set(LayerOptions.__annotations__) <= set(layer.get_config())
    assert set(FIELDS) <= set(model.get_config())
    assert layer.config == model.config
    again = tfgpipe.PipelinedModel.from_config(model.get_config())
    assert again.config == model.config


def test_a_default_is_an_argument_and_its_value():
    config = PipelineConfig(num_microbatches=2)
    for name, field in FIELDS.items():
        given = field.metadata["default"]
        if given is not dataclasses.MISSING:
            assert field.metadata["find"](given) == getattr(config, name)
            assert field.metadata["save"](getattr(config, name)) == given


@pytest.mark.parametrize("balance", [[1, 2], "flops"])
@pytest.mark.parametrize("kind", [tfgpipe.PipelinedLayer, tfgpipe.PipelinedModel])
def test_a_configuration_of_before_is_loaded(kind, balance):
    """`balance` was the argument for a given partition as well."""
    before = kind(dense(), num_stages=2, num_microbatches=2).get_config()
    del before["partition"]
    loaded = kind.from_config({**before, "balance": balance, "num_stages": 2})
    loaded.build((None, 4))
    if balance == "flops":
        assert loaded.config.balance is balances.flops
    else:
        assert [len(stage.segment.calls) for stage in loaded.stages] == balance
        assert loaded.get_config()["partition"] == balance


def test_a_quantity_and_a_partition_are_two_arguments():
    config = PipelineConfig(num_microbatches=2, balance="time", partition=[1, 2])
    assert config.partition.entries == (1, 2)
    with pytest.raises(ValueError, match=r"Received balance=\[2, 1\] beside it"):
        PipelineConfig(num_microbatches=2, balance=[2, 1], partition=[1, 2])
    with pytest.raises(ValueError, match=r"`partition` must be a list.*Received 3"):
        PipelineConfig(num_microbatches=2, partition=3)


def test_what_a_plan_does_not_depend_on_is_no_argument_of_it():
    with pytest.raises(TypeError, match=r"no argument 'batch_norm'\. Expected num_st"):
        tfgpipe.plan(dense(), num_microbatches=2, batch_norm="deferred")


def test_a_missing_argument_is_named():
    for face in (tfgpipe.PipelinedLayer, tfgpipe.PipelinedModel, tfgpipe.plan):
        with pytest.raises(TypeError, match=re.escape("'num_microbatches'")):
            face(dense(), num_stages=2)


def test_a_new_partition_is_in_the_configuration():
    layer = tfgpipe.PipelinedLayer(dense(), num_stages=2, num_microbatches=2)
    layer.build((None, 4))
    layer.recut([1, 2])
    assert layer.config.partition.entries == (1, 2)
    assert layer.get_config()["partition"] == [1, 2]
