"""Measured memory, each choice of recomputation in a process of its own."""

from __future__ import annotations

import pytest

from benchmarks.worker import Side, Worker
from tests.runtime.test_memory import peak_growth

SIDE = Side(workload="mlp", num_stages=2, num_microbatches=4, schedule="gpipe")


def test_rematerialisation_at_least_halves_peak_memory():
    rows = 8192
    (kept,) = peak_growth(rows, "none")
    # 16 layers x (input, pre-activation) x rows x 256 floats.
    assert kept > 16 * 2 * rows * 256 * 4
    for remat in ("stage", "layer"):
        assert peak_growth(rows, remat)[0] < kept / 2, remat


@pytest.mark.parametrize("onednn", ["0", "1"])
def test_measured_memory_is_that_of_the_formula_with_onednn_or_without(
    monkeypatch, onednn
):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    with Worker(SIDE, for_memory=True) as worker:
        memory, expected = worker.memory(), worker.expected_memory()
    assert (memory.peak - memory.before) / expected == pytest.approx(1, abs=0.15)


def test_a_measurement_that_cannot_be_true_is_refused(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    monkeypatch.delenv("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", raising=False)
    with Worker(SIDE) as worker:
        words = "is not the memory of a step.*TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1"
        with pytest.raises(RuntimeError, match=words):
            worker.memory()
