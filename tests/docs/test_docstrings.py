"""The examples in docstrings run, and give what they show."""

from __future__ import annotations

import doctest
import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers.reference_pages import documented
from tests.helpers.subprocesses import ROOT

PACKAGES = ("tfgpipe", "tfgpipe_params", "tfgpipe_trainer")
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in (*PACKAGES, "benchmarks", "docs", "tests/accelerator_check")
    for path in sorted((ROOT / package).rglob("*.py"))
    # Which would run the program, or the whole guide.
    if path.stem != "__main__" and path != ROOT / "docs" / "tutorial" / "guide.py"
    if ">>>" in path.read_text("utf-8")
]
GIVEN = {"keras": keras, "np": np, "tf": tf, "tfgpipe": tfgpipe}
SHOWN = {
    f"{thing.__module__}.{thing.__qualname__}"
    for thing in documented().values()
    if hasattr(thing, "__qualname__")
} | set(documented())


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    found = doctest.DocTestFinder().find(module, extraglobs=GIVEN)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    failures = []
    for example in found:
        if example.name in SHOWN:
            # A reader of the reference has no more than what it says there is.
            example.globs = dict(GIVEN)
        runner.run(example, out=failures.append)
    assert not failures, "".join(failures)
