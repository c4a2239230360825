"""A new run begins with weights of another, and says with which."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import tfgpipe
from tests.helpers.checkpointed_model import X, Y, make_model
from tfgpipe_trainer import hyperparams
from tfgpipe_trainer.checkpoint import variable_names
from tfgpipe_trainer.checkpoint.checkpoints import Checkpoints
from tfgpipe_trainer.checkpoint.warm_start import warm_start
from tfgpipe_trainer.config import Saving, WarmStart
from tfgpipe_trainer.hyperparams import HyperparameterError


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[tfgpipe.PipelinedModel, Path]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    tmp_path = tmp_path_factory.mktemp("trained")
    model = make_model()
    model.fit(X, Y, verbose=0)
    saved = Checkpoints(tmp_path / "checkpoints", model, Saving(async_save=False))
    saved.save(saved.copy(3, {}))
    model.unpipelined().save(tmp_path / "model.keras")
    model.unpipelined().save_weights(tmp_path / "model.weights.h5")
    save_file(_weights(model), tmp_path / "model.safetensors")
    return model, tmp_path


def _weights(model: keras.Model) -> dict[str, np.ndarray]:
    copied = variable_names.snapshot(variable_names.weights(model))
    return {name: value.numpy() for name, value in copied.items()}


@pytest.mark.parametrize(
    "path",
    [
        *("", "checkpoints/step-00000003"),
        *("model.keras", "model.weights.h5", "model.safetensors"),
    ],
)
def test_weights_come_from_runs_and_files(path: str, trained, capsys) -> None:
    model, folder = trained
    other = make_model(num_stages=3)
    warm_start(WarmStart(path=str(folder / path)), other)
    expected = _weights(model)
    for name, value in _weights(other).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert capsys.readouterr().out == (
        f"Warm start: 12 of 12 weights are those of {folder / path}.\n"
    )
    assert int(keras.ops.convert_to_numpy(other.optimizer.iterations)) == 0


def test_patterns_choose_and_the_rest_is_listed(trained, capsys) -> None:
    model, folder = trained
    other = make_model()
    before, expected = _weights(other), _weights(model)
    warm_start(WarmStart(path=str(folder), names=("dense/*", "dense_1/*")), other)
    for name, value in _weights(other).items():
        source = expected if name.startswith(("dense/", "dense_1/")) else before
        np.testing.assert_array_equal(value, source[name], err_msg=name)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  Not from there: batch_normalization/gamma, batch_normalization/beta, "
        "batch_normalization/moving_mean, batch_normalization/moving_variance, "
        "dense_2/kernel, dense_2/bias, dense_3/kernel, dense_3/bias",
        "  Unused there: batch_normalization/gamma, batch_normalization/beta, "
        "batch_normalization/moving_mean, batch_normalization/moving_variance, "
        "dense_2/kernel, dense_2/bias, dense_3/kernel, dense_3/bias",
    ]


def test_patterns_need_no_quotes_on_a_command_line(trained, capsys) -> None:
    _, folder = trained
    wanted = hyperparams.override(
        WarmStart(), [f"path={folder}", "names=block_*/dense/kernel, dense*/kernel"]
    )
    warm_start(wanted, make_model())
    assert "Warm start: 4 of 12 weights" in capsys.readouterr().out


def test_weights_may_be_called_otherwise_there(trained) -> None:
    model, folder = trained
    other = make_model()
    warm_start(
        WarmStart(
            path=str(folder), names=("dense_2/*",), rename=("dense_1/=dense_2/",)
        ),
        other,
    )
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(
            _weights(other)[f"dense_2/{name}"], _weights(model)[f"dense_1/{name}"]
        )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"names": ("nothing/*",)}, r"warm_start\.names: expected patterns of weights"),
        ({"rename": ("dense",)}, r"warm_start\.rename: expected OLD=NEW, OLD the beg"),
        ({"rename": ("none/=a/",)}, r"received 'none/=a/'"),
        (
            {"rename": ("=a/",)},
            r"warm_start\.rename: expected OLD=NEW, OLD the beg.*received '=a/'",
        ),
        (
            {"path": "x://b/run"},
            r"^warm_start\.path: expected a path of a scheme that fs",
        ),
        ({"path": "none"}, r"warm_start\.path: expected the folder of a run, a step-"),
    ],
)
def test_what_is_not_there_is_refused(wanted: dict, message: str, trained) -> None:
    _, folder = trained
    with pytest.raises(HyperparameterError, match=message):
        warm_start(WarmStart(**{"path": str(folder), **wanted}), make_model())


def test_other_shapes_are_refused_and_may_be_left_out(trained) -> None:
    _, folder = trained
    wider = make_model(width=5)
    with pytest.raises(
        HyperparameterError,
        match=r"expected dense/kernel of shape \(4, 5\); .* has it of shape \(4, 4\)\.",
    ):
        warm_start(WarmStart(path=str(folder), names=("dense/*",)), wider)
    warm_start(WarmStart(path=str(folder), names=("dense_3/bias",)), wider)


def test_a_damaged_checkpoint_is_refused(trained, tmp_path: Path) -> None:
    _, folder = trained
    at = tmp_path / "checkpoints" / "step-00000003"
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    (at / "state.index").write_bytes(b"")
    with pytest.raises(HyperparameterError, match="is damaged: its values cannot"):
        warm_start(WarmStart(path=str(at)), make_model())


def _layers(*numbers: int) -> tfgpipe.PipelinedModel:
    named = [keras.layers.Dense(4, name=f"layer_{number}") for number in numbers]
    model = tfgpipe.PipelinedModel(
        keras.Sequential([keras.Input([4]), *named]), num_stages=1, num_microbatches=1
    )
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_the_upper_half_of_a_network_is_not_taken_for_the_lower(tmp_path: Path) -> None:
    whole, upper = _layers(0, 1, 2, 3), _layers(2, 3)
    saved = Checkpoints(tmp_path / "checkpoints", whole, Saving(async_save=False))
    saved.save(saved.copy(1, {}))
    with pytest.raises(
        HyperparameterError, match=r"^warm_start\.rename: .*layer_2/=lay"
    ):
        warm_start(WarmStart(path=str(tmp_path)), upper)
    rename = ("layer_2/=layer/", "layer_3/=layer_1/")
    warm_start(WarmStart(path=str(tmp_path), rename=rename), upper)
    for name in ("kernel", "bias"):
        for here, there in (("layer", "layer_2"), ("layer_1", "layer_3")):
            np.testing.assert_array_equal(
                _weights(upper)[f"{here}/{name}"], _weights(whole)[f"{there}/{name}"]
            )
    # The lower half, and the whole of other numbers, are as their order says.
    warm_start(WarmStart(path=str(tmp_path)), _layers(0, 1))
    warm_start(WarmStart(path=str(tmp_path)), _layers(4, 5, 6, 7))
