"""Runs the trainer: `python -m trainer`."""

import sys

try:
    from tfgpipe_trainer.main import run_program
except ImportError as error:
    if error.name is not None:
        raise
    sys.exit(str(error))  # A check of tfgpipe's says what to do.

run_program(sys.argv)
