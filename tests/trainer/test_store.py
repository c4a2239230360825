"""What is in a checkpoint is read as it was written, and damage to it is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.checkpoint.checkpoints import latest_valid
from tfgpipe_trainer.checkpoint.store import Checkpoint, DamagedError, Metadata
from tfgpipe_trainer.errors import CheckpointError

NOTES = {"best_step": 3, "best_value": 0.1, "num_worse": 0, "skipped": [1, 2]}


def _values() -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(0)
    return {
        "dense/kernel": tf.constant(rng.normal(size=[4, 3]), tf.float32),
        "dense/none": tf.zeros([0, 3]),
        "half": tf.constant(rng.normal(size=[5]), tf.bfloat16),
        "optimizer/iterations": tf.constant(7, tf.int64),
        "flag": tf.constant(True),
        "seed": tf.constant([2**32 - 1, 0], tf.uint32),
    }


def _write(folder: Path, step: int, **values: tf.Tensor) -> Path:
    metadata = Metadata(step=step, time=123.456, notes=NOTES)
    store.write(folder, Checkpoint(metadata=metadata, values=values or _values()))
    return store.path_of(folder, step)


def _same(values: Mapping[str, tf.Tensor], expected: Mapping[str, tf.Tensor]) -> bool:
    return values.keys() == expected.keys() and all(
        values[name].dtype == x.dtype
        and values[name].shape == x.shape
        and values[name].numpy().tobytes() == x.numpy().tobytes()
        for name, x in expected.items()
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    _write(tmp_path, 20)
    read = store.read(tmp_path, 20)
    assert read.metadata == Metadata(step=20, time=123.456, notes=NOTES)
    assert store.metadata(tmp_path, 20) == read.metadata
    assert _same(read.values, _values())


def test_a_checkpoint_is_what_tensorflow_reads(tmp_path: Path) -> None:
    reader = tf.train.load_checkpoint(str(_write(tmp_path, 1) / "state"))
    for name, value in _values().items():
        np.testing.assert_array_equal(reader.get_tensor(name), value, err_msg=name)
    assert json.loads(reader.get_tensor("/about"))["step"] == 1


def _found(folder: Path, metadata: Metadata, values: Mapping[str, tf.Tensor]) -> bool:
    """Returns whether damage is found; if it is not, all must be as it was."""
    try:
        read = store.read(folder, 1)
    except DamagedError:
        return True
    assert read.metadata == metadata
    assert _same(read.values, values)
    return False


@pytest.mark.parametrize("file", ["state.index", "state.data-00000-of-00001"])
def test_every_flipped_bit_is_found_or_changes_nothing(
    file: str, tmp_path: Path
) -> None:
    path = _write(tmp_path, 1) / file
    whole, metadata = path.read_bytes(), store.metadata(tmp_path, 1)
    found = []
    for i in range(len(whole)):
        for bit in (0, 7):
            changed = whole[i] ^ (1 << bit)
            path.write_bytes(whole[:i] + bytes([changed]) + whole[i + 1 :])
            found.append(_found(tmp_path, metadata, _values()))
    if file == "state.index":
        # TensorFlow does not read an empty block at the end, and what pads the rest.
        assert found.count(False) <= 2 * 61
    else:
        assert all(found)


@pytest.mark.parametrize("file", ["state.index", "state.data-00000-of-00001"])
def test_every_truncation_is_found(file: str, tmp_path: Path) -> None:
    path = _write(tmp_path, 1) / file
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match="its values cannot be read: "):
            store.read(tmp_path, 1)
    path.unlink()
    with pytest.raises(DamagedError, match="its values cannot be read: "):
        store.read(tmp_path, 1)


def test_damage_to_a_large_index_is_found(tmp_path: Path) -> None:
    """An index of many names has several blocks, each with a checksum."""
    one = tf.constant(1.0)
    values = {f"{i:04}{'x' * 300}": one for i in range(2000)}
    path = _write(tmp_path, 1, **values) / "state.index"
    whole, metadata = path.read_bytes(), store.metadata(tmp_path, 1)
    assert (
        len(
            tf.train.load_checkpoint(
                str(path.with_suffix(""))
            ).get_variable_to_shape_map()
        )
        == 2001
    )
    for i in range(0, len(whole) - 61, len(whole) // 20):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        assert _found(tmp_path, metadata, values), i


def test_what_a_checkpoint_says_of_itself_is_read_without_its_values(
    tmp_path: Path,
) -> None:
    path = _write(tmp_path, 1) / "state.data-00000-of-00001"
    metadata = store.metadata(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])  # The first tensor by name is `/metadata`.
    assert store.metadata(tmp_path, 1) == metadata
    with pytest.raises(DamagedError):
        store.read(tmp_path, 1)


def test_one_of_a_later_version_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, 1)
    with monkeypatch.context() as later:
        later.setattr(store, "FORMAT", store.FORMAT + 1)
        _write(tmp_path, 2)
    words = r"of format 2 to 3; that in .*step-00000002 is of format 4\. Go on"
    for read in (store.read, store.metadata):
        with pytest.raises(CheckpointError, match=words):
            read(tmp_path, 2)
    with pytest.raises(CheckpointError, match=words):
        latest_valid(tmp_path, set_aside=True)
    assert store.steps(tmp_path) == [1, 2]


def test_one_of_a_format_that_is_no_more_read_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    (path / "about.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"format 2 to 3; that in .* format 1\."):
        store.read(tmp_path, 1)


def test_one_of_the_format_before_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FORMAT", 2)
    _write(tmp_path, 1)
    monkeypatch.undo()
    assert store.metadata(tmp_path, 1).step == 1


WRONG: dict[str, Any] = {
    "no format": {"format": None},
    "format of text": {"format": "2"},
    "step of text": {"step": "2"},
    "another step": {"step": 5},
    "no time": {"time": None},
    "notes that are a list": {"notes": []},
    "no names": {"tensors": None},
    "an unknown dtype": {"tensors": {"half": "banana"}},
    "a dtype that is no text": {"tensors": {"half": 3}},
    "no JSON": "{",
    "a list": "[]",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", WRONG)
def test_one_that_says_what_cannot_be_is_moved_aside_as_damaged(
    name: str, tmp_path: Path
) -> None:
    _write(tmp_path, 1)
    at = _write(tmp_path, 2)
    text = tf.train.load_checkpoint(str(at / "state")).get_tensor("/about")
    changed = WRONG[name]
    if isinstance(changed, dict):
        changed = json.dumps({**json.loads(text), **changed})
    store.write_tensors(at, {"/about": changed, **_values()})
    newest = latest_valid(tmp_path, set_aside=True)
    assert newest is not None
    assert newest.metadata.step == 1
    assert store.steps(tmp_path) == [1]
    assert (tmp_path / "damaged-0-step-00000002").is_dir()


def test_lack_of_memory_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, 1)

    def fail(**arguments: Any) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    monkeypatch.setattr(tf.raw_ops, "RestoreV2", fail)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        latest_valid(tmp_path, set_aside=True)
    assert store.steps(tmp_path) == [1]
