"""The order of the rooms: imports go down, never up, never in a circle.

`FLOORS` decides. A new module gets a line there; a module that has to import upwards
has found out that it is two ideas.
"""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
# The rooms that may use private names: `seams` of Keras, `calls` of TensorFlow.
SEAMS = ("seams", "calls")


def test_every_room_has_a_floor() -> None:
    rooms = {room for room in _rooms("tfgpipe") if _package(room) not in BESIDE}
    assert rooms == set(FLOORS)


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


@pytest.mark.parametrize("room", PURE)
def test_the_pure_floor_names_only_numpy_and_the_standard_library(room: str) -> None:
    tops = {name.partition(".")[0] for name in _imports(_rooms("tfgpipe")[room])}
    assert tops <= sys.stdlib_module_names | {"tfgpipe", "numpy"}


@pytest.mark.parametrize("room", PURE)
def test_the_pure_floor_loads_no_tensorflow(room: str) -> None:
    code = (
        f"import sys, tfgpipe.{room}\n"
        "print(sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_only_the_seams_use_private_names_of_keras_and_tensorflow() -> None:
    private = {
        room: sorted(set(_private_names(path)))
        for room, path in _rooms("tfgpipe").items()
        if room not in SEAMS
    }
    assert not {room: names for room, names in private.items() if names}


@pytest.mark.parametrize(
    "source",
    [
        "import keras.src.backend",
        "from tensorflow.python import pywrap_tensorflow",
        "from keras import src",
        "importlib.import_module('keras.src.backend')",
        "x = tf.python.ops",
        "x = keras.src.backend",
        "x = variable._value",
        "x = layer.build()._value",
        "x = getattr(variable, '_value')",
        "x = self._layers",
    ],
)
def test_private_names_are_recognised(tmp_path: Path, source: str) -> None:
    path = tmp_path / "room.py"
    path.write_text(source)
    assert list(_private_names(path))


@pytest.mark.parametrize(
    "source",
    [
        "x = self._mesh",
        "x = cls.__name__",
        "x = super().__init__",
        "os._exit(75)",
        "getattr(variable, name)",
        "'keras.src has no public path to it.'",
        "# keras.src",
    ],
)
def test_public_and_own_names_are_left_alone(tmp_path: Path, source: str) -> None:
    path = tmp_path / "room.py"
    path.write_text(source)
    assert not list(_private_names(path))


def _rooms(top: str) -> dict[str, Path]:
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
    rooms = _rooms("tfgpipe")
    return {room: set(_rooms_imported(path, rooms)) for room, path in rooms.items()}


def _rooms_imported(path: Path, rooms: dict[str, Path]) -> Iterator[str]:
    for name in _imports(path):
        top, _, inner = name.partition(".")
        if top != "tfgpipe":
            continue
        # `from tfgpipe import stage` names a room, `from tfgpipe.mesh import Mesh` a
        # thing in one, `import tfgpipe` the package itself.
        while inner and not {inner, f"{inner}.__init__"} & set(rooms):
            inner = inner.rpartition(".")[0]
        yield inner if inner in rooms else f"{inner}.__init__".lstrip(".")


def _imported_tops(package: str) -> set[str]:
    paths = _rooms(package).values()
    return {name.partition(".")[0] for path in paths for name in _imports(path)}


def _imports(path: Path) -> Iterator[str]:
    """Yields every imported name, dotted: also those of `from a import b`, as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: relative import"
            if node.module == "__future__":
                continue
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _private_names(path: Path) -> Iterator[str]:
    """Yields the names in a module that reach inside Keras or TensorFlow."""
    yield from filter(_is_inside, _imports(path))
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            name = _dotted(node)
            if _is_inside(name) or _is_private(name):
                yield name
        elif isinstance(node, ast.Call) and _dotted(node.func) in {
            "delattr",
            "getattr",
            "hasattr",
            "setattr",
        }:
            attribute = ast.unparse(node.args[1])
            if re.match("'_[^_]", attribute):
                yield attribute
        elif isinstance(node, ast.Constant) and _is_inside(str(node.value)):
            yield ast.unparse(node)


def _is_inside(name: str) -> bool:
    return bool(re.fullmatch(r"(keras\.src|(tensorflow|tf)\.python)(\.\w+)*", name))


def _is_private(name: str) -> bool:
    if name == "os._exit":  # Which Python documents.
        return False
    owner, _, attribute = name.rpartition(".")
    if not attribute.startswith("_") or attribute.startswith("__"):
        return False
    # A private attribute of `self` is ours, unless it is one that Keras set there.
    return owner not in {"self", "cls"} or attribute in _names_inside_a_keras_layer()


def _names_inside_a_keras_layer() -> set[str]:
    import keras

    return set(dir(keras.layers.Layer()))


def _dotted(node: ast.expr) -> str:
    """Returns `a.b.c` for a chain of names, `.c` where it starts elsewhere."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
