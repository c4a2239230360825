"""Replicas that are clients of one list of workers, each with a pipeline on its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster import clients
from tests.cluster.client import listed
from tests.helpers import compare, fresh_processes
from tests.helpers.fresh_processes import Program
from tests.helpers.processes import PATIENCE, wait_for, workers
from tfgpipe.cluster.addresses import Address
from tfgpipe.cluster.errors import EX_TEMPFAIL

pytestmark = pytest.mark.nightly

NUM_WORKERS = clients.NUM_REPLICAS * clients.NUM_STAGES


@contextlib.contextmanager
def started(
    addresses: Sequence[Address], folder: Path, how: str, **variables: str
) -> Iterator[list[tuple[Program, Path]]]:
    """Runs a client of each replica, and yields them with what they print."""
    with contextlib.ExitStack() as stack:
        found = []
        for replica in range(clients.NUM_REPLICAS):
            log = folder / f"{how} {replica}"
            arguments = (clients.__name__, listed(addresses), str(replica), how)
            program = fresh_processes.start(*arguments, log=log, **variables)
            found.append((stack.enter_context(program), log))
        yield found


def test_clients_train_as_the_replicas_of_one_process_or_are_told_why_not(
    tmp_path: Path,
) -> None:
    with workers(NUM_WORKERS, tmp_path, listed=True) as four:
        with started(four, tmp_path, "trains") as both:
            one = clients.trained(None)
            assert [program.wait(PATIENCE) for program, _ in both] == [0, 0], [
                log.read_text() for _, log in both
            ]
        # The workers are new for other clients.
        with started(four, tmp_path, "trains less") as unequal:
            (first, _), (second, log) = unequal
            assert first.wait(PATIENCE) == 0
            assert second.wait(PATIENCE) == EX_TEMPFAIL
            assert "The client of replica 0 has ended." in log.read_text()
        with started(four, tmp_path, "other weights") as others:
            statuses = [program.wait(PATIENCE) for program, _ in others]
            # The slower of both may learn first that the other one has ended.
            assert 1 in statuses
            said = {1: ("must start from the same weights",)}
            said[EX_TEMPFAIL] = ("has ended.", " is gone: ")
            for status, (_, log) in zip(statuses, others, strict=True):
                text = log.read_text()
                assert any(words in text for words in said[status]), text
    found = [
        json.loads(log.read_text().partition("found ")[2].partition("\n")[0])
        for _, log in both
    ]
    for replica, each in enumerate(found):
        compare.assert_allclose(each["values"], one["values"], rtol=1e-5, atol=1e-6)
        assert each["values"] == found[0]["values"]
        for kind in ("even", "uneven"):
            for name in ("loss", "mae", "rmse"):
                assert each[kind][name] == pytest.approx(one[kind][name], rel=1e-5)
            evaluated = f"{kind} evaluated"
            assert each[evaluated] == pytest.approx(one[evaluated], rel=1e-5)
        tasks = range(clients.NUM_STAGES * replica, clients.NUM_STAGES * (replica + 1))
        assert list(dict.fromkeys(each["devices"])) == [
            f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in tasks
        ]


def test_a_client_that_comes_late_is_waited_for_and_one_that_never_does_is_not(
    tmp_path: Path,
) -> None:
    with workers(NUM_WORKERS, tmp_path, listed=True) as four:
        variables = {"FIRST_WAITS": str(tmp_path / "first waits")}
        with started(four, tmp_path, "trains late", **variables) as both:
            assert [program.wait(PATIENCE) for program, _ in both] == [0, 0], [
                log.read_text() for _, log in both
            ]
        with started(four, tmp_path, "never") as both:
            (first, log), (second, other) = both
            assert first.wait(PATIENCE) == EX_TEMPFAIL
            assert "has not ended within 20 s" in (said := log.read_text())
            assert " in check_weights" in said
            assert second.wait(PATIENCE) == EX_TEMPFAIL
            assert "the client of replica 0 at " in other.read_text()


def test_when_a_client_or_a_worker_is_lost_the_clients_end(tmp_path: Path) -> None:
    with workers(NUM_WORKERS, tmp_path, listed=True) as four:
        with started(four, tmp_path, "trains on") as both:
            (left, log), (killed, _) = both
            for _, each in both:
                wait_for("trained 2", each)
            killed.send_signal(signal.SIGKILL)
            began = time.monotonic()
            assert left.wait(PATIENCE) == EX_TEMPFAIL
            assert time.monotonic() - began < 15
            said = log.read_text()
            assert " is gone: the client of replica 1 at 127.0.0.1:" in said
            log.unlink()
        # Others find the workers again.
        with started(four, tmp_path, "trains on") as both:
            for _, each in both:
                wait_for("trained 2", each)
            said = (tmp_path / f"worker-{four[2].port}.log").read_text()
            os.kill(int(said.rpartition("process ")[2].split()[0]), signal.SIGKILL)
            for program, each in both:
                assert program.wait(PATIENCE) == EX_TEMPFAIL
                assert f"Worker 2 at {four[2]} is gone: " in each.read_text()
