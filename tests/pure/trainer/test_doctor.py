"""What the properties of a machine mean: ok, slow, or fails."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tfgpipe_trainer import doctor, findings
from tfgpipe_trainer.findings import GIB, Finding

VNNI = {"avx", "avx2", "avx512f", "avx512_vnni"}


def levels(found: Sequence[Finding]) -> list[str]:
    return [each.level for each in found]


@pytest.mark.parametrize(
    ("installed", "level"),
    [
        ("3.14", "ok"),
        ("3.14.1", "ok"),
        ("3.15.9", "ok"),
        ("3.16.0", "fails"),
        ("3.16rc1", "fails"),
        ("3.9.2", "fails"),
        ("4.0", "fails"),
        (None, "fails"),
    ],
)
def test_a_version_is_within_the_range_or_fails(
    installed: str | None, level: str
) -> None:
    bounds = ">=3.14,<3.16"
    found = findings.check_version("keras", installed=installed, supported=bounds)
    assert found.level == level
    assert ("pip install 'keras>=3.14,<3.16'" in found.text) == (level == "fails")


@pytest.mark.parametrize(
    ("installed", "level", "words"),
    [
        ({"tensorflow": "2.21.0"}, "ok", "tensorflow 2.21.0"),
        ({"tensorflow-cpu": "2.21.0"}, "ok", "tensorflow-cpu 2.21.0"),
        ({"tensorflow-tpu": "2.19.1"}, "fails", "install 'tensorflow-tpu>=2.20,<2.22'"),
        ({}, "fails", "pip install 'tensorflow>=2.20,<2.22'"),
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
    found = findings.check_tensorflow(
        installed, required="tensorflow", supported=">=2.20,<2.22"
    )
    assert found.level == level
    assert words in found.text


def test_an_optional_package_that_is_missing_is_no_failure() -> None:
    found = findings.check_optional("grain", installed=None, purpose="data sets")
    assert found == Finding(
        "ok", "grain is not installed: `pip install grain` for data sets."
    )
    found = findings.check_optional(
        "grain", installed="0.3", purpose="data sets", supported=">=0.2,<0.3"
    )
    assert found.level == "fails"


@pytest.mark.parametrize(
    ("seen", "num_there", "visible", "expected", "words"),
    [
        (0, 0, None, ["ok"], "splits|split into"),
        (2, 2, None, ["ok", "ok"], "GPU:1 is"),
        (0, 2, None, ["slow", "ok"], "and-cuda"),
        (1, 2, "0", ["ok", "ok"], "CUDA_VISIBLE_DEVICES=0 hides 1 of 2"),
        (0, 2, "", ["slow", "ok"], "CUDA_VISIBLE_DEVICES= hides 2 of 2"),
    ],
)
def test_gpus_that_are_not_used_are_named(
    seen: int, num_there: int, visible: str | None, expected: list[str], words: str
) -> None:
    found = findings.check_gpus(["H"] * seen, num_there=num_there, visible=visible)
    assert levels(found) == expected
    assert any(word in each.text for each in found for word in words.split("|"))


@pytest.mark.parametrize(
    ("cores", "here", "load", "expected"),
    [
        (8, 8, 1.0, ["ok", "ok"]),
        (8, 8, 7.0, ["ok", "slow"]),
        (1, 8, 0.0, ["slow", "ok"]),
        (2, 64, 20.0, ["ok", "ok"]),
    ],
)
def test_cores_that_are_few_or_busy_are_slow(
    cores: int, here: int, load: float, expected: list[str]
) -> None:
    assert levels(findings.check_cores(cores, num_here=here, load=load)) == expected


def test_a_container_with_less_time_than_cores_is_slow() -> None:
    assert findings.check_quota(None, 8) == findings.check_quota(8.0, 8) == []
    (found,) = findings.check_quota(1.5, 8)
    assert found.level == "slow"
    assert "TF_NUM_INTRAOP_THREADS=1" in found.text


@pytest.mark.parametrize(
    ("available", "level"), [(GIB // 2, "fails"), (GIB, "slow"), (8 * GIB, "ok")]
)
def test_little_memory_fails(available: int, level: str) -> None:
    assert findings.check_memory(total=9 * GIB, available=available).level == level


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (set(), []),
        ({"sse4_2"}, ["fails"]),
        ({"avx"}, ["slow"]),
        ({"avx", "avx2"}, ["ok"]),
        (VNNI, ["ok"]),
    ],
)
def test_a_processor_without_avx_fails(flags: set[str], expected: list[str]) -> None:
    assert levels(findings.check_instructions(flags)) == expected


@pytest.mark.parametrize(
    ("setting", "flags", "level"),
    [
        (None, VNNI, "ok"),
        (None, {"avx2", "avx_vnni"}, "ok"),
        (None, {"avx2"}, "slow"),
        ("1", {"avx2"}, "ok"),
        ("0", VNNI, "slow"),
    ],
)
def test_onednn_is_on_if_set_or_by_itself(
    setting: str | None, flags: set[str], level: str
) -> None:
    assert findings.check_onednn(setting, flags).level == level


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["ok"]),
        ({"TF_NUM_INTRAOP_THREADS": "1"}, ["slow"]),
        ({"TF_NUM_INTRAOP_THREADS": "4", "OMP_NUM_THREADS": "1"}, ["ok", "ok"]),
        # 0 has TensorFlow choose.
        ({"TF_NUM_INTEROP_THREADS": "0"}, ["ok"]),
        ({"TF_NUM_INTEROP_THREADS": "all"}, ["slow"]),
    ],
)
def test_variables_that_leave_cores_idle_are_slow(
    environment: dict[str, str], expected: list[str]
) -> None:
    assert levels(findings.check_threads(environment, 4)) == expected


@pytest.mark.parametrize(
    ("environment", "has_onednn", "has_gpus", "expected"),
    [
        ({}, False, False, ["slow"]),
        ({}, True, False, []),
        ({}, False, True, []),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, True, False, ["slow"]),
        ({"MALLOC_MMAP_THRESHOLD_": "1073741824"}, False, False, ["ok"]),
    ],
)
def test_malloc_matters_on_cpus_without_onednn(
    environment: dict[str, str], has_onednn: bool, has_gpus: bool, expected: list[str]
) -> None:
    found = findings.check_malloc(environment, has_onednn=has_onednn, has_gpus=has_gpus)
    assert levels(found) == expected


@pytest.mark.parametrize(
    ("free", "needed", "level"),
    [
        (GIB // 2, 0, "fails"),
        (2 * GIB, 0, "ok"),
        (2 * GIB, 3 * GIB, "fails"),
        (GIB // 2, GIB // 4, "ok"),
    ],
)
def test_checkpoints_need_room(free: int, needed: int, level: str) -> None:
    assert findings.check_disk(free=free, folder=".", needed=needed).level == level


@pytest.mark.parametrize(
    ("num_devices", "num_gpus", "num_cores", "level"),
    [(4, 4, 2, "ok"), (4, 3, 64, "fails"), (2, 0, 2, "ok"), (4, 0, 2, "slow")],
)
def test_too_few_gpus_fail_and_too_few_cores_are_slow(
    num_devices: int, num_gpus: int, num_cores: int, level: str
) -> None:
    found = findings.check_devices(num_devices, num_gpus=num_gpus, num_cores=num_cores)
    assert found.level == level


def test_missing_accelerators_are_slow() -> None:
    assert findings.check_accelerators(2, there=2) == []
    assert levels(findings.check_accelerators(2, there=1)) == ["slow"]


@pytest.mark.parametrize(
    ("gpu_memory", "available", "level"),
    [
        ((), 7 * GIB, "ok"),
        ((), 5 * GIB, "fails"),
        ((4 * GIB, 4 * GIB), 1, "ok"),
        ((4 * GIB, 2 * GIB), 99 * GIB, "fails"),
    ],
)
def test_devices_of_a_cpu_share_its_memory(
    gpu_memory: tuple[int, ...], available: int, level: str
) -> None:
    peaks = [3.0 * GIB, 2.0 * GIB]
    found = findings.check_estimate(peaks, gpu_memory=gpu_memory, available=available)
    assert found.level == level


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = doctor.check_port(taken.getsockname()[1])
        assert "Address already in use" in found.text
    assert doctor.check_port(0).text == "A port of 127.0.0.1 can be listened on."
    assert findings.check_port(0, "Permission denied").level == "fails"


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert levels(list(doctor.check_folder(tmp_path / "runs" / "new"))) == ["ok"] * 2
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refused)
    _, found = doctor.check_folder(tmp_path)
    assert found.level == "fails"
    assert "Permission denied" in found.text
    assert os.listdir(tmp_path) == []


def test_cores_are_counted_where_no_system_call_says_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # As on macOS.
    assert doctor.Machine(device="cpu").num_cores == os.cpu_count()
