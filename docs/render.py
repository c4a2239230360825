"""Makes the notebook of the guide from its source: `make guide`.

    docs/tutorial/guide.py     the source: text and code, cell by cell
        |  executed from the first cell to the last, by a kernel of its own
        v
    docs/tutorial/guide.ipynb  cells with what they have printed and drawn
        |  when the site is built
        v
    tutorial/guide.md          a page of the site, its pictures in tutorial/guide/

A cell begins with `# %% name` if it is code and with `# %% [markdown]` if it is text,
as Jupytext, VS Code and Spyder have it. A picture is called like the cell that draws
it. What goes to standard error is left out.
"""

from __future__ import annotations

import base64
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent / "tutorial"
SOURCE = FOLDER / "guide.py"
NOTEBOOK = SOURCE.with_suffix(".ipynb")
# Of the page, relative to it.
PICTURES = "guide"
# Seconds that a cell may take on a machine that is busy with other things.
LIMIT = 600
_CELL = re.compile(r"^# %% *(\[markdown\]|[a-z0-9-]+)$", re.MULTILINE)


def read(source: Path = SOURCE) -> Any:
    """Returns the source as a notebook that has not run.

    Raises:
        ValueError: If a cell of code has no name, or the name of another.
    """
    preamble, *parts = _CELL.split(source.read_text("utf-8"))
    names = [name for name in parts[::2] if name != "[markdown]"]
    marks = re.findall(r"^# %%", source.read_text("utf-8"), re.MULTILINE)
    if preamble.strip() or len(marks) != len(parts) / 2 or len(set(names)) < len(names):
        raise ValueError(
            f"{source.name} is cells alone: `# %% [markdown]`, or `# %% name` with a "
            f"name of its own. Received {len(marks)} marks, and the names {names}."
        )
    cells = []
    for number, (name, body) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        if name == "[markdown]":
            text = re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)
            cells.append(nbformat.v4.new_markdown_cell(text, id=f"text-{number}"))
        else:
            cells.append(nbformat.v4.new_code_cell(_code(body), id=name))
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": python})


def _code(body: str) -> str:
    """Returns the code of a cell: IPython's magics are comments in the source."""
    return re.sub(r"^# (?=%[a-z])", "", body.strip(), flags=re.MULTILINE)


def execute(notebook: Any, folder: Path = FOLDER) -> dict[str, float]:
    """Runs a notebook in a new kernel, and returns the seconds that each cell took.

    Args:
        notebook: The cells, which get their outputs.
        folder: Where the kernel runs.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises.
    """
    seconds: dict[str, float] = {}
    starts: dict[str, float] = {}

    def begin(cell: Any, cell_index: int) -> None:
        starts[cell.id] = time.perf_counter()

    def end(cell: Any, cell_index: int, execute_reply: Any) -> None:
        seconds[cell.id] = time.perf_counter() - starts[cell.id]

    nbclient.NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=begin,
        on_cell_executed=end,
        # Times of execution would change with every run.
        record_timing=False,
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    # Which version of Python ran is not what the notebook is about.
    notebook.metadata.pop("language_info", None)
    return seconds


def _joined(outputs: list[Any]) -> list[Any]:
    """Returns outputs without standard error, what was printed in a row as one."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type != "stream":
            kept.append(output)
        elif output.name == "stdout" and kept and kept[-1].output_type == "stream":
            kept[-1].text += output.text
        elif output.name == "stdout":
            kept.append(output)
    return kept


def page(notebook: Any) -> tuple[str, dict[str, bytes]]:
    """Returns an executed notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{cell.id}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                words = cell.id.replace("-", " ").capitalize()
                parts.append(f"![{words}]({PICTURES}/{name})")
            else:
                text = output.get("text") or data.get("text/plain", "")
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def main() -> None:
    """Runs the guide, and writes the notebook."""
    notebook = read()
    seconds = execute(notebook)
    nbformat.validate(notebook)
    nbformat.write(notebook, NOTEBOOK)
    for name, taken in seconds.items():
        print(f"{taken:6.1f} s  {name}", file=sys.stderr)
    print(f"{sum(seconds.values()):6.1f} s  in all", file=sys.stderr)


if __name__ == "__main__":
    main()
