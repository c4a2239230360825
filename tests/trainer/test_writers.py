"""Measurements, written by packages as they read them back."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import pytest
import tensorflow as tf
from wandb.proto import wandb_internal_pb2

import tfgpipe
from tests.helpers import runs
from tfgpipe_params import template
from tfgpipe_trainer import devices, writers
from tfgpipe_trainer.hyperparams import HyperparameterError, override
from tfgpipe_trainer.main import main
from tfgpipe_trainer.measures import Measures
from tfgpipe_trainer.writers import Metrics

LINES: list[tuple[int, Mapping[str, float]]] = []


class Mine(writers.Writer):
    """A writer as of a user."""

    def __init__(self, start: writers.Start) -> None:
        self.start = start
        LINES.clear()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values."""
        LINES.append((step, {**values}))

    def close(self) -> None:
        """Says of which run they are."""
        LINES.append((self.start.step, {"closed": 1.0}))


def _logged(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows in files of Weights & Biases, of all starts in order."""
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        # A log as of LevelDB, shorter than a block: checksum, length, kind, data.
        data, place = path.read_bytes(), 7
        assert len(data) < 2**15
        while place < len(data):
            size = int.from_bytes(data[place + 4 : place + 6], "little")
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data[place + 7 : place + 7 + size])
            place += 7 + size
            items = record.history.item
            row = {
                "".join([x.key, *x.nested_key]): json.loads(x.value_json) for x in items
            }
            if row:
                rows.append({k: v for k, v in row.items() if not k.startswith("_")})
    return rows


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for first in (0, 2):
        metrics = Metrics(
            tmp_path, step=first, text="seed = 1", title="lm.Tiny", writers=["wandb"]
        )
        metrics.write(first + 1, {"loss": 0.5})
        metrics.write_validation(first + 2, {"loss": 0.25})
        metrics.close()
        time.sleep(1.0)  # It calls its folders after the second of a start.
    assert _logged(tmp_path) == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "validation_loss": 0.25},
        {"step": 3, "loss": 0.5},
        {"step": 4, "validation_loss": 0.25},
    ]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for first in (0, 2):
        metrics = Metrics(
            tmp_path, step=first, text="seed = 1", title="lm.Tiny", writers=["mlflow"]
        )
        for step in (1, 2, 3):
            metrics.write(first + step, {"loss": first + step / 2, "rate": math.nan})
        metrics.close()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("tfgpipe")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("lm.Tiny", "FINISHED")
    assert run.data.params == {"seed": "1"}
    history = client.get_metric_history(run.info.run_id, "loss")
    points = sorted((each.step, each.value) for each in history)
    assert points == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 3.0), (5, 3.5)]


def test_one_of_ones_own(tmp_path: Path, small: list[str]) -> None:
    own = f"--set=training.writers=('{__name__}.Mine',)"
    assert main([*small, own, f"--logdir={tmp_path}"]) == 0
    assert LINES.pop() == (0, {"closed": 1.0})
    written = [{"step": step, **values} for step, values in LINES]
    assert written == [
        {name: value for name, value in record.items() if name != "final"}
        for record in runs.records(tmp_path)
    ]
    assert {"bubble", "flops_per_second", "memory", "learning_rate"} <= {*LINES[0][1]}


def test_a_writer_that_fails_costs_its_lines_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Mine, step: int, values: Mapping[str, float]) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(Mine, "write", fail)
    metrics = Metrics(tmp_path, step=0, writers=[f"{__name__}.Mine"])
    for step in (1, 2):
        metrics.write(step, {"loss": 0.5})
    assert [record["step"] for record in runs.records(tmp_path)] == [1, 2]
    assert capsys.readouterr().err == (
        "\nMeasurements could not be written: no network. Training goes on.\n"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wandb", "expected the package wandb"),
        ("tensorbord", "expected names among tensorboard, wandb, mlflow, or MODULE"),
        ("math.Mine", "received 'math.Mine'"),
    ],
)
def test_no_such_writer_is_refused(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HyperparameterError, match=rf"^training\.writers: .*{words}"):
        Metrics(tmp_path, step=0, writers=[name])


def test_norms_and_flops_are_those_of_the_plain_model() -> None:
    flags = ["optimizer.log_norms=True", "optimizer.global_clipnorm=None", "width=5"]
    experiment = override(template.Mine(), flags)
    keras.utils.set_random_seed(0)
    model = experiment.build_model()
    model.optimizer.build(model.trainable_variables)
    plain = tfgpipe.quantization.plain_copy(model)
    measures = Measures(experiment, model)
    x, y = next(iter(experiment.batches("train")))
    measures.begin()
    before = [v.numpy() for v in plain.trainable_variables]
    model.train_on_batch(x, y)
    found = measures.end(seconds=0.5)
    with tf.GradientTape() as tape:
        loss = experiment.loss()(y, plain(x))
    gradients = tape.gradient(loss, [v.value for v in plain.trainable_variables])
    after = [v.numpy() for v in model.unpipelined().trainable_variables]

    def norm(arrays: Any) -> float:
        return float(np.sqrt(sum((np.float64(each) ** 2).sum() for each in arrays)))

    moved = [b - a for a, b in zip(before, after, strict=True)]
    assert found["gradient_norm"] == pytest.approx(norm(gradients), rel=1e-5)
    assert found["weight_norm"] == pytest.approx(norm(after), rel=1e-5)
    assert found["update_norm"] == pytest.approx(norm(moved), rel=1e-4)
    # Two FLOPs of each weight of a matrix, and twice that backward, but for the inputs
    # of the first layer.
    matrices = [w.size for w in before if w.ndim == 2]
    products = 64 * (6 * sum(matrices) - 2 * matrices[0])
    assert products < found["flops_per_second"] * 0.5 < 2.5 * products
    assert "mfu" not in found  # Nobody knows what a CPU could do.
    assert 0 < found["bubble"] < 0.5


def test_what_a_gpu_could_do_is_that_of_its_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["one"])
    details = {"device_name": "NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda gpu: details
    )
    # https://www.nvidia.com/en-us/data-center/h100, without sparsity.
    assert devices.peak_flops("mixed_bfloat16") == pytest.approx(989e12, rel=0.01)
    details["device_name"] = "another"
    assert math.isnan(devices.peak_flops("float32"))
