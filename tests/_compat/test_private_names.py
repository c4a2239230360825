"""Private names of Keras and TensorFlow are used in the modules made for it alone."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

from tests.helpers.syntax_trees import imports, modules, package


def test_compat_alone_uses_private_names_of_keras_and_tensorflow() -> None:
    private = {
        name: sorted(set(_private_names(path)))
        for name, path in modules("tfgpipe").items()
        if package(name) != "_compat"
    }
    # Python documents it for functions of one's own, which list their options so.
    private["partition.config"].remove("function.__signature__")
    assert not {name: names for name, names in private.items() if names}


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
        "layer.__class__ = Other",
        "Mine.__name__ = 'Theirs'",
        "node.attr['_output_shapes']",
        "node.attr.pop('_class')",
        "tf.function(f, experimental_attributes={'_noinline': True})",
    ],
)
def test_private_names_are_recognised(tmp_path: Path, source: str) -> None:
    path = tmp_path / "module.py"
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
    path = tmp_path / "module.py"
    path.write_text(source)
    assert not list(_private_names(path))


def _private_names(path: Path) -> Iterator[str]:
    """Yields the names in a module that reach inside Keras or TensorFlow."""
    yield from filter(_is_inside, imports(path))
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
        elif isinstance(node, ast.Constant) and (
            _is_inside(str(node.value)) or _is_private_text(node.value)
        ):
            yield ast.unparse(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr in _FALSIFIED:
                    yield ast.unparse(target)


# Of objects that are not ours, or to be other than they are.
_FALSIFIED = {"__class__", "__name__", "__qualname__", "__signature__"}


def _is_private_text(value: object) -> bool:
    """Returns whether a text is the name of something private, as of an attribute."""
    return isinstance(value, str) and bool(re.fullmatch("_[a-z][a-z_]*", value))


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


@functools.cache
def _names_inside_a_keras_layer() -> set[str]:
    return set(dir(keras.layers.Layer()))


def _dotted(node: ast.expr) -> str:
    """Returns `a.b.c` for a chain of names, `.c` where it starts elsewhere."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
