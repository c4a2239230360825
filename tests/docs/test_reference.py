"""Every public name is on one page of the reference."""

from __future__ import annotations

import importlib
import inspect

import tfgpipe
from tests.helpers.reference_pages import documented
from tfgpipe_trainer import hyperparams

MODULES = (
    "accelerators",
    "schedules",
    "layers",
    "tensor_parallel",
    "quantization",
    "cluster",
    "planner",
)


def test_every_public_name_is_on_a_page():
    things = list(documented().values())
    public = {f"tfgpipe.{name}": getattr(tfgpipe, name) for name in tfgpipe.__all__}
    for module in MODULES:
        package = importlib.import_module(f"tfgpipe.{module}")
        public |= {
            f"{module}.{name}": getattr(package, name) for name in package.__all__
        }
    public |= {
        name: thing
        for name, thing in vars(hyperparams).items()
        if getattr(thing, "__module__", None) == hyperparams.__name__
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and name[0] != "_"
    }
    missing = [
        name
        for name, thing in public.items()
        # Not packages, nor names of types.
        if inspect.isclass(thing) or inspect.isroutine(thing) or name.isupper()
        if not any(thing is other for other in things)
    ]
    assert not missing


def test_a_name_is_described_once():
    things = [thing for thing in documented().values() if inspect.isclass(thing)]
    assert len(set(things)) == len(things)
