"""What a run saves and restores: in the background, verified, in any cut."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, fresh_processes
from tests.helpers.checkpointed_model import X, Y, make_model
from tfgpipe import quantization
from tfgpipe_trainer.checkpoint import checkpoints, store, variable_names
from tfgpipe_trainer.checkpoint.checkpoints import Checkpoints
from tfgpipe_trainer.config import Saving
from tfgpipe_trainer.errors import CheckpointError
from tfgpipe_trainer.hyperparams import HyperparameterError

layers = keras.layers


def _values(model: keras.Model) -> dict[str, np.ndarray]:
    copied = variable_names.snapshot(variable_names.all_variables(model))
    return {name: value.numpy() for name, value in copied.items()}


def _save(folder: Path, model: keras.Model, *steps: int, **saving: Any) -> None:
    saved = Checkpoints(folder, model, Saving(**saving))
    for step in steps:
        saved.save(saved.copy(step, {"at": step}))
    saved.wait()
    saved.check()


@pytest.fixture(scope="module")
def _trained() -> tuple[tfgpipe.PipelinedModel, dict[str, np.ndarray]]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    model = make_model()
    model.fit(X, Y, verbose=0, shuffle=False)
    return model, _values(model)


@pytest.fixture
def trained(_trained) -> Iterator[tfgpipe.PipelinedModel]:
    """A model that has seen one epoch, and will have for the next test."""
    model, values = _trained
    yield model
    for name, variable in variable_names.all_variables(model).items():
        variable.assign(values[name])


def test_all_is_restored(trained, tmp_path: Path) -> None:
    model = trained
    _save(tmp_path, model, 7)
    other = make_model()
    about = Checkpoints(tmp_path, other, Saving()).restore()
    assert about is not None
    assert (about.step, about.notes) == (7, {"at": 7})
    np.testing.assert_equal(_values(other), _values(model))


def test_without_one_there_is_nothing_to_restore(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, make_model(), Saving()).restore() is None


@pytest.mark.parametrize(
    "cut",
    [
        {"num_stages": 4, "num_microbatches": 4, "schedule": "1f1b"},
        {"num_stages": 3, "partition": [1, 3, 1], "remat": "none"},
        {"num_stages": 4, "schedule": "interleaved", "num_microbatches": 2},
        {"num_stages": 4, "schedule": "zbv", "devices": ["CPU:0", "CPU:1"]},
        {"num_stages": 1, "num_microbatches": 1},
    ],
    ids=str,
)
def test_another_cut_goes_on_the_same(
    cut: dict[str, Any], trained, tmp_path: Path
) -> None:
    model = trained
    _save(tmp_path, model, 1)
    other = make_model(**cut)
    Checkpoints(tmp_path, other, Saving()).restore()
    for name, value in _values(model).items():
        np.testing.assert_array_equal(_values(other)[name], value, err_msg=name)
    if cut.get("num_microbatches", 3) != 3:
        return  # Normalises over other microbatches from here on.
    for _ in range(3):
        expected, received = (m.train_on_batch(X, Y) for m in (model, other))
        assert received == pytest.approx(expected, rel=1e-6)
    for name, value in _values(model).items():
        np.testing.assert_allclose(
            _values(other)[name], value, rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_replicas_restore_what_one_has_saved(trained, tmp_path: Path) -> None:
    model = trained
    _save(tmp_path / "one", model, 1)
    for shared in ("none", "slots", "weights"):
        strategy = tfgpipe.PipelineStrategy(
            num_stages=2, num_replicas=2, shard_replicas=shared
        )
        with strategy.scope():
            other = make_model()
        Checkpoints(tmp_path / "one", other, Saving()).restore()
        _save(tmp_path / shared, other, 2)
        written = store.read(tmp_path / shared, 2).values
        for name, value in _values(model).items():
            np.testing.assert_array_equal(written[name], value, err_msg=name)


@pytest.mark.parametrize("damage", ["cut off", "bit"])
def test_a_damaged_one_is_told_and_the_one_before_is_used(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    _save(tmp_path, model, 5, 6)
    path = store.path_of(tmp_path, 6) / "state.data-00000-of-00001"
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 16
    path.write_bytes(data if damage == "bit" else data[:-9])
    about = Checkpoints(tmp_path, model, Saving()).restore()
    assert about is not None
    assert about.step == 5
    told = capsys.readouterr().err
    assert "The checkpoint of step 6 is damaged: its values cannot be read: " in told
    assert "RestoreV2" not in told
    assert f"It is {tmp_path}/damaged-0-step-00000006 now." in told
    assert (tmp_path / "damaged-0-step-00000006").is_dir()
    _save(tmp_path, model, 6)
    assert store.read(tmp_path, 6).metadata.step == 6


def test_when_all_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    model = make_model()
    _save(tmp_path, model, 5, 6)
    for step in (5, 6):
        (store.path_of(tmp_path, step) / "state.index").write_text("{}")
    for _ in range(2):  # Nor does the next start.
        with pytest.raises(CheckpointError, match=r"be read; all 2 are damaged\."):
            Checkpoints(tmp_path, model, Saving()).restore()


def test_an_old_one_that_is_damaged_stops_nothing(tmp_path: Path) -> None:
    model = make_model()
    _save(tmp_path, model, 5)
    (store.path_of(tmp_path, 5) / "state.index").write_bytes(b"\xff{")
    _save(tmp_path, model, 6, 7, 8, keep=2)
    assert store.steps(tmp_path) == [5, 7, 8]


def test_ranges_and_the_scale_of_the_loss_are_restored(
    mixed_precision, tmp_path: Path
) -> None:
    def quantized() -> tfgpipe.PipelinedModel:
        model = tfgpipe.PipelinedModel(
            quantization.apply([layers.Dense(4), layers.Dense(3)]),
            num_stages=2,
            num_microbatches=2,
        )
        model(keras.Input([4]))
        model.compile(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), initial_scale=8.0, dynamic_growth_steps=1
            ),
            "mse",
        )
        model.optimizer.build(model.trainable_variables)
        return model

    keras.utils.set_random_seed(0)
    model = quantized()
    model.train_on_batch(X, Y)
    _save(tmp_path, model, 1)
    compare.fresh_names()
    other = quantized()
    Checkpoints(tmp_path, other, Saving()).restore()
    restored = _values(other)
    np.testing.assert_equal(restored, _values(model))
    assert "quant_dense/kernel_max" in restored
    assert restored["optimizer/dynamic_scale"] == 16.0
    assert model.train_on_batch(X, Y) == other.train_on_batch(X, Y)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    _save(tmp_path, make_model(), 1)
    with pytest.raises(HyperparameterError, match="has in other shapes batch_normaliz"):
        checkpoints.load(store.read(tmp_path, 1), make_model(width=5))
    other = make_model()
    other.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(HyperparameterError, match="has besides optimizer/batch_norma"):
        checkpoints.load(store.read(tmp_path, 1), other)


# In the background.


def _held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has writing wait, until what is returned is called."""
    go = threading.Event()
    write = store.write_tensors

    def wait_and_write(folder: Path, values: Any) -> None:
        assert go.wait(60)
        write(folder, values)

    monkeypatch.setattr(store, "write_tensors", wait_and_write)
    return go.set


def test_training_goes_on_while_one_is_written(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = _held(monkeypatch)
    model = trained
    before = _values(model)
    saved = Checkpoints(tmp_path, model, Saving())
    saved.save(saved.copy(1, {}))
    model.train_on_batch(X, Y)
    assert store.steps(tmp_path) == []
    go()
    saved.wait()
    written = store.read(tmp_path, 1).values
    for name, value in before.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)


def test_not_more_than_two_are_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = _held(monkeypatch)
    saved = Checkpoints(tmp_path, make_model(), Saving(keep=9))
    saved.save(saved.copy(1, {}))
    saved.save(saved.copy(2, {}))
    third = threading.Thread(target=saved.save, args=[saved.copy(3, {})])
    third.start()
    # It may be the second that waits, if the first is not yet being written.
    third.join(1)
    assert third.is_alive()
    go()
    third.join(60)
    saved.wait()
    assert store.steps(tmp_path) == [1, 2, 3]


def test_at_once_means_before_training_goes_on(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, make_model(), Saving(async_save=False))
    saved.save(saved.copy(1, {}))
    assert store.steps(tmp_path) == [1]


def test_superfluous_ones_go(tmp_path: Path) -> None:
    _save(tmp_path, make_model(), *range(1, 7), keep=2)
    assert store.steps(tmp_path) == [5, 6]
    _save(tmp_path, make_model(), 7, keep=1)
    assert store.steps(tmp_path) == [7]


# Where nothing can be written.


def test_where_nothing_can_be_written_training_goes_on_and_then_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("A file, where a folder is to be.")
    saved = Checkpoints(folder, make_model(), Saving())
    saved.save(saved.copy(1, {}))
    saved.wait()
    told = capsys.readouterr().err
    assert "The checkpoint of step 1 could not be written: " in told
    assert "Training goes on without it." in told
    with pytest.raises(CheckpointError, match=r"of step 1, could not .* There is none"):
        saved.check()
    folder.unlink()
    saved.save(saved.copy(2, {}))
    saved.wait()
    saved.check()
    assert store.steps(folder) == [2]


def test_a_disk_without_room_costs_one_checkpoint_and_leaves_no_litter(
    tmp_path: Path,
) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    with fresh_processes.start(
        "tests.trainer.full_disk", str(folder), log=log
    ) as program:
        status = program.wait(120)
    printed = log.read_text()
    assert status == 0, printed
    assert "The checkpoint of step 2 could not be written: " in printed
    assert "\n[1] ['step-00000001']\n" in printed
    assert printed.endswith("\n[1, 3]\n")


@pytest.mark.parametrize("kind", [OSError, tf.errors.ResourceExhaustedError])
def test_on_a_full_disk_old_checkpoints_make_room_for_new_ones(
    kind: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    room, write = 3, store.write_tensors
    reason = "No space left on device"
    full = OSError(errno.ENOSPC, reason)
    if kind is not OSError:
        full = tf.errors.ResourceExhaustedError(None, None, f"a/b; {reason}")

    def write_if_room(folder: Path, values: dict[str, tf.Tensor]) -> None:
        if len(store.steps(tmp_path)) >= room:
            raise full
        write(folder, values)

    monkeypatch.setattr(store, "write_tensors", write_if_room)
    saved = Checkpoints(tmp_path, make_model(), Saving(keep=5, async_save=False))
    for step in range(1, 6):
        saved.save(saved.copy(step, {"best_step": 2}))
    saved.check()
    assert store.steps(tmp_path) == [2, 4, 5]
    assert capsys.readouterr().err == "".join(
        f"\nThe disk has no room for the checkpoint of step {new}: that of step {old} "
        "is removed for it.\n"
        for new, old in ((4, 1), (5, 3))
    )
    room = 1  # Neither the last nor the best one goes.
    saved.save(saved.copy(6, {"best_step": 2}))
    assert store.steps(tmp_path) == [2, 5]
    assert "step 6 could not be written: " in capsys.readouterr().err
