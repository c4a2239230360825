"""The modes of the command line: each is a function of a module in this folder.

catalog         the list of experiments; describe, diff, template, tokenizer
machine_checks  doctor: what can fail, or be slow, on a machine
job             a mode that works on a model, built for the devices here
runs            train_and_eval, train, eval, decode, export
trials          inspect, the smoke test, benchmark, tune, verify
sweep           a run for each of some values

A new one is a function and a line below; `flags.HELP` says what it is for.
"""

from __future__ import annotations

import importlib
from typing import Any

# Of each mode its module here, and the function.
COMMANDS = {
    "train_and_eval": "runs.train",
    "train": "runs.train",
    "eval": "runs.evaluate",
    "decode": "runs.decode",
    "export": "runs.export",
    "benchmark": "trials.benchmark",
    "tune": "trials.tune",
    "verify": "trials.verify",
    "inspect": "trials.inspect",
    "smoke_test": "trials.smoke_test",
    "tokenizer": "catalog.tokenizer",
    "describe": "catalog.describe",
    "template": "catalog.template",
    "diff": "catalog.diff",
    "doctor": "machine_checks.doctor",
}
# Those that need no model, and are called with the flags alone.
WITHOUT_MODEL = ("tokenizer", "describe", "template", "diff", "doctor")
TRAINING = ("train_and_eval", "train")
OF_CHECKPOINTS = ("eval", "decode", "export")


def find(mode: str) -> Any:
    """Returns the function of a mode, with which its module is imported."""
    module, _, name = COMMANDS[mode].partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
