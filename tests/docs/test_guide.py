"""The guide: the notebook is what the source gives, the page what it gives."""

from __future__ import annotations

import base64

import nbformat
import pytest

from docs import render

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(render.NOTEBOOK, as_version=4)


def cells(notebook):
    return [(cell.cell_type, cell.id, cell.source) for cell in notebook.cells]


def test_the_notebook_has_the_cells_of_the_source(notebook):
    assert cells(notebook) == cells(render.read())


def test_the_notebook_is_valid_and_has_run_from_first_to_last(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]


def test_a_page_shows_what_a_cell_printed_and_drew():
    image = base64.b64encode(b"pixels").decode()
    outputs = [
        nbformat.v4.new_output("stream", name="stdout", text="3 stages\n"),
        nbformat.v4.new_output("display_data", data={"image/png": image}),
    ]
    cells = [
        nbformat.v4.new_markdown_cell("Text."),
        nbformat.v4.new_code_cell("plot()", id="the-plot", outputs=outputs),
    ]
    text, pictures = render.page(nbformat.v4.new_notebook(cells=cells))
    assert text == (
        "Text.\n\n```python\nplot()\n```\n\n```text\n3 stages\n```\n\n"
        "![The plot](guide/the-plot.png)\n"
    )
    assert pictures == {"the-plot.png": b"pixels"}


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n# %% name\n",
        "# %%\nx = 1\n",
        "# %% Not a name\nx = 1\n",
        "# %% twice\nx = 1\n# %% twice\nx = 2\n",
    ],
)
def test_a_source_is_cells_with_names_of_their_own(tmp_path, source):
    path = tmp_path / "guide.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=r"guide\.py is cells alone.*Received"):
        render.read(path)


@pytest.mark.nightly
def test_the_guide_runs_in_a_new_kernel(tmp_path, monkeypatch):
    """Every assertion in it holds; what it takes is not asserted."""
    monkeypatch.setenv("PYTHONPATH", str(render.FOLDER.parents[1]))
    render.execute(render.read(), folder=tmp_path)
