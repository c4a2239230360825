"""The lint of docstrings refuses clauses and pointers, and nothing else."""

from __future__ import annotations

import pytest

from docs import lint

pytestmark = pytest.mark.pure

IN_ARGS = '''
def send(value, dtype):
    """Sends a value.

    Args:
        value: A tensor [B, d],
            which is on the device.
        dtype: {}

    Raises:
        ValueError: What is not refused: errors are told by clauses.
    """
'''
IN_ATTRIBUTES = '''
class Boundary:
    """A boundary between stages.

    Attributes:
        dtype (str): {}
    """
'''
IN_CALL_ARGUMENTS = '''
class Layer:
    """A layer.

    Call arguments:
        inputs: A tensor.
        dtype, shape:
            {}
    """
'''
BELOW_A_FIELD = '''
class Boundary:
    dtype: str
    """{}"""
'''
IN_HELP = """
class Boundary:
    dtype: str = field(default="none", help="{}")
"""
FIRST_LINE = '''
class Boundary:
    @property
    def dtype(self):
        """{}"""
'''
PLACES = (
    IN_ARGS,
    IN_ATTRIBUTES,
    IN_CALL_ARGUMENTS,
    BELOW_A_FIELD,
    IN_HELP,
    FIRST_LINE,
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "text",
    [
        "What values are compressed to.",
        "Which dtype values have.",
        "How values are sent.",
        "Where values go.",
        "When values are sent.",
        "Whether values are compressed.",
        "whether values are compressed",
        "Why values are compressed.",
        "In which dtype values are.",
        "Whatever crosses.",
    ],
)
def test_a_clause_is_refused(place: str, text: str) -> None:
    [(line, problem)] = lint.problems(place.format(text))
    assert line > 0
    assert text in problem


@pytest.mark.parametrize("place", PLACES[:5])
@pytest.mark.parametrize(
    "text",
    [
        "Likewise.",
        "A mask, likewise, or None.",
        "As for `PipelinedLayer`.",
        "As of `PipelinedLayer`.",
        "Half of it.",
        "Of the base layer.",
        "That of the inputs.",
        "Those of the shards.",
    ],
)
def test_a_pointer_is_refused(place: str, text: str) -> None:
    [(_, problem)] = lint.problems(place.format(text))
    assert text in problem


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "text",
    [
        "Dtype of activations on the wire.",
        "True to compress what crosses, whatever that is.",
        "The dtype in which values cross, as in `Boundary`, or None.",
        "Whichness, Howl and Whale are no questions.",
        "If True, values are compressed.",
    ],
)
def test_a_noun_phrase_passes(place: str, text: str) -> None:
    assert list(lint.problems(place.format(text))) == []


@pytest.mark.parametrize(
    "text",
    [
        "Returns what was sent.",
        "Returns how many values there are.",
        "Returns which device it is.",
        "Returns why it failed.",
        "Yields what is sent.",
    ],
)
def test_a_function_that_returns_a_clause_is_refused(text: str) -> None:
    assert [*lint.problems(FIRST_LINE.format(text))]


@pytest.mark.parametrize(
    "text", ["Returns whether values are sent.", "Returns the values sent."]
)
def test_a_function_that_returns_a_noun_passes(text: str) -> None:
    assert list(lint.problems(FIRST_LINE.format(text))) == []


def test_a_line_that_goes_on_is_no_entry() -> None:
    docstring = (
        "Sends.\n\nArgs:\n    value: A tensor\n        of: What.\n    other: B.\n"
    )
    assert list(lint.entries(docstring)) == [
        ("value", "A tensor of: What."),
        ("other", "B."),
    ]


def test_modules_of_all_folders_are_checked() -> None:
    assert {path.relative_to(lint.ROOT).parts[0] for path in lint.files()} == {
        *lint.FOLDERS
    }


def test_the_checked_modules_pass() -> None:
    assert lint.main() == 0


def test_problems_fail_the_lint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    (tmp_path / "tfgpipe").mkdir()
    (tmp_path / "tfgpipe" / "sending.py").write_text(
        IN_ARGS.format("Likewise."), encoding="utf-8"
    )
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    assert lint.main() == 1
    assert "tfgpipe/sending.py:2: dtype: Likewise." in capsys.readouterr().err
