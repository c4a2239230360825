"""The faults that `python -m tests.mutations` plants are still faults of this code."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.helpers.subprocesses import ROOT
from tests.mutations.faults import FAULTS, Fault

pytestmark = pytest.mark.pure


@functools.cache
def of_the_gate(file: str) -> set[str]:
    """Returns the names of the functions of a file that do not run nightly."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    marks = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    if any("pytest.mark.nightly" in mark for mark in marks):
        return set()
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        if "pytest.mark.nightly" not in map(ast.unparse, node.decorator_list)
    }


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(f.file, f.text, f.instead) for f in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_what_a_file_does(fault: Fault):
    assert fault.file.startswith(("tfgpipe/", "trainer/", "params/"))
    source = (ROOT / fault.file).read_text("utf-8")
    with_fault = fault.planted(source)  # Which finds its text once.
    assert ast.dump(ast.parse(with_fault)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_tests_that_are_to_find_a_fault_are_of_the_gate(fault: Fault):
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert Path(file).name.startswith("test_"), test
        assert file.startswith("tests/"), test
        assert (ROOT / file).is_file(), test
        tests = of_the_gate(file)
        assert name.partition("[")[0] in tests if name else tests, test


def test_a_text_that_is_not_there_once_is_refused():
    fault = Fault("two", "file.py", "1", "2", ())
    assert fault.planted("x = 1") == "x = 2"
    for source in ("x = 0", "x = 1 + 1"):
        with pytest.raises(ValueError, match=r"two: expected once in file\.py"):
            fault.planted(source)
