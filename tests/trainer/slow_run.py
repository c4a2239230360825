"""A run that copies often, and takes its time: `python -m tests.trainer.slow_run`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tfgpipe_trainer import callbacks, remote_run
from tfgpipe_trainer.main import main

if __name__ == "__main__":
    remote_run._COPY_SECONDS = 0.05
    real = callbacks.Logging.end

    def end(self: Any, step: int, loss: float) -> None:
        if step > int(os.environ.get("STEPS_BEFORE", "0")):
            time.sleep(float(os.environ.get("STEP_SECONDS", "0.3")))
        real(self, step, loss)

    callbacks.Logging.end = end  # type: ignore[method-assign]
    sys.exit(main(["trainer", *sys.argv[1:]]))
