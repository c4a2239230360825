"""Properties of a machine: ok, slow, or fails."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement

from tfgpipe_params import template
from tfgpipe_trainer.commands import catalog, machine_checks
from tfgpipe_trainer.commands.machine_checks import CheckResult
from tfgpipe_trainer.hyperparams import override

pytestmark = pytest.mark.pure

GIB = 2**30
KERAS = Requirement("keras>=3.14,<3.16")
TENSORFLOW = Requirement("tensorflow>=2.20,<2.22")


def levels(found: Iterable[CheckResult]) -> list[str]:
    return [each.level for each in found]


@pytest.mark.parametrize(
    ("installed", "level"),
    [
        ("3.14", "ok"),
        ("3.14.1", "ok"),
        ("3.15.9", "ok"),
        ("3.15.0rc1", "ok"),
        ("3.16.0", "fails"),
        ("3.9.2", "fails"),
        ("4.0", "fails"),
        (None, "fails"),
    ],
)
def test_a_version_is_within_the_range_or_fails(
    installed: str | None, level: str
) -> None:
    found = machine_checks.check_version(KERAS, installed)
    assert found.level == level
    assert ("pip install 'keras<3.16,>=3.14'" in found.text) == (level == "fails")


@pytest.mark.parametrize(
    ("installed", "level", "words"),
    [
        ({"tensorflow": "2.21.0"}, "ok", "tensorflow 2.21.0"),
        ({"tensorflow-cpu": "2.21.0"}, "ok", "tensorflow-cpu 2.21.0"),
        ({"tensorflow-tpu": "2.19.1"}, "fails", "install 'tensorflow-tpu<2.22,>=2.20'"),
        ({}, "fails", "pip install 'tensorflow<2.22,>=2.20'"),
        (
            {"tensorflow": "2.21.0", "tensorflow-tpu": "2.20.0"},
            "fails",
            "pip uninstall tensorflow tensorflow-tpu",
        ),
    ],
)
def test_one_tensorflow_of_any_name_is_expected(
    installed: dict[str, str], level: str, words: str
) -> None:
    found = machine_checks.check_tensorflow(installed, TENSORFLOW)
    assert found.level == level
    assert words in found.text


def test_a_missing_package_of_an_extra_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = machine_checks._installed
    versions = {"grain": None, "tokenizers": "0.1"}
    monkeypatch.setattr(
        machine_checks, "_installed", lambda name: versions.get(name, real(name))
    )
    found = {each.text: each.level for each in machine_checks.check_optional()}
    assert found["grain is not installed, of tfgpipe[trainer]."] == "ok"
    (old,) = (text for text in found if text.startswith("tokenizers 0.1; expected"))
    assert found[old] == "fails"


@pytest.mark.parametrize(
    ("seen", "num_there", "visible", "expected", "words"),
    [
        (0, 0, None, ["ok"], "split into"),
        (2, 2, None, ["ok", "ok"], "GPU:1 is H"),
        (0, 2, None, ["slow", "ok"], "and-cuda"),
        (1, 2, "0", ["ok", "ok"], "CUDA_VISIBLE_DEVICES=0 hides"),
        (0, 2, "", ["slow", "ok"], "CUDA_VISIBLE_DEVICES= hides"),
    ],
)
def test_gpus_that_are_not_used_are_named(
    seen: int,
    num_there: int,
    visible: str | None,
    expected: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "num_gpus_there", lambda: num_there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = list(machine_checks.check_gpus(["H"] * seen))
    assert levels(found) == expected
    assert any(words in each.text for each in found)


@pytest.mark.parametrize(
    ("cores", "load", "free", "expected"),
    [
        (8, 1.0, 8 * GIB, ["ok", "ok", "ok"]),
        (8, 7.0, 8 * GIB, ["ok", "slow", "ok"]),
        (1, 0.0, 8 * GIB, ["slow", "ok", "ok"]),
        (2, 6.0, GIB // 2, ["ok", "ok", "fails"]),
        (2, 6.0, GIB, ["ok", "ok", "slow"]),
    ],
)
def test_few_or_busy_cores_are_slow_and_little_memory_fails(
    cores: int,
    load: float,
    free: int,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_checks, "num_cores", lambda: cores)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine_checks, "available_memory", lambda: free)
    assert levels(machine_checks.check_cpu())[:3] == expected


def test_a_container_has_the_memory_of_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "max").write_text(f"{3 * GIB}\n")
    (tmp_path / "current").write_text(f"{GIB}\n")
    files = (str(tmp_path / "max"), str(tmp_path / "current"))
    monkeypatch.setattr(machine_checks, "_LIMITS", files)
    memory = types.SimpleNamespace(available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert machine_checks.available_memory() == 2 * GIB
    (tmp_path / "max").write_text("max\n")
    assert machine_checks.available_memory() == 8 * GIB


@pytest.mark.parametrize(
    ("flags", "setting", "expected"),
    [
        (None, None, []),
        ("fpu sse4_2", None, ["fails", "slow"]),
        ("avx avx2", None, ["slow"]),
        ("avx avx512_vnni", None, ["ok"]),
        ("avx avx_vnni", "0", ["slow"]),
        ("avx avx2", "1", ["ok"]),
    ],
)
def test_a_processor_without_avx_fails_and_one_without_onednn_is_slow(
    flags: str | None,
    setting: str | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f"processor: 0\nflags\t\t: {flags}\n" if flags else ""
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    environment = {} if setting is None else {"TF_ENABLE_ONEDNN_OPTS": setting}
    assert levels(machine_checks.check_instructions(environment)) == expected


@pytest.mark.parametrize(("free", "level"), [(GIB // 2, "fails"), (2 * GIB, "ok")])
def test_a_run_needs_room(
    free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = types.SimpleNamespace(free=free)
    monkeypatch.setattr(psutil, "disk_usage", lambda path: usage)
    assert levels(machine_checks.check_folder(tmp_path / "runs" / "new")) == [level]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refused)
    _, found = machine_checks.check_folder(tmp_path)
    assert found.level == "fails"
    assert "Permission denied" in found.text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("num_devices", "num_gpus", "cores", "level"),
    [(4, 4, 2, "ok"), (4, 3, 64, "fails"), (2, 0, 2, "ok"), (4, 0, 2, "slow")],
)
def test_too_few_gpus_fail_and_too_few_cores_are_slow(
    num_devices: int,
    num_gpus: int,
    cores: int,
    level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_checks, "num_cores", lambda: cores)
    monkeypatch.setattr(machine_checks, "check_data", lambda _: CheckResult("ok", ""))
    flags = [f"pipelining.num_stages={num_devices}"]
    experiment = override(template.Mine(), flags)
    found = list(machine_checks.check_experiment(experiment, num_gpus=num_gpus))
    assert levels(found) == [level, "ok"]


def test_missing_accelerators_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(template.Mine):
        num_accelerators = 2

    monkeypatch.setattr(machine_checks, "check_data", lambda _: CheckResult("ok", ""))
    check: Any = machine_checks.check_experiment
    assert levels(check(Large(), num_gpus=2)) == ["ok", "ok"]
    assert levels(check(override(Large(), []), num_gpus=1))[1:] == ["slow", "ok"]


def test_cores_are_counted_where_no_system_call_says_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # As on macOS.
    assert machine_checks.num_cores() == os.cpu_count()
