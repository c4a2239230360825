"""The command line of workers and of the supervisor: `python -m tfgpipe.cluster`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfgpipe._util import CommandParser
from tfgpipe.cluster import server, supervisor, worker
from tfgpipe.cluster.addresses import parse_addresses

_EPILOG = """\
exit status: that of the command (75: it lost a worker); 1 wrong arguments,
  2 a worker that cannot start, 128 + n ended by signal n
"""


def main(argv: Sequence[str]) -> int:
    """Runs a command line, program first, and returns the exit status.

    Raises:
        SystemExit: After `--help`, with status 0; for wrong arguments, with 1.
    """
    run, options = parse(argv[1:])
    return run(options)


def parse(arguments: Sequence[str]) -> tuple[Callable[[Any], int], Any]:
    """Returns the function that a command line names, and its options."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    run, options = values.pop("run"), values.pop("options")
    try:
        return run, options(**values)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m tfgpipe.cluster",
        description="Pipelines over several hosts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="{worker,launch}")
    _add_worker(commands)
    _add_launch(commands)
    _add_server(commands)
    return parser


def _add_worker(commands: Any) -> None:
    parser = commands.add_parser(
        "worker",
        help="lend this host's devices to one client at a time",
        epilog="example: python -m tfgpipe.cluster worker --port=4000 --host=0.0.0.0",
        allow_abbrev=False,
    )
    parser.set_defaults(run=worker.run, options=worker.WorkerOptions)
    add = parser.add_argument
    port = "port for tensors; N + 1 is for health"
    add("--port", type=_port, required=True, metavar="N", help=port)
    host = (
        "127.0.0.1 (default), or 0.0.0.0: TensorFlow has no authentication, so only "
        "inside a private network, with TFGPIPE_TOKEN=SECRET set for workers and client"
    )
    add("--host", type=_host, default="127.0.0.1", help=host)
    add("--devices", type=_positive, default=1, metavar="N", help="devices of the CPU")
    cluster = "the list of all workers, for replicas that are processes"
    add("--cluster", type=_addresses, metavar="LIST", help=cluster)
    add("--index", type=_count, metavar="I", help="index in this list, from 0")
    add("--once", action="store_true", help="end with the first client")
    add("--exits_with_parent", action="store_true", help=argparse.SUPPRESS)


def _add_launch(commands: Any) -> None:
    parser = commands.add_parser(
        "launch",
        help="run a command with workers of this machine, and restart them together",
        usage="%(prog)s [--workers=N] [--replicas=N] [options] -- command ...",
        description="Starts workers on this machine, runs a command with "
        "TFGPIPE_CLUSTER set to their list, and restarts all of them when one is lost. "
        "On several machines use the engine that they have, Slurm (--cluster=slurm of "
        "the trainer), Kubernetes or Ray: docs/how-to/hosts.md says how.",
        epilog="example: python -m tfgpipe.cluster launch --workers=2 -- "
        "python -m trainer ...",
        allow_abbrev=False,
    )
    parser.set_defaults(run=supervisor.run, options=supervisor.LaunchOptions)
    add = parser.add_argument
    add("command", nargs="+", help="the program and its arguments, after `--`")
    replicas = "processes of the command: clients of workers, or without with TF_CONFIG"
    add("--workers", type=_positive, metavar="N", help="workers to start")
    add("--replicas", type=_positive, metavar="N", help=replicas)
    defaults = supervisor.LaunchOptions(command=(), workers=1)
    for name, kind, metavar, text in (
        ("devices", _positive, "N", "devices of each worker's CPU (1)"),
        ("max_restarts", _count, "N", "restarts (10)"),
        ("log_dir", str, "DIR", "the workers' logs (a new temporary one)"),
    ):
        default = getattr(defaults, name)
        add(f"--{name}", type=kind, default=default, metavar=metavar, help=text)


def _add_server(commands: Any) -> None:
    """Adds the command that a worker runs for each client, and no user."""
    parser = commands.add_parser("server", allow_abbrev=False)
    parser.set_defaults(run=server.run, options=server.ServerOptions)
    parser.add_argument("--port", type=_port, required=True)
    parser.add_argument("--devices", type=_positive, required=True)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--cluster", type=_addresses)
    parser.add_argument("--index", type=_count, default=0)


def _port(text: str) -> int:
    return int(_addresses(f"127.0.0.1:{text}").rpartition(":")[2])


def _addresses(text: str) -> str:
    try:
        parse_addresses(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _host(text: str) -> str:
    if text not in (*worker.LOOPBACK, "0.0.0.0"):
        raise argparse.ArgumentTypeError(
            "Expected --host=127.0.0.1, which takes this machine's calls alone, or "
            "--host=0.0.0.0, which takes those of all its networks; received "
            f"--host={text}. TensorFlow's server cannot listen on one address of "
            "several: close the port to the others in a firewall, or run the worker in "
            "a network namespace that has no other."
        )
    return text


def _count(text: str) -> int:
    return _at_least(0, int(text))


def _positive(text: str) -> int:
    return _at_least(1, int(text))


def _at_least(least: Any, value: Any) -> Any:
    if not value >= least:
        raise argparse.ArgumentTypeError(f"expected at least {least}; received {value}")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv))
