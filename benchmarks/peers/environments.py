"""The peers, and environments to run them in.

    python -m benchmarks.peers.environments DIR [PEER ...]

makes a virtual environment for each peer, or for those named, in a folder of its name.
Where pip would take a torch with CUDA, `PIP_EXTRA_INDEX_URL` may name an index that has
one without.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A library that trains the same workloads.

    Attributes:
        module: What runs it, of this package.
        requirements: What pip installs for it, the library itself first.
        schedules: Those it has.
        workloads: Those that its module has.
        one_process: Whether all its stages run in one process.
        can_compile: Whether it also trains what a compiler of its own makes.
    """

    module: str
    requirements: tuple[str, ...]
    schedules: tuple[str, ...] = ("gpipe",)
    workloads: tuple[str, ...] = ("mlp", "transformer")
    one_process: bool = False
    can_compile: bool = False

    @property
    def package(self) -> str:
        """The library's name in the package index.

        >>> PEERS["torch"].package
        'torch'
        """
        return self.requirements[0].partition("=")[0]


TORCH = "torch==2.13.0"
PEERS = {
    "torch": Peer(
        module="torch_pipelining",
        requirements=(TORCH, "numpy"),
        schedules=("plain", "gpipe", "1f1b", "interleaved", "zero_bubble"),
        workloads=("mlp", "transformer", "decoder", "resnet50", "translation"),
        can_compile=True,
    ),
    "torchgpipe": Peer(
        module="torch_gpipe",
        requirements=("torchgpipe==0.0.7", TORCH, "numpy"),
        one_process=True,
    ),
    "jax": Peer(
        module="jax_pipeline",
        requirements=("jax==0.10.2", "jaxlib==0.10.2", "numpy"),
        schedules=("plain", "gpipe"),
    ),
}


def make(folder: Path, name: str) -> None:
    """Makes the environment of a peer, or brings it up to date."""
    environment = folder / name
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = str(environment / "bin" / "python")
    command = [python, "-m", "pip", "install", *PEERS[name].requirements]
    subprocess.run(command, check=True)


def find(folder: Path | None, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the Pythons of peers, which need not be there.

    Args:
        folder: Where `make` made environments.
        given: Pythons of other environments, by the peers' names.

    >>> find(Path("envs"), {"jax": "python3"})["jax"]
    'python3'
    >>> find(Path("envs"), {"jax": "python3"})["torch"]
    'envs/torch/bin/python'
    """
    made = {name: f"{folder}/{name}/bin/python" for name in PEERS if folder is not None}
    return {**made, **given}


def missing(name: str, python: str | None) -> str | None:
    """Returns in a sentence why a peer cannot be run, or None if it can."""
    if python is None:
        return f"{name} is left out: no environment was named for it."
    remedy = f"`python -m benchmarks.peers.environments DIR {name}` makes one with it."
    package = PEERS[name].package
    program = f"import importlib.metadata as m; m.version({package!r})"
    try:
        run = subprocess.run([python, "-c", program], capture_output=True, check=False)
    except FileNotFoundError:
        return f"{name} is left out: there is no {python}. {remedy}"
    if run.returncode:
        return f"{name} is left out: {python} has no package {package}. {remedy}"
    return None


def main() -> None:
    """Makes the environments that the arguments name."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.environments",
        description="Makes an environment for each library to compare with.",
    )
    parser.add_argument("folder", type=Path, help="where to make them")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(PEERS))
    flags = parser.parse_args()
    unknown = sorted(set(flags.peers) - set(PEERS))
    if unknown:
        parser.error(f"Expected peers of {', '.join(PEERS)}. Received {unknown[0]}.")
    for name in flags.peers or PEERS:
        make(flags.folder, name)


if __name__ == "__main__":
    main()
