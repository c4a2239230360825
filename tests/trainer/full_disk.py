"""Checkpoints on a disk that has no room for one of them.

    python -m tests.trainer.full_disk FOLDER

prints which are there after it, and after the next.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import tfgpipe
from tests.helpers.checkpointed_model import make_model
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.checkpoint.checkpoints import Checkpoints
from tfgpipe_trainer.config import Saving


def _main(folder: Path) -> None:
    tfgpipe.make_logical_cpus(2)
    saved = Checkpoints(folder, make_model(width=64), Saving())
    saved.save(saved.copy(1, {}))
    saved.wait()
    # As on a disk with room for a fraction of it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    saved.save(saved.copy(2, {}))
    saved.wait()
    print(store.steps(folder), sorted(path.name for path in folder.iterdir()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    saved.save(saved.copy(3, {}))
    saved.wait()
    saved.check()
    print(store.steps(folder))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
