"""The rules of the architecture, read off the syntax trees.

A package has a door, its `__init__`, through which alone others import; packages stand
on layers and import strictly downwards. CONTRIBUTING.md lists them.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.subprocesses import ROOT, interpret
from tests.helpers.syntax_trees import imports, modules, package

pytestmark = pytest.mark.pure

# A package imports from those on lower layers only.
LAYERS = {
    "_util": 0,
    "_compat": 1,
    "schedules": 1,
    "simulation": 2,
    "remat": 2,
    "cluster": 2,
    "devices": 2,
    "distribution": 3,
    "graph": 3,
    "capture": 4,
    "tensor_parallel": 5,
    "stage": 5,
    "runtime": 6,
    "spmd": 6,
    "costs": 7,
    "partition": 8,
    "pipelined_layer": 9,
    "report": 10,
    "pipelined_model": 11,
    "inspection": 12,
    "quantization": 12,
    "layers": 12,
    "planner": 13,
    "accelerators": 14,
    "__init__": 15,
}
# Names that a package may export.
MOST_EXPORTS = 16
# Users open these doors: what they return is exported though nobody here imports it.
FOR_USERS = {
    "costs",
    "cluster",
    "accelerators",
    "inspection",
    "planner",
    "quantization",
    "remat",
    "schedules",
    "simulation",
    "tensor_parallel",
}
# Entries of `tfgpipe/`, and of any folder inside.
MOST_ENTRIES = 26
# Folders whose modules enter packages by their doors.
ENTERING = (
    *("tfgpipe", "params", "trainer", "benchmarks", "docs"),
    "tests/accelerator_check",
)
# Lines of a function, and arguments; the exceptions, of which there are no more.
MOST_LINES, MOST_ARGUMENTS = 60, 8
LONG = {
    "plan_model.plan",
    "ranking.search",
    "solver.best_partition",
    "transformers.transformer",
    "tuning.tune",
}
# Public faces: layers of Keras' own arguments and more, a search, sizes of a model.
WIDE = {
    *("attention.__init__", "attention.call", "dense.__init__", "ranking.search"),
    *("experts.__init__", "sequence.__init__", "sequence.call"),
    "transformers.transformer",
}
# Modules that load no TensorFlow, and import nothing but NumPy.
PURE = (
    "_compat.backend",
    "_compat.native_logging",
    "_util.choices",
    "_util.command_line",
    "_util.spans",
    "_util.crash_report",
    "_util.docstrings",
    "_util.lazy",
    "_util.text",
    "capture.ir",
    "costs.layer_cost",
    "costs.memory",
    "costs.tables",
    "costs.work",
    "devices.tpu_topology",
    "accelerators.compilers",
    "accelerators.platforms",
    "distribution.zero",
    "graph.device_subgraphs",
    "graph.partitioner",
    "graph.recomputation",
    "partition.additive",
    "partition.balances",
    "partition.config",
    "partition.given",
    "partition.solver",
    "partition.step_config",
    "planner.devices",
    "planner.memory",
    "planner.parallel_config",
    "planner.step_time",
    "planner.transformers",
    "planner.workload",
    "remat",
    "remat.auto",
    "remat.forward_graph",
    "remat.min_cut",
    "remat.named",
    "remat.names",
    "remat.policy",
    "report.memory",
    "schedules",
    "schedules.data_flow",
    "schedules.policy",
    "schedules.registry",
    "schedules.schedule",
    "simulation",
    "simulation.auto_schedule",
    "simulation.chrome_trace",
    "simulation.building_blocks",
    "simulation.search",
    "simulation.shop",
    "simulation.simulator",
    "simulation.timeline",
)


def test_every_package_says_its_layer() -> None:
    assert {package(name) for name in modules("tfgpipe")} == set(LAYERS)


def test_imports_go_to_lower_layers() -> None:
    upwards = [
        f"{name} (layer {LAYERS[package(name)]}) imports {other} "
        f"(layer {LAYERS[package(other)]})"
        for name, others in _graph().items()
        for other in others
        if package(other) != package(name)
        and LAYERS[package(other)] >= LAYERS[package(name)]
    ]
    assert not upwards


def test_imports_make_no_circle() -> None:
    graphlib.TopologicalSorter(_graph()).prepare()


def test_imports_of_the_trainer_make_no_circle() -> None:
    """Those in functions, and for types alone, count as well."""
    names = {
        f"{top}.{name}".removesuffix(".__init__"): path
        for top in ("tfgpipe_trainer", "tfgpipe_params")
        for name, path in modules(top).items()
    }
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        # `from a.data import batches` names a module, `from a.data.batches import X` a
        # thing in one.
        found = [x if x in names else x.rpartition(".")[0] for x in imports(path)]
        graph[name] = {x for x in found if x in names}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("top", ENTERING)
def test_a_package_is_entered_by_its_door(top: str) -> None:
    """Neither `from tfgpipe.x.y import z` nor, if `y` is not exported, `x import y`."""
    inner = {f"tfgpipe.{name}" for name in modules("tfgpipe") if "." in name}
    exported = {
        f"tfgpipe.{name.removesuffix('.__init__')}.{export}"
        for name, path in modules("tfgpipe").items()
        if name.endswith(".__init__")
        for export in _exports(path)
    }
    passed = [
        f"{top}.{name} imports {module}"
        for name, path in modules(top).items()
        for module in {*_modules_imported_from(path), *(set(imports(path)) - exported)}
        if module in inner
        and not (top == "tfgpipe" and package(name) == module.split(".")[1])
    ]
    assert not passed


def test_packages_export_few_names() -> None:
    wide = {
        name: len(_exports(path))
        for name, path in modules("tfgpipe").items()
        if name.endswith(".__init__") and len(_exports(path)) > MOST_EXPORTS
    }
    assert not wide


def test_doors_export_what_somebody_imports() -> None:
    used = {
        name
        for top in ENTERING
        for path in modules(top).values()
        for name in imports(path)
    }
    text = " ".join(
        path.read_text("utf-8")
        for top in ("tfgpipe", "tests", "docs", "benchmarks", "params", "trainer")
        for path in modules(top).values()
    )
    idle = [
        f"{name}.{export}"
        for name, path in modules("tfgpipe").items()
        if name.endswith(".__init__") and package(name) not in FOR_USERS
        for door in [name.removesuffix(".__init__")]
        for export in _exports(path)
        if f"tfgpipe.{door}.{export}" not in used
        and f"{door.rpartition('.')[2]}.{export}" not in text
    ]
    assert not idle


def test_every_public_name_of_compat_has_a_contract_test() -> None:
    """The tests of `_compat` name it as `module.name`."""
    named = {
        ast.unparse(node)
        for path in (ROOT / "tests/_compat").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
    }
    untested = [
        f"{module}.{node.name}"
        for name, path in modules("tfgpipe").items()
        for module in [name.removeprefix("_compat.")]
        if package(name) == "_compat"
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        if not node.name.startswith("_") and f"{module}.{node.name}" not in named
    ]
    assert not untested


def test_folders_can_be_taken_in_at_a_glance() -> None:
    folders = [ROOT / "tfgpipe", *(p for p in (ROOT / "tfgpipe").iterdir())]
    full = {
        str(folder.relative_to(ROOT)): len(entries)
        for folder in folders
        if folder.is_dir()
        and len(entries := [p for p in folder.iterdir() if p.name != "__pycache__"])
        > MOST_ENTRIES
    }
    assert not full


def test_the_library_imports_neither_experiments_nor_trainer() -> None:
    assert not _imported_tops("tfgpipe") & {
        *("tfgpipe_params", "tfgpipe_trainer", "tests", "benchmarks")
    }


def test_experiments_import_the_trainer_and_not_the_other_way_round() -> None:
    assert not _imported_tops("params") & {"tests", "benchmarks"}
    assert not _imported_tops("trainer") & {"tests", "benchmarks", "tfgpipe_params"}


@pytest.mark.parametrize("top", ["tests", "benchmarks", "docs"])
def test_nobody_imports_a_test_module(top: str) -> None:
    """What tests share is in `tests/helpers`. Nor does a text name one to import."""
    found = [
        f"{top}.{name} imports {other}"
        for name, path in modules(top).items()
        for other in (
            *imports(path),
            *re.findall(r"\btests\.(?:\w+\.)*test_\w+", path.read_text("utf-8")),
        )
        if any(part.startswith("test_") for part in other.split("."))
    ]
    assert not found


def test_benchmarks_import_no_tests_and_only_studies_import_studies() -> None:
    assert "tests" not in _imported_tops("benchmarks")
    studies = [
        f"benchmarks.{name} imports {found}"
        for name, path in modules("benchmarks").items()
        if package(name) != "studies"
        for found in imports(path)
        if found.startswith("benchmarks.studies")
    ]
    assert not studies


def test_pure_modules_name_only_numpy_and_the_standard_library() -> None:
    allowed = sys.stdlib_module_names | {"tfgpipe", "numpy"}
    paths = modules("tfgpipe")
    others = {
        name: [x for x in imports(path) if x.partition(".")[0] not in allowed]
        for name in PURE
        for path in [paths.get(name) or paths[f"{name}.__init__"]]
    }
    assert not {name: found for name, found in others.items() if found}


def test_pure_modules_load_no_tensorflow() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {PURE}:\n"
        "    importlib.import_module(f'tfgpipe.{name}')\n"
        "    loaded = {'tensorflow', 'keras'} & sys.modules.keys()\n"
        "    assert not loaded, (name, loaded)\n"
    )
    run = interpret(code)
    assert run.returncode == 0, run.stderr


def test_nobody_imports_what_would_switch_keras() -> None:
    """`tests/test_package.py` loads every module, and sees that it does not."""
    for top in ("tfgpipe", "params", "trainer"):
        assert not _imported_tops(top) & {"tensorflow_model_optimization", "tf_keras"}


def _graph() -> dict[str, set[str]]:
    """Returns, for each module of tfgpipe, the modules that it imports.

    What passes through a door is taken for an import of the module behind it. That a
    door loads all modules of its package makes no circle, as layers have none.
    """
    names = modules("tfgpipe")
    return {
        name: set()
        if name.endswith("__init__")
        else set(_modules_imported(path, names))
        for name, path in names.items()
    }


def _modules_imported(path: Path, names: dict[str, Path]) -> Iterator[str]:
    for name in imports(path):
        top, _, inner = name.partition(".")
        if top != "tfgpipe":
            continue
        home, _, last = inner.rpartition(".")
        if f"{home}.__init__" in names and inner not in names:
            inner = _exports(names[f"{home}.__init__"]).get(last, inner)
            inner = inner.removeprefix("tfgpipe.")
        # `from tfgpipe import stage` names a module, `from tfgpipe.stage import Stage`
        # a thing in one, `import tfgpipe` the package itself.
        while inner and not {inner, f"{inner}.__init__"} & set(names):
            inner = inner.rpartition(".")[0]
        yield inner if inner in names else f"{inner}.__init__".lstrip(".")


def _modules_imported_from(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def _exports(path: Path) -> dict[str, str]:
    """Returns by name what a door exports, with the module that it is in."""
    package = ".".join(("tfgpipe", *path.relative_to(ROOT / "tfgpipe").parts[:-1]))
    tree = ast.parse(path.read_text("utf-8"))
    # Modules that are imported by nobody there are only listed.
    exports = dict.fromkeys(_listed(tree), package)
    for_types = [node for node in tree.body if isinstance(node, ast.If)]
    for node in [*tree.body, *(x for branch in for_types for x in branch.body)]:
        if isinstance(node, ast.ImportFrom):
            module = str(node.module)
            is_own = package != "tfgpipe" or node not in tree.body
            if is_own and f"{module}.".startswith(f"{package}."):
                exports |= dict.fromkeys((a.name for a in node.names), module)
    return exports


def _listed(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, path in modules("tfgpipe").items()
        if name.endswith("__init__") and "lazy_exports(" in path.read_text("utf-8")
    ],
)
def test_names_loaded_lazily_are_those_that_type_checkers_see(name: str) -> None:
    path = modules("tfgpipe")[name]
    home = f"tfgpipe.{name.removesuffix('__init__')}".rstrip(".")
    for_types = {
        alias.name: node.module.removeprefix(home).lstrip(".")
        for branch in ast.parse(path.read_text("utf-8")).body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    loaded = {
        export: "" if call.arg == "submodules" else str(call.arg)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_exports"
        for call in node.keywords
        if call.arg != "replaced"
        for export in ast.literal_eval(call.value).split()
    }
    assert loaded == for_types
    assert loaded


def _imported_tops(top: str) -> set[str]:
    paths = modules(top).values()
    return {name.partition(".")[0] for path in paths for name in imports(path)}


def test_functions_are_short_and_take_few_arguments() -> None:
    long, wide = set(), set()
    for path in sorted((ROOT / "tfgpipe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            name = f"{path.stem}.{node.name}"
            if node.end_lineno - node.lineno >= MOST_LINES:
                long.add(name)
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if len([a for a in arguments if a.arg != "self"]) > MOST_ARGUMENTS:
                wide.add(name)
    assert long <= LONG
    assert wide <= WIDE
