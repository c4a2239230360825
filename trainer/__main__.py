"""Runs the trainer: `python -m trainer`."""

import sys

from trainer.main import run_program

run_program(sys.argv)
