"""Nothing compares the names of choices that are values: it asks the value."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.pure.test_architecture import modules
from tfgpipe import remat
from tfgpipe.schedules import kinds

# Names, and the modules that may compare them: where values are found by their names.
NAMES = {*remat.NAMES, *(kind.name for kind in kinds.KINDS)}
# Of other choices, which have a value of the same name.
OTHERS = {
    ("distribution.pipeline_strategy", "shard_replicas", "none"),
    ("quantization.config", "key", "layer"),
    ("runtime.loss_probes", "reduction", "none"),
}


def test_no_name_of_a_policy_or_kind_is_compared() -> None:
    found = [
        (name, subject, compared)
        for name, path in modules("tfgpipe").items()
        for subject, compared in _comparisons(ast.parse(path.read_text("utf-8")))
    ]
    assert sorted({*found} - OTHERS) == []


def _comparisons(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields what is compared with such a name, and the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for value in (node.left, *node.comparators):
                for part in ast.walk(value):
                    if isinstance(part, ast.Constant) and part.value in NAMES:
                        subject = ast.unparse(node.left).rpartition(".")[2]
                        yield subject, str(part.value)
