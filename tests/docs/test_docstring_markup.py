"""Docstrings in the Keras form become what Griffe reads."""

from __future__ import annotations

import griffe
import pytest

from docs import docstrings

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("docstring", "wanted"),
    [
        ("Adds.\n\nTo all.", "Adds.\n\nTo all."),
        ("Adds.\n\nArgs:\n    x: One.", "Adds.\n\nArgs:\n    x: One."),
        ("Adds.\n\n>>> 1\n1\n\nTo.", "Adds.\n\n```pycon\n>>> 1\n1\n```\n\nTo."),
        ("Example:\n\n>>> 1\n1", "**Example:**\n\n```pycon\n>>> 1\n1\n```"),
        ("Example:\n    Text.", "Example:\n    Text."),
        (
            "Call arguments:\n    x: One,\n        or none.\n    y: Two.\n\nText.",
            "**Call arguments:**\n\n- `x`: One,\n    or none.\n- `y`: Two.\n\nText.",
        ),
        ("Input shape:\n    `(batch, n)`", "**Input shape:**\n\n`(batch, n)`"),
        ("```python\n>>> 1\n```", "```python\n>>> 1\n```"),
        ("See `docs/how-to/tpu.md`.", "See [how-to/tpu](../../how-to/tpu.md)."),
    ],
)
def test_a_docstring_in_googles_form(docstring, wanted):
    assert docstrings.google_form(docstring) == wanted


def test_the_extension_rewrites_docstrings_and_hides_private_parameters(tmp_path):
    code = 'def f(x, _y=1):\n    """Adds.\n\n    >>> 1\n    1\n    """\n'
    (tmp_path / "adding.py").write_text(code)
    module = griffe.load(
        "adding",
        search_paths=[tmp_path],
        extensions=griffe.load_extensions(docstrings.KerasDocstrings),
    )
    assert [parameter.name for parameter in module["f"].parameters] == ["x"]
    assert module["f"].docstring.value == "Adds.\n\n```pycon\n>>> 1\n1\n```"
