"""Every argument of every public class comes back from a configuration and a file.

The arguments are read off the signatures: one that is new, or a class that is, has no
value here that is not its default, and fails.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.zoo import floats
from tfgpipe import quantization, schedules, tensor_parallel

layers, saving = keras.layers, keras.saving
Arguments = dict[str, Any]

BASE = {"name": "named", "dtype": "mixed_bfloat16", "trainable": False}
SHARDS = {"num_shards": 2, "devices": ["CPU:3", "CPU:5"]}
DRAWN = {"kernel_initializer": "he_normal", "bias_initializer": "ones"}
RANGE = {
    "bits": 4,
    "symmetric": True,
    "narrow_range": True,
    "axis": 1,
    "initial": (-2.0, 3.0),
}
UPDATES = {"range_update": "per_call", "delay": 3, "freeze_after": 7}
OBSERVER = quantization.MovingAverageRange(decay=0.9)


def stack() -> list[layers.Layer]:
    return [layers.Dense(4, activation="tanh"), layers.Dense(4), layers.Dense(4)]


def pipelined(**arguments: Any) -> list[Callable[[], Arguments]]:
    """Returns arguments of pipelines; some exclude one another."""
    common = {
        "num_microbatches": 3,
        "remat": "layer",
        "jit_compile": False,
        "batch_norm": "deferred",
        "added_losses": "microbatch",
        "offload_optimizer": True,
        "transfer_dtype": "bfloat16",
        "devices": ["CPU:1", "CPU:3"],
        **arguments,
    }
    planned = {"num_stages": 2, "balance": "flops", "memory_limit": 1e9}
    planned["device_speeds"] = [1.0, 0.5]
    return [
        lambda: {**common, "layers": stack(), **planned, **BASE},
        lambda: {**common, "layers": stack(), "partition": [1, 2]},
    ]


# For each class the arguments of one object, or of several.
OFF_DEFAULT: dict[type, list[Callable[[], Arguments]]] = {
    tfgpipe.PipelinedLayer: pipelined(),
    tfgpipe.PipelinedModel: [
        *pipelined(schedule="1f1b"),
        *pipelined(schedule=schedules.one_f_one_b(2, 3)),
    ],
    tfgpipe.SPMDPipeline: [
        lambda: {
            "layers": [layers.Dense(4), layers.Dense(4)],
            "num_stages": 2,
            "num_microbatches": 2,
            "partitioned": False,
            **BASE,
        }
    ],
    tfgpipe.layers.DeferredBatchNormalization: [
        lambda: {
            "axis": 1,
            "momentum": 0.7,
            "epsilon": 0.1,
            "center": False,
            "scale": False,
            "beta_initializer": "ones",
            "gamma_initializer": "zeros",
            "moving_mean_initializer": "ones",
            "moving_variance_initializer": "zeros",
            "beta_regularizer": "l2",
            "gamma_regularizer": "l1",
            "beta_constraint": "non_neg",
            "gamma_constraint": "unit_norm",
            "synchronized": True,
            **BASE,
        },
    ],
    tfgpipe.layers.TPDense: [
        lambda: {
            "units": 8,
            "partition": "row",
            "collective": "ring",
            "gather_output": False,
            "activation": "relu",
            "use_bias": False,
            **SHARDS,
            **DRAWN,
            **BASE,
        },
    ],
    tfgpipe.layers.TPMLP: [
        lambda: {
            "hidden_units": 8,
            "units": 3,
            "activation": "relu",
            "dropout": 0.5,
            "seed": 3,
            "collective": "ring",
            "use_bias": False,
            **SHARDS,
            **DRAWN,
            **BASE,
        }
    ],
    tfgpipe.layers.TPMultiHeadAttention: [
        lambda: {
            "num_heads": 8,
            "key_dim": 3,
            "value_dim": 2,
            "dropout": 0.5,
            "use_bias": False,
            "output_dim": 5,
            "collective": "bidirectional_ring",
            "seed": 3,
            **SHARDS,
            **DRAWN,
            **BASE,
        }
    ],
    tfgpipe.layers.TPSequenceAttention: [
        lambda: {
            "num_heads": 8,
            "key_dim": 3,
            "num_key_value_heads": 4,
            "value_dim": 2,
            "dropout": 0.5,
            "use_bias": False,
            "output_dim": 5,
            "exchange": "all_to_all",
            "seed": 3,
            **SHARDS,
            **DRAWN,
            **BASE,
        }
    ],
    tfgpipe.layers.TPPositionwise: [
        lambda: {
            "layers": [layers.Dense(3)],
            "residual": True,
            **SHARDS,
            **BASE,
        }
    ],
    tfgpipe.layers.TPMixtureOfExperts: [
        lambda: {
            "num_experts": 8,
            "hidden_units": 3,
            "top_k": 3,
            "activation": "relu",
            "gated": False,
            "normalizes": False,
            "capacity_factor": 1.5,
            "balancing": 0.1,
            "kernel_initializer": "ones",
            **SHARDS,
            **BASE,
        }
    ],
    tfgpipe.layers.TPEmbedding: [
        lambda: {
            "input_dim": 5,
            "output_dim": 3,
            "embeddings_initializer": "ones",
            "mask_zero": True,
            **SHARDS,
            **BASE,
        }
    ],
    tfgpipe.layers.TPLayerNormalization: [
        lambda: {
            "epsilon": 0.1,
            "center": False,
            "scale": False,
            "gather_output": False,
            "beta_initializer": "ones",
            "gamma_initializer": "zeros",
            **SHARDS,
            **BASE,
        }
    ],
    tfgpipe.layers.TPCrossEntropy: [lambda: {**SHARDS, **BASE}],
    tensor_parallel.OutputLoss: [lambda: {"reduction": "sum", "name": "named"}],
    quantization.QuantizeWrapper: [
        lambda: {
            "layer": layers.Dense(3),
            "config": quantization.QuantizeConfig(weights={"kernel": OBSERVER}),
            **UPDATES,
            **BASE,
        }
    ],
    quantization.FakeQuantize: [lambda: {"observer": OBSERVER, **UPDATES, **BASE}],
    quantization.QuantizeConfig: [
        lambda: {
            "weights": {"kernel": OBSERVER},
            "activations": {"activation": OBSERVER},
            "output": OBSERVER,
        }
    ],
    quantization.MovingAverageRange: [lambda: {**RANGE, "decay": 0.5, "ramp": True}],
    quantization.LastValueRange: [lambda: RANGE],
    quantization.AllValuesRange: [lambda: RANGE],
    quantization.FixedRange: [lambda: RANGE],
}
CASES = [
    pytest.param(kind, make, id=f"{kind.__name__}-{i}")
    for kind, makes in OFF_DEFAULT.items()
    for i, make in enumerate(makes)
]


def public_classes() -> set[type]:
    """Returns the public classes whose objects have a configuration."""
    modules = (tfgpipe, tfgpipe.layers, tensor_parallel, quantization)
    found = (getattr(m, name) for m in modules for name in m.__all__)
    classes = {x for x in found if inspect.isclass(x) and hasattr(x, "get_config")}
    return {x for x in classes if not inspect.isabstract(x)}


def arguments_of(kind: type) -> dict[str, inspect.Parameter]:
    """Returns the arguments that users give; renormalising is refused."""
    _, *given = inspect.signature(kind.__init__).parameters.values()
    return {
        p.name: p
        for p in given
        if p.kind is not p.VAR_KEYWORD and not p.name.startswith(("_", "renorm"))
    }


def json_of(thing: Any) -> Any:
    return json.loads(json.dumps(saving.serialize_keras_object(thing)))


def test_there_is_a_case_for_each_class_and_argument():
    assert public_classes() == set(OFF_DEFAULT)
    for kind, makes in OFF_DEFAULT.items():
        given = set().union(*(make() for make in makes))
        assert given >= set(arguments_of(kind)), kind


@pytest.mark.parametrize(("kind", "make"), CASES)
def test_a_configuration_has_every_argument(kind, make):
    given = make()
    defaults = {n: p.default for n, p in arguments_of(kind).items() if n in given}
    assert not [n for n, default in defaults.items() if given[n] == default]
    required = {
        n: given[n] for n, x in defaults.items() if x is inspect.Parameter.empty
    }
    made = kind(**given)
    config = json_of(made)["config"]
    again = saving.deserialize_keras_object(json_of(made))
    assert type(again) is kind
    assert json_of(again)["config"] == config
    if kind in (tfgpipe.PipelinedLayer, tfgpipe.PipelinedModel):
        required["num_stages"] = 1
    plain = json_of(kind(**required))["config"]
    same = [n for n in given if n not in required and config[n] == plain[n]]
    assert not same, "As without: the configuration does not hold them."


# Those that a model of one input and one output can be made of.
MODELS = [
    case for case in CASES if issubclass(case.values[0], layers.Layer | keras.Model)
]


def model_of(made: Any) -> tuple[keras.Model, Any]:
    """Returns a model that ends in a layer, and what it takes."""
    x = floats(6, 4)
    if isinstance(made, keras.Model):
        made.build((None, 4))
        return made, x
    inputs: Any = keras.Input((4,))
    if isinstance(made, tfgpipe.layers.TPEmbedding):
        x, inputs = np.abs(x).astype("int32"), keras.Input((4,), dtype="int32")
    if isinstance(made, tfgpipe.layers.TPPositionwise):
        x, inputs = floats(6, 4, 3), keras.Input((4, 3))
    attentions = (
        tfgpipe.layers.TPMultiHeadAttention,
        tfgpipe.layers.TPSequenceAttention,
    )
    if isinstance(made, attentions):
        x, inputs = floats(6, 3, 4), keras.Input((3, 4))
        return keras.Model(inputs, made(inputs, inputs)), x
    if isinstance(made, tfgpipe.layers.TPCrossEntropy):
        parts = tensor_parallel.TPDense(4, num_shards=2, gather_output=False)(inputs)
        targets = keras.Input((), dtype="int32")
        x = [x, np.arange(6) % 4]
        return keras.Model([inputs, targets], made(parts, targets)), x
    return keras.Model(inputs, made(inputs)), x


def values(model: keras.Model, x: Any) -> list[np.ndarray]:
    outputs = keras.tree.flatten(model(x, training=False))
    return [tf.cast(y, "float32").numpy() for y in outputs]


@pytest.mark.parametrize(("kind", "make"), MODELS)
@pytest.mark.filterwarnings("ignore:Batch normalization sees")
def test_a_file_has_every_argument(kind, make, tmp_path):
    made = kind(**make())
    model, x = model_of(made)
    for variable in model.weights:
        if variable.dtype != "int32" and "seed" not in variable.path:
            variable.assign(variable + 0.3)
    loaded = compare.reloaded(model, tmp_path)
    if not isinstance(made, keras.Model):
        (again,) = (layer for layer in loaded.layers if layer.name == made.name)
    else:
        again = loaded
    assert type(again) is kind
    assert json_of(again)["config"] == json_of(made)["config"]
    assert len(loaded.trainable_variables) == len(model.trainable_variables)
    compare.assert_equal(values(model, x), values(loaded, x))
