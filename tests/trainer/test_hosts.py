"""Replicas on several hosts: one run, the same as that of one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import fresh_processes, runs
from tests.helpers.fresh_processes import Program
from tfgpipe.cluster import peers
from tfgpipe.cluster.addresses import free_ports
from tfgpipe.cluster.engines import workers
from tfgpipe.cluster.engines.roles import Role
from tfgpipe_trainer import hosts
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.config import Pipelining
from tfgpipe_trainer.errors import DivergedError, StoppedError, UsageError
from tfgpipe_trainer.hosts import Hosts
from tfgpipe_trainer.hyperparams import HyperparameterError
from tfgpipe_trainer.main import main


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch):
    """Sets TF_CONFIG, and forgets what flags have made of it."""

    def set_to(config: object) -> None:
        text = config if isinstance(config, str) else json.dumps(config)
        monkeypatch.setenv("TF_CONFIG", text)

    set_to("")
    return set_to


def test_flags_say_which_host_it_is_and_tell_tensorflow(configured) -> None:
    role = hosts.find_role("10.0.0.5:4000,10.0.0.6:4000", 1)
    assert hosts.of_role(role, Pipelining(num_replicas=2)) == Hosts(1, 2)
    assert json.loads(os.environ["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.5:4000", "10.0.0.6:4000"]},
        "task": {"type": "worker", "index": 1},
    }
    assert hosts.find_role("", None) == role


@pytest.mark.parametrize(
    ("values", "number", "fitted"),
    [
        ({"num_stages": 4}, 3, (3, 1, 3)),
        ({"num_stages": 8}, 1, (1, 1, 2)),
        ({"num_stages": 8, "schedule": "interleaved"}, 3, (3, 1, 6)),
        ({"num_replicas": 4, "num_stages": 2}, 4, (4, 4, 2)),
        # Three replicas would not share 32 rows evenly.
        ({"num_replicas": 4, "num_stages": 2}, 3, (2, 2, 2)),
        # A replica of two hosts; one that is left over has nothing to do.
        ({"num_replicas": 2, "num_stages": 2}, 3, (2, 1, 2)),
        ({"num_replicas": 2, "num_stages": 2}, 1, (1, 1, 1)),
    ],
)
def test_on_fewer_hosts_there_are_fewer_replicas_or_stages(
    values: dict, number: int, fitted: tuple[int, int, int]
) -> None:
    pipelining = Pipelining(**values, num_hosts=4)
    assert hosts.fit(pipelining, number, batch_size=32) == fitted


def test_more_hosts_than_it_is_for_are_refused() -> None:
    with pytest.raises(HyperparameterError, match="expected at least 3, which there"):
        hosts.fit(Pipelining(num_stages=2, num_hosts=2), 3, batch_size=4)


def test_a_run_for_more_hosts_goes_on_alone(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [*small, "--set=pipelining.num_stages=2", f"--logdir={tmp_path}"]
    assert main([*both, "--set=training.num_steps=2"]) == 0
    other = [*both, "--set=pipelining.num_hosts=2", "--set=training.num_steps=2"]
    assert main([*other]) == 2  # It was begun for any number.
    assert "pipelining.num_hosts: None -> 2" in capsys.readouterr().err
    assert main([*other, "--allow_changes"]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 hosts are here: pipelining.num_stages=1." in said
    changes = (tmp_path / "changes.txt").read_text()
    assert "pipelining.num_stages: 2 -> 1" in changes
    # Not asked for again.
    assert main([*other]) == 0


@pytest.mark.parametrize(
    ("index", "replica", "is_client"), [(0, 0, True), (1, 0, False), (2, 1, True)]
)
def test_replicas_that_are_fewer_than_hosts_span_several(
    configured, index: int, replica: int, is_client: bool
) -> None:
    role = hosts.find_role("a:4000,b:4000,c:4000,d:4000", index)
    found = hosts.of_role(role, Pipelining(num_replicas=2, num_stages=4))
    assert (found.index, found.count, found.is_client) == (replica, 2, is_client)
    assert found.workers == "a:4000,b:4000,c:4000,d:4000"
    # TensorFlow would take it for another kind of cluster.
    assert "TF_CONFIG" not in os.environ
    arguments = found._of_worker(Pipelining(num_replicas=2, num_stages=4))
    options = workers._options(role, *arguments.values())
    assert (options.port, options.devices, options.index) == (4000, 2, index)
    assert options.host == "0.0.0.0"


def test_one_host_is_alone(configured) -> None:
    assert hosts.find_role("", None) is None
    configured({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert hosts.find_role("", None) is None
    assert hosts.of_role(None, Pipelining()) == hosts.ALONE
    assert hosts.ALONE.is_chief
    assert hosts.ALONE.shard == HostShard(0, 1)


@pytest.mark.parametrize(
    ("listed", "index", "words"),
    [
        (
            "a:4000,b:4000",
            2,
            "Expected --host_index=I, from 0 to 1, which of --hosts this is",
        ),
        ("a:4000,b:4000", None, "received none."),
        ("", 0, "Expected --hosts=HOST:PORT"),
        ("a", 0, "--hosts: "),
    ],
)
def test_wrong_flags_are_refused(configured, listed, index, words) -> None:
    with pytest.raises(UsageError) as error:
        hosts.find_role(listed, index)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}},
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "ps", "index": 0}},
        {"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}},
        {"cluster": {"worker": "localhost:1"}},
    ],
)
def test_a_configuration_that_says_nothing_is_refused(configured, config) -> None:
    configured(config)
    with pytest.raises(UsageError, match=r"^Expected TF_CONFIG to list workers"):
        hosts.find_role("", None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "pipelining.num_stages: expected stages on a multiple of 2 devices"),
        ({"num_replicas": 3}, "pipelining.num_replicas: expected 2, the number of"),
        ({"num_replicas": 2, "num_shards": 2}, "pipelining.num_shards: expected 1"),
        (
            {"num_replicas": 2, "shard_replicas": "slots"},
            "pipelining.shard_replicas: expected none",
        ),
    ],
)
def test_what_hosts_cannot_share_is_refused(configured, changes, words) -> None:
    role = Role(("a:4000", "b:4000"), 0)
    with pytest.raises(HyperparameterError) as error:
        hosts.of_role(role, Pipelining(**changes))
    assert str(error.value).startswith(words)
    hosts.of_role(role, Pipelining(num_replicas=2))
    hosts.of_role(role, Pipelining(num_stages=2))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode=decode"], "Expected --hosts with --mode=train_and_eval, train"),
        (["--smoke_test"], "Expected one host for --smoke_test; received 2"),
        (["--cluster=a:4000"], "Expected one of --hosts, or TF_CONFIG, and --cluster"),
    ],
)
def test_what_several_hosts_do_not_do_is_refused(
    configured, small: list[str], flags: list[str], words: str, capsys
) -> None:
    several = ["--hosts=a:4000,b:4000", "--host_index=0", "--logdir=nowhere"]
    assert main([*small, *several, *flags]) == 1
    assert words in capsys.readouterr().err


def test_only_the_chief_speaks_and_writes_where_all_see_it(tmp_path, capsys) -> None:
    for index in (0, 1):
        host = Hosts(index, 2)
        with host.chief_stdout(), host.output_dir(tmp_path) as folder:
            print(f"host {index}")
            (folder / str(index)).touch()
        assert folder.exists() == (index == 0)
    assert capsys.readouterr().out == "host 0\n"
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize(
    ("error", "clean"),
    [
        (None, True),
        (StoppedError(), True),  # All hosts stop at the same step,
        (DivergedError("the loss is nan"), True),  # and see the same loss.
        (HyperparameterError("data.max_bad_records: 1 of its own"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_host_tells_the_others_whether_they_can_go_on(
    error, clean, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    class Others(peers.Peers):
        def close_sessions(self, *, clean: bool) -> None:
            told.append(clean)

        def lost(self) -> None:
            """None is."""

        ended = lost

    monkeypatch.setattr(peers.Peers, "current", Others())
    for host in (Hosts(1, 2), hosts.ALONE):
        with contextlib.suppress(BaseException), host.report_exit():
            if error is not None:
                raise error
    assert told == [clean]


def test_two_hosts_asked_to_stop_go_on_as_one_process(tmp_path: Path) -> None:
    flags = runs.flags(
        pipelining__num_replicas=2,
        training__num_steps=40,
        checkpoint__every_steps=15,
        evaluation__every_steps=20,
    )
    one, two = tmp_path / "one", tmp_path / "two"
    listed = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))

    def start(index: int) -> Program:
        host = [f"--hosts={listed}", f"--host_index={index}", f"--logdir={two}"]
        log = tmp_path / f"log-{index}"
        return fresh_processes.start("trainer", *flags, *host, log=log)

    def alive() -> None:
        assert [process.poll() for process in (first, second)] == [None, None]

    with start(0) as first, start(1) as second:
        runs.wait_for_step(two, 5, check=alive)
        second.send_signal(signal.SIGTERM)  # The other learns of it.
        assert [process.wait(120) for process in (first, second)] == [42, 42]
    (saved,) = (two / "checkpoints").glob("step-*")
    with start(0) as first, start(1) as second:
        assert main(["trainer", *flags, f"--logdir={one}"]) == 0
        assert [process.wait(300) for process in (first, second)] == [0, 0]
    expected, received = runs.losses(one), runs.losses(two)
    assert 5 <= int(saved.name.partition("-")[2]) < 40
    assert [step for step, _ in received] == [step for step, _ in expected]
    np.testing.assert_allclose(
        [loss for _, loss in received], [loss for _, loss in expected], rtol=2e-5
    )
    measured = [
        [r["validation_loss"] for r in runs.records(folder) if "validation_loss" in r]
        for folder in (one, two)
    ]
    assert len(measured[0]) == 3
    np.testing.assert_allclose(measured[1], measured[0], rtol=2e-5)
    # The second host has said and written nothing.
    assert "/40 " not in (tmp_path / "log-1").read_text()
