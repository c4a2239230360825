"""The parts of the check, what each has found, and the report of it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Literal

from benchmarks import tables

Status = Literal["passed", "failed", "not run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the check.

    Attributes:
        name: As `--parts` names it, and the function that does it.
        title: What the report calls it.
        minutes: How long it may take at most.
        on_cpu: Whether its process sees no GPU.
    """

    name: str
    title: str
    minutes: float
    on_cpu: bool = False


PARTS = (
    Part(name="machine", title="The machine", minutes=1),
    Part(name="identity", title="Steps equal the plain model's", minutes=6),
    Part(name="prediction", title="What is predicted", minutes=5, on_cpu=True),
    Part(name="placement", title="What ran where", minutes=2),
    Part(name="memory", title="Memory and time of a step", minutes=4),
    Part(name="overlap", title="Timeline and overlap", minutes=3),
    Part(name="replicas", title="Data-parallel replicas", minutes=3),
    Part(name="xla", title="XLA", minutes=3),
    Part(name="training", title="A language model", minutes=6),
)


class NotRunError(Exception):
    """A part cannot run here; the message says why."""


@dataclasses.dataclass
class Outcome:
    """How a part ended, and what it found.

    Attributes:
        part: The part.
        status: How it ended.
        reasons: Why it failed, or was not run.
        seconds: How long it took.
        findings: Texts, and rows of tables by their titles, in order.
    """

    part: Part
    status: Status = "passed"
    reasons: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    findings: list[tuple[str, str | list[tables.Row]]] = dataclasses.field(
        default_factory=list
    )

    def add(self, entry: Mapping[str, Any]) -> None:
        """Adds an entry that the process of the part has written."""
        kind, value = entry["kind"], entry["value"]
        if kind == "row":
            title = entry["title"]
            if not self.findings or self.findings[-1][0] != title:
                self.findings.append((title, []))
            rows = self.findings[-1][1]
            assert isinstance(rows, list)
            rows.append(value)
        elif kind == "text":
            self.findings.append(("", value))
        elif kind == "left out":
            self.findings.append(("", f"Not run: {value}"))
        else:
            self.status = "failed" if "failed" in (kind, self.status) else kind
            self.reasons.append(value)


class Recorder:
    """Writes what a part finds, line by line, so that what ends it leaves the rest.

    Args:
        stream: What is written to, a JSON object a line.
        seconds: How long the part may take.
    """

    def __init__(self, stream: IO[str], *, seconds: float) -> None:
        self._stream = stream
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """How long the part still has."""
        return self._end - time.monotonic()

    def row(self, title: str, **cells: Any) -> None:
        """Adds a row to the table of a title; its first row says which columns."""
        self._write("row", cells, title=title)
        told = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in cells.items()}
        print("   ", ", ".join(f"{k} {v}" for k, v in told.items()), flush=True)

    def text(self, text: str) -> None:
        """Adds a sentence or a paragraph."""
        self._write("text", text)
        print("   ", text, flush=True)

    def left_out(self, text: str) -> None:
        """Says what of the part cannot be checked here, and why."""
        self._write("left out", text)
        print("    not run:", text, flush=True)

    def failed(self, reason: str) -> None:
        """Marks the part as failed, and lets it go on."""
        self._write("failed", reason)
        print("    FAILED:", reason, flush=True)

    def run(self, part: Callable[[Recorder], None]) -> None:
        """Runs a part and writes how it ended."""
        try:
            part(self)
        except NotRunError as error:
            self._write("not run", str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.failed(text if len(text) < 2000 else f"{text[:2000]} ...")
            raise
        finally:
            self._write("end", "")

    def _write(self, kind: str, value: Any, **more: str) -> None:
        line = json.dumps({"kind": kind, "value": value, **more}, default=str)
        self._stream.write(line + "\n")
        self._stream.flush()


def report(outcomes: Sequence[Outcome], *, about: str = "") -> str:
    """Returns the report as Markdown.

    Args:
        outcomes: What the parts found, in order.
        about: When it was made, and how.
    """
    counts = [
        f"{sum(each.status == status for each in outcomes)} {status}"
        for status in ("passed", "failed", "not run")
    ]
    summary = [
        {
            "part": each.part.title,
            "result": each.status,
            "seconds": f"{each.seconds:.0f}",
            "why": _in_a_cell(each.reasons),
        }
        for each in outcomes
    ]
    parts = ["# Accelerator check", f"{', '.join(counts)}. {about}".strip()]
    parts += [tables.draw_markdown(summary)] if summary else []
    for each in outcomes:
        parts += [f"## {each.part.title}: {each.status}"]
        parts += ["\n".join(f"- {x}" for x in each.reasons)] if each.reasons else []
        for title, found in each.findings:
            parts += [f"**{title}**"] if title else []
            parts += [found if isinstance(found, str) else tables.draw_markdown(found)]
    return "\n\n".join(parts) + "\n"


def _in_a_cell(reasons: Sequence[str]) -> str:
    if not reasons:
        return ""
    first = reasons[0].splitlines()[0].replace("|", "/")
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return (first if len(first) <= 160 else f"{first[:160]} ...") + more
