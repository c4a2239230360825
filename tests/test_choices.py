"""Nothing compares the names of choices that are values: it asks the value."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.helpers.syntax_trees import modules
from tfgpipe import remat, schedules
from tfgpipe.partition import balances
from tfgpipe.schedules import kinds

pytestmark = pytest.mark.pure

# Names, and the modules that may compare them: where values are found by their names.
NAMES = {
    *balances.NAMES,
    *remat.NAMES,
    *(kind.name for kind in kinds.KINDS),
    *schedules.NAMES,
    "int8",
    "int8_channel",
    "deferred",
}
# Of other choices, which have a value of the same name.
OTHERS = {
    # Its own file.
    ("stage.normalization", "batch_norm", "deferred"),
    ("distribution.pipeline_strategy", "shard_replicas", "none"),
    ("distribution.replicated_strategy", "shard_replicas", "none"),
    ("quantization.config", "key", "layer"),
    ("runtime.loss_probes", "reduction", "none"),
    ("spmd.layer", "partitioned", "auto"),
    ("stage.options", "jit_compile", "auto"),
    # Of the trainer, formats of images and kinds of devices.
    ("__init__", "__name__", "params"),  # Of the folder.
    ("image.amoebanet", "what", "none"),
    ("image.images", "format", "auto"),
    *(
        (name, "device", "auto")
        for name in ("devices", "commands.machine_checks", "flags")
    ),
    # Of the trainer, which has "none" for None.
    ("config", "quantize", "none"),
    ("config", "transfer_dtype", "none"),
    ("image.images", "cache", "memory"),
}

# Keras' own attribute, the strategy that partitions computations, and an argument that
# may be left out.
NOT_OF_STAGES = {
    ("spmd.layer", "_spmd_strategy(self.num_stages) is not None"),
    ("spmd.layer", "strategy is not None"),
    ("inspection.verification", "strategy is None"),
    ("_compat.keras_internals.replicated_model", "self._distribute_strategy is None"),
}


def test_no_name_of_a_policy_or_kind_is_compared() -> None:
    found = [
        (name, subject, compared)
        for top in ("tfgpipe", "trainer", "params")
        for name, path in modules(top).items()
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


def test_nobody_outside_distribution_asks_whether_there_is_a_strategy() -> None:
    found = [
        (name, ast.unparse(node))
        for name, path in modules("tfgpipe").items()
        if not name.startswith("distribution.")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if _asks_for_a_strategy(node)
    ]
    assert sorted({*found} - NOT_OF_STAGES) == []


def _asks_for_a_strategy(node: ast.AST) -> bool:
    """Returns whether code is a test for no strategy, or for one."""
    if isinstance(node, ast.Compare):
        values = (node.left, *node.comparators)
        is_none = any(isinstance(x, ast.Constant) and x.value is None for x in values)
        return is_none and any(map(_is_strategy, values))
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return _is_strategy(node.test)
    if isinstance(node, ast.BoolOp):
        return any(map(_is_strategy, node.values))
    return isinstance(node, ast.UnaryOp) and _is_strategy(node.operand)


def _is_strategy(node: ast.AST) -> bool:
    """Returns whether an expression is a name, or a call, that ends in "strategy"."""
    if isinstance(node, ast.Call):
        node = node.func
    return ast.unparse(node).endswith("strategy")
