"""The reference, `docs/reference/api.md`, made of the docstrings of all public names.

    python -m docs.reference          writes it
    python -m docs.reference --check  exits with 1 if it is not what would be written

The links of `docs/explanation/how-it-works.md` to lines of the code are brought up to date as well.

A docstring is Google's form in Markdown already: sections become lists, examples become
blocks, all else stays as it is.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import operator
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import tfgpipe
from trainer import hyperparams

PATH = Path(__file__).with_name("api.md")
WALK = Path(__file__).with_name("how_it_works.md")

INTRODUCTION = """\
# Reference

Every public name, with its docstring. Made by `make docs`;
`tests/docs/test_reference.py` fails where this file and the docstrings differ, and
`tests/docs/test_docstrings.py` runs the examples. In these `keras`, `np` (NumPy), `tf`
and `tfgpipe` are imported, and `tfgpipe.make_logical_cpus(8)` has been called.

K is the number of stages, M of microbatches, P of devices; D is the data-parallel
degree, T the tensor-parallel degree.
"""

# What users meet first, first. All of `tfgpipe.__all__` is here or a module of its own;
# names with a dot are of what these return or take.
TOPICS: dict[str, tuple[str, ...]] = {
    "Pipelines": ("PipelinedLayer", "PipelinedModel", "pipeline"),
    "Partitions": (
        "plan",
        "partition.Plan",
        "recut",
        "stage_table",
        "report.device_memory",
    ),
    "Devices": (
        "make_logical_cpus",
        "PipelineStrategy",
        "MultiWorkerPipelineStrategy",
        "TPUPipelineStrategy",
        "place_optimizer",
        "ShardingSpec",
        "devices.Mesh",
    ),
    "Schedules as values": ("Schedule", "Action", "schedules.draw"),
    "Simulation": (
        "simulate",
        "Costs",
        "simulation.Simulation",
        "simulation.costs_of",
    ),
    "What devices do": ("TimelineCallback", "Timeline", "simulation.average_timelines"),
    "Pictures": (
        "plot_schedule",
        "plot_timelines",
        "plot_memory",
        "plot_bubbles",
        "plot_gpipe_bubbles",
        "plot_peaks",
        "plot_differences",
        "plot_mesh",
    ),
}
MODULES = (
    "schedules",
    "layers",
    "tensor_parallel",
    "quantization",
    "cluster",
    "planner",
)
# Classes that users are given, in modules of these packages.
GIVEN = {
    "tfgpipe.quantization": (
        "ranges.Range",
        "scheme.Scheme",
        "tflite.Comparison",
    ),
}
# Members that other packages of the library call, not users.
INNER = {
    "activation_observers",
    "apply_gradients",
    "check_num_stages",
    "check_state",
    "needs_data",
    "metrics_result",
    "remember_specs",
    "output_observer",
    "owner_replica",
    "update_scope",
    "pipeline",
    "place_slots",
    "places_updates",
    "run",
    "set_weight_ranges",
    "slot_scope",
    "stage_devices",
    "stage_group_key",
    "weight_observers",
    "weight_scope",
    "weights_only",
    "without_output",
}

LISTS = ("Args", "Attributes", "Call arguments", "Raises")
SECTION = re.compile(
    rf"^({'|'.join(LISTS)}|Returns|Yields|Input shape|Output shape|Examples?):$"
)
PROPERTIES = (property, functools.cached_property)
TITLES = {"Args": "Arguments"}


def page() -> str:
    """Returns the whole reference as Markdown."""
    chapters = {
        title: [(f"tfgpipe.{name}", _found(name)) for name in names]
        for title, names in TOPICS.items()
    }
    for name in MODULES:
        module = getattr(tfgpipe, name)
        chapters[f"tfgpipe.{name}"] = [
            (f"tfgpipe.{name}.{inner}", operator.attrgetter(inner)(module))
            for inner in _public(module)
            # `export_int8` is in two places, the layers in shards as well.
            if not (name == "tensor_parallel" and inner in tfgpipe.layers.__all__)
        ]
    chapters["trainer.hyperparams"] = [
        (f"trainer.hyperparams.{name}", getattr(hyperparams, name))
        for name in _public(hyperparams)
    ]
    _check_complete()
    contents = [
        f"- [{title}](#{anchor(title)}): "
        + ", ".join(f"[`{_short(name)}`](#{anchor(name)})" for name, _ in entries)
        for title, entries in chapters.items()
    ]
    parts = [INTRODUCTION, "\n".join(contents)]
    for title, entries in chapters.items():
        parts.append(f"## {title}")
        if title.startswith("tfgpipe."):
            parts.append(markdown(importlib.import_module(title).__doc__ or ""))
        parts += [_entry(name, thing) for name, thing in entries]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _found(name: str) -> Any:
    """Returns what a name in `TOPICS` stands for."""
    package, _, inner = name.rpartition(".")
    return getattr(importlib.import_module(f"tfgpipe.{package}".rstrip(".")), inner)


def shown() -> set[str]:
    """Returns where everything that the reference describes is defined."""
    things = [_found(name) for names in TOPICS.values() for name in names]
    modules = [getattr(tfgpipe, name) for name in MODULES]
    for module in (*modules, hyperparams):
        members = map(operator.attrgetter, _public(module))
        things += [module, *(member(module) for member in members)]
    return {
        thing.__name__
        if isinstance(thing, ModuleType)
        else f"{thing.__module__}.{thing.__qualname__}"
        for thing in things
        if isinstance(thing, ModuleType) or callable(thing)
    }


def anchor(title: str) -> str:
    """Returns what a link to a heading ends with.

    >>> anchor("What is `tfgpipe.plan`?")
    'what-is-tfgpipeplan'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def markdown(docstring: str) -> str:
    r"""Returns a docstring with its sections as Markdown.

    >>> print(markdown("Adds.\n\nArgs:\n    x: A number,\n        any.\n"))
    Adds.
    <BLANKLINE>
    **Arguments**
    <BLANKLINE>
    - `x`: A number,
      any.
    """
    lines = iter(_sections(inspect.cleandoc(docstring)))
    return "\n\n".join(part for part in lines if part.strip())


def _sections(text: str) -> Iterator[str]:
    """Yields titles and blocks of a docstring, each as Markdown."""
    blocks = re.split(r"\n\s*\n", text)
    inside: str | None = None
    number = 0
    while number < len(blocks):
        block = blocks[number]
        number += 1
        first, _, rest = block.partition("\n")
        title = SECTION.match(first)
        if block.startswith("```"):
            while not block.rstrip().endswith("```"):
                block += "\n\n" + blocks[number]
                number += 1
            # Doctest runs none of these, which need hosts of their own.
            yield block.replace("```python\n", "```python skip\n", 1)
            continue
        if title is not None:
            inside = title[1]
            yield f"**{TITLES.get(inside, inside)}**"
            block = textwrap.dedent(rest)
        elif inside is not None and block.startswith("    "):
            block = textwrap.dedent(block)
        elif not block.startswith(">>>"):
            inside = None
        if not block:
            continue
        if block.lstrip().startswith(">>>"):
            yield f"```pycon\n{textwrap.dedent(block)}\n```"
        elif inside in LISTS:
            yield _list(block)
        elif block.startswith("    "):
            drawing = textwrap.dedent(block)
            while number < len(blocks) and blocks[number].startswith("    "):
                drawing += "\n\n" + textwrap.dedent(blocks[number])
                number += 1
            yield f"```text\n{drawing}\n```"
        else:
            yield block


def _list(block: str) -> str:
    """Returns entries of the form `name: text` as a list."""
    entry = re.compile(r"^(\*{0,2}[\w.]+(?:, [\w.]+)*): ", re.MULTILINE)
    block = entry.sub(lambda match: f"- `{match[1]}`: ", block)
    return re.sub(r"^    ", "  ", block, flags=re.MULTILINE)


def _entry(name: str, thing: Any) -> str:
    """Returns the part on one public name."""
    if isinstance(thing, ModuleType):
        return f"### `{name}`\n\n{markdown(thing.__doc__ or '')}"
    if not callable(thing):
        return f"### `{name}`\n\n{_comment(name)}\n\n```text\n{thing!r}\n```"
    parts = [f"### `{name}`", _signature(_short(name), thing)]
    parts.append(markdown(thing.__doc__ or ""))
    if inspect.isclass(thing):
        for member, described in _members(thing):
            parts.append(f"#### `{_short(name)}.{member}`")
            if not isinstance(described, PROPERTIES):
                parts.append(_signature(member, described))
            parts.append(markdown(described.__doc__))
    return "\n\n".join(filter(None, parts))


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    """Yields the methods and properties that users call, as they are written."""
    for name, member in vars(thing).items():
        described = getattr(member, "__func__", member)  # Of a class method.
        if name.startswith("_") or name in INNER or not described.__doc__:
            continue
        if any(name in vars(base) for base in thing.__mro__[1:] if _is_known(base)):
            continue
        if isinstance(described, PROPERTIES) or inspect.isfunction(described):
            yield name, described


@functools.cache
def _is_known(base: type) -> bool:
    """Returns whether users know a class: one of Keras, or one shown here."""
    ours = base.__module__.startswith("tfgpipe")
    return not ours or f"{base.__module__}.{base.__qualname__}" in shown()


def _signature(name: str, thing: Any) -> str:
    """Returns how something is called, or nothing for what users do not make."""
    function = thing.__init__ if inspect.isclass(thing) else thing
    if not inspect.isfunction(function):
        return ""
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if _is_shown(p)]
    words: list[str] = []
    for parameter in given:
        only = parameter.kind is parameter.KEYWORD_ONLY
        if only and not any(word.startswith("*") for word in words):
            words.append("*")
        words.append(_parameter(parameter))
    returned = signature.return_annotation
    gives = inspect.isclass(thing) or returned in ("None", signature.empty)
    result = "" if gives else f" -> {returned}"
    line = f"{name}({', '.join(words)}){result}"
    if len(line) > 88:
        line = f"{name}(\n    " + ",\n    ".join(words) + f",\n){result}"
    return f"```text\n{line}\n```"


def _is_shown(parameter: inspect.Parameter) -> bool:
    return parameter.name not in ("self", "cls") and parameter.name[0] != "_"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    word = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:  # As it is in what Keras makes.
        word += f": {parameter.annotation}"
    if parameter.default is parameter.empty:
        return word
    default = parameter.default
    text = json.dumps(default) if isinstance(default, str) else str(default)
    return f"{word} = {text}" if ":" in word else f"{word}={text}"


def _comment(name: str) -> str:
    """Returns the comment above a constant, where it is assigned."""
    constant = _short(name)
    wanted = re.compile(rf"((?:^#.*\n)+)^{constant}(?::.*)? = ", re.MULTILINE)
    for path in sorted((PATH.parents[1] / "tfgpipe").rglob("*.py")):
        found = wanted.search(path.read_text("utf-8"))
        if found:
            return re.sub(r"^# ?", "", found[1], flags=re.MULTILINE).strip()
    raise LookupError(f"No comment says what {name} is.")


def _public(module: ModuleType) -> list[str]:
    """Returns the public names of a module, in the order it lists or defines them."""
    if hasattr(module, "__all__"):
        shown = [
            name
            for name in module.__all__
            for thing in [getattr(module, name)]
            if name.isupper() or inspect.isclass(thing) or inspect.isroutine(thing)
        ]
        return [*shown, *GIVEN.get(module.__name__, ())]
    return [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and getattr(thing, "__module__", None) == module.__name__
        and (inspect.isclass(thing) or inspect.isfunction(thing))
    ]


def _check_complete() -> None:
    there = {n for names in TOPICS.values() for n in names if "." not in n}
    there |= {*MODULES, "export_int8"}  # Of `quantization`.
    missing = set(tfgpipe.__all__) ^ there
    if missing:
        raise LookupError(f"Not in both `tfgpipe.__all__` and `TOPICS`: {missing}.")


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def with_line_links(text: str) -> str:
    """Returns a page whose links to lines lead to the definitions that they name."""

    def link(found: re.Match[str]) -> str:
        name, path = found.groups()
        lines = (PATH.parent / path).read_text("utf-8").splitlines()
        number = 0
        for part in name.split("."):
            definition = re.compile(rf" *(def|class) {part}\b")
            number = next(
                i for i in range(number, len(lines)) if definition.match(lines[i])
            )
        return f"[`{name}`]({path}#L{number + 1})"

    return re.sub(r"\[`([\w.]+)`\]\((\.\./tfgpipe/[\w/]+\.py)#L\d+\)", link, text)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    checks = parser.parse_args().check
    for path, made in (
        (PATH, page()),
        (WALK, with_line_links(WALK.read_text("utf-8"))),
    ):
        if not checks:
            path.write_text(made, "utf-8")
        elif path.read_text("utf-8") != made:
            sys.exit(f"{path.name} is not what the code says. Run `make docs`.")


if __name__ == "__main__":
    _main()
