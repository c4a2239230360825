"""The order of the rooms: imports go down, never up, never in a circle.

`FLOORS` decides. A new module gets a line there; a module that has to import upwards
has found out that it is two ideas.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.forks import interpret

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    # Decisions as functions of plain values: no TensorFlow, numpy at most. This floor
    # has steps.
    "_backend": 0,
    "schedule": 0,
    "partition": 0,
    "network": 0,
    "statistic": 0,
    "cut": 0,
    "tables": 0,
    "hyperparams": 0,
    "ownership": 0,
    "topology": 0,
    "quiet": 0,
    "crash": 0,
    "holdings": 0.1,
    "schedules": 0.1,
    "timeline": 0.1,
    "pieces": 0.1,
    "simulation": 0.2,
    "perfetto": 0.2,
    # One idea of TensorFlow, Keras or Matplotlib each.
    "figures": 1,
    "calls": 1,
    "progress": 1,
    "mesh": 1,
    "processes": 1.1,
    "seams": 1.2,
    "microbatch": 1,
    "replicas": 1,
    "products": 1,
    "bodies": 1,
    "reduction": 1,
    "following": 1,
    "shards": 2,
    "twins": 2.5,
    "trace": 2.5,
    "flops": 2,
    "footprint": 2,
    "strategy": 2.5,
    "multi_worker": 2.6,
    "tpu": 2.6,
    "moments": 2,
    "recording": 2,
    "examples": 2,
    "trials": 2,
    "policies": 2,
    "transfer": 3,
    "updates": 3,
    "normalization": 3,
    "excerpt": 3,
    "ensemble": 3,
    "sums": 3,
    "replay": 3,
    "placement": 3,
    "program": 4,
    "finishing": 4,
    "programs": 4.5,
    "checks": 4,
    "losses": 4,
    "clock": 5,
    "arrangement": 5,
    "rows": 5,
    "stage": 5,
    "original": 5,
    "snapshot": 6,
    "costs": 6,
    "carried": 7,
    "profiles": 7,
    "step": 8,
    "planning": 8,
    "engine": 9,
    "assembly": 10,
    "loss_pipeline": 11,
    # What users touch.
    "pipelined_layer": 11,
    "summary": 11.5,
    "pipelined_model": 12,
    "cutting": 12,
    "layers": 13,
    "reports": 13,
    "callbacks": 13,
    "__init__": 14,
}
# Packages beside the floors: they may import any floor and any floor may import them,
# as long as nothing goes round.
BESIDE = frozenset({"cluster", "planner", "quantization", "tensor_parallel"})
PURE = sorted(room for room, floor in FLOORS.items() if floor < 1)


def test_every_room_has_a_floor() -> None:
    found = {room for room in modules("tfgpipe") if _package(room) not in BESIDE}
    assert found == set(FLOORS)


def test_imports_go_down() -> None:
    upwards = [
        f"{room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})"
        for room, others in _graph().items()
        for other in others
        if room in FLOORS and other in FLOORS and FLOORS[other] >= FLOORS[room]
    ]
    assert not upwards


def test_imports_make_no_circle() -> None:
    graphlib.TopologicalSorter(_graph()).prepare()


def test_the_library_imports_neither_experiments_nor_trainer() -> None:
    assert not _imported_tops("tfgpipe") & {"params", "trainer", "tests", "benchmarks"}


def test_experiments_do_not_import_the_trainer() -> None:
    assert not _imported_tops("params") & {"trainer", "tests", "benchmarks"}


def test_the_trainer_imports_neither_tests_nor_benchmarks() -> None:
    assert not _imported_tops("trainer") & {"tests", "benchmarks"}


def test_the_pure_floor_names_only_numpy_and_the_standard_library() -> None:
    allowed = sys.stdlib_module_names | {"tfgpipe", "numpy"}
    others = {
        room: [name for name in imports(path) if name.partition(".")[0] not in allowed]
        for room, path in modules("tfgpipe").items()
        if room in PURE
    }
    assert not {room: names for room, names in others.items() if names}


def test_the_pure_floor_loads_no_tensorflow() -> None:
    code = (
        "import importlib, sys\n"
        f"for room in {PURE}:\n"
        "    importlib.import_module(f'tfgpipe.{room}')\n"
        "    loaded = {'tensorflow', 'keras'} & sys.modules.keys()\n"
        "    assert not loaded, (room, loaded)\n"
    )
    run = interpret(code)
    assert run.returncode == 0, run.stderr


def test_nobody_imports_what_would_switch_keras() -> None:
    """`tests/nightly/test_package.py` loads every module, and sees that it does not."""
    for top in ("tfgpipe", "params", "trainer"):
        assert not _imported_tops(top) & {"tensorflow_model_optimization", "tf_keras"}


@functools.cache
def modules(top: str) -> dict[str, Path]:
    """Returns the modules of a top-level package, `a.b` for `top/a/b.py`."""
    folder = ROOT / top
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path
        for path in sorted(folder.rglob("*.py"))
    }


def _package(room: str) -> str:
    return room.partition(".")[0]


def _graph() -> dict[str, set[str]]:
    """Returns, for each room of tfgpipe, the rooms that it imports."""
    rooms = modules("tfgpipe")
    return {room: set(_rooms_imported(path, rooms)) for room, path in rooms.items()}


def _rooms_imported(path: Path, rooms: dict[str, Path]) -> Iterator[str]:
    for name in imports(path):
        top, _, inner = name.partition(".")
        if top != "tfgpipe":
            continue
        # `from tfgpipe import stage` names a room, `from tfgpipe.mesh import Mesh` a
        # thing in one, `import tfgpipe` the package itself.
        while inner and not {inner, f"{inner}.__init__"} & set(rooms):
            inner = inner.rpartition(".")[0]
        yield inner if inner in rooms else f"{inner}.__init__".lstrip(".")


def _imported_tops(package: str) -> set[str]:
    paths = modules(package).values()
    return {name.partition(".")[0] for path in paths for name in imports(path)}


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Returns all imported names, dotted: those of `from a import b` as `a.b`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: relative import"
            if node.module != "__future__":
                found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)
