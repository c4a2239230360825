"""The command lines of a worker and of the supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import absl.flags

from tfgpipe.cluster import addresses
from tfgpipe.cluster.supervisor import Plan
from tfgpipe.cluster.worker import Options

HELP = """\
Pipelines over several hosts.

  python -m tfgpipe.cluster worker --port=4000 --host=0.0.0.0
  python -m tfgpipe.cluster launch --workers=2 -- python -m trainer ...

worker lends this host's devices to one client at a time.
  --port=N           for tensors; N + 1 tells the worker's health
  --host=ADDRESS     127.0.0.1 (default), or 0.0.0.0: TensorFlow has no
                     authentication, so only inside a private network, with
                     TFGPIPE_TOKEN=SECRET set for workers and client
  --devices=N        parts of the CPU (1)
launch starts workers on this host, or finds those of a list, runs a command
with TFGPIPE_CLUSTER set to their list, and starts anew what dies.
  --workers=N        how many; --devices=N is theirs
  --cluster=LIST     host:port,host:port in place of --workers
  --replicas=N       in their place: N processes of the command, TF_CONFIG set
  --max_restarts=N   of the command (10)
  --start_limit=S    seconds for all workers to be ready (120)
  --time_limit=S     seconds for everything (0: no limit)
  --log_dir=DIR      the workers' logs (a new folder in the temporary one)

Exit status: the command's (75: it lost a worker); 1 wrong flags, 2 a worker
             that does not come up, 124 time limit, 128 + n ended by signal n
"""


class UsageError(Exception):
    """The command line is wrong."""


def parse(argv: Sequence[str]) -> Options | Plan | None:
    """Returns what a command line asks for, None for help. The program comes first.

    Raises:
        UsageError: If a flag is unknown or wrong, or the command is missing.
    """
    own, command = list(argv), []
    if "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    flags = define()
    try:
        modes = flags(own)[1:]
    except absl.flags.Error as error:
        raise UsageError(str(error)) from None
    if flags["help"].value:
        return None
    if modes not in (["worker"], ["launch"]):
        raise UsageError(
            f"Expected `worker` or `launch`; received {' '.join(modes) or 'neither'}."
        )
    values = {name: flags[name].value for name in flags}
    return _options(values) if modes == ["worker"] else _plan(values, command)


def _options(values: dict[str, Any]) -> Options:
    if values["port"] is None:
        raise UsageError("Expected --port=N, such as --port=4000.")
    names = ("port", "host", "devices", "lifeline")
    options = Options(**{name: values[name] for name in names})
    if not options.is_loopback and options.host != "0.0.0.0":
        raise UsageError(
            "Expected --host=127.0.0.1, which takes this machine's calls alone, or "
            "--host=0.0.0.0, which takes those of all its networks; received "
            f"--host={options.host}. TensorFlow's server cannot listen on one address "
            "of several: close the port to the others in a firewall, or run the worker "
            "in a network namespace that has no other."
        )
    try:
        addresses.parse(f"{options.host}:{options.port}")
    except ValueError as error:
        raise UsageError(str(error)) from None
    return options


def _plan(values: dict[str, Any], command: list[str]) -> Plan:
    if not command:
        raise UsageError("Expected a command, such as `-- python -m trainer ...`.")
    exclusive = ("workers", "cluster", "replicas")
    if sum(values[name] is not None for name in exclusive) != 1:
        raise UsageError(
            "Expected one of --workers=N, --cluster=LIST and --replicas=N."
        )
    names = (
        *("workers", "replicas", "cluster", "devices"),
        *("max_restarts", "start_limit", "time_limit", "log_dir"),
    )
    try:
        if values["cluster"] is not None:
            addresses.parse(str(values["cluster"]))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Plan(command=tuple(command), **{name: values[name] for name in names})


def define() -> absl.flags.FlagValues:
    """Returns the flags of both, without those that other modules define."""
    flags = absl.flags.FlagValues()
    flags.set_gnu_getopt(True)
    # `HELP` says what they mean.
    arguments = {"help": None, "flag_values": flags}
    absl.flags.DEFINE_integer("port", None, **arguments)
    absl.flags.DEFINE_string("host", "127.0.0.1", **arguments)
    absl.flags.DEFINE_integer("devices", 1, lower_bound=1, **arguments)
    absl.flags.DEFINE_bool("lifeline", False, **arguments)
    absl.flags.DEFINE_integer("workers", None, lower_bound=1, **arguments)
    absl.flags.DEFINE_integer("replicas", None, lower_bound=1, **arguments)
    absl.flags.DEFINE_string("cluster", None, **arguments)
    absl.flags.DEFINE_integer("max_restarts", 10, lower_bound=0, **arguments)
    absl.flags.DEFINE_float("start_limit", 120.0, lower_bound=0, **arguments)
    absl.flags.DEFINE_float("time_limit", 0.0, lower_bound=0, **arguments)
    absl.flags.DEFINE_string("log_dir", None, **arguments)
    absl.flags.DEFINE_bool("help", False, None, short_name="h", flag_values=flags)
    return flags
