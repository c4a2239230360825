"""Taking a graph apart, on graphs small enough to check by eye."""

from __future__ import annotations

from tfgpipe import cut

# x, w -> f1 -> f2 -> y; dy -> b2 (uses f2's input and w) -> b1 -> dx
GRAPH = {
    "x": (),
    "w": (),
    "c": (),
    "f1": ("x", "w"),
    "f2": ("f1", "w", "c"),
    "dy": (),
    "b2": ("dy", "f1", "w", "c"),
    "b1": ("b2", "x", "f2:1", "^f2"),
}
SOURCES = ("x:0", "w:0")


def test_a_program_holds_what_lies_between_feeds_and_fetches():
    piece = cut.program(GRAPH, fetches=["f2:0"], feeds=SOURCES)
    assert piece.operations == {"f1", "f2", "c"}
    assert piece.feeds == ("x:0", "w:0")


def test_a_program_names_only_the_feeds_it_uses_in_the_order_given():
    piece = cut.program(GRAPH, fetches=["b2"], feeds=("w:0", "dy:0", "x:0", "f1:0"))
    assert piece.operations == {"b2", "c"}
    assert piece.feeds == ("w:0", "dy:0", "f1:0")


def test_a_fetch_that_is_fed_needs_no_operation():
    piece = cut.program(GRAPH, fetches=["x:0"], feeds=SOURCES)
    assert piece == cut.Cut(frozenset(), ("x:0",))


def test_a_control_dependency_on_a_fed_operation_is_not_followed():
    feeds = ("x:0", "b2:0", "f2:1")
    assert cut.program(GRAPH, fetches=["b1"], feeds=feeds).operations == {"b1"}


def test_saving_keeps_exactly_what_crosses_and_copies_constants():
    residuals = cut.saving(
        GRAPH,
        sources=(*SOURCES, "dy:0"),
        outputs=["f2:0"],
        gradients=["b1:0"],
        constants=["c"],
    )
    assert sorted(residuals) == ["f1:0", "f2:1"]


def test_saving_keeps_a_gradient_that_the_forward_already_has():
    residuals = cut.saving(
        GRAPH,
        sources=(*SOURCES, "dy:0"),
        outputs=["f2:0"],
        gradients=["f1:0"],
        constants=[],
    )
    assert residuals == ("f1:0",)


def test_recomputing_keeps_nothing_unless_it_is_stateful():
    arguments = {
        "sources": (*SOURCES, "dy:0"),
        "outputs": ["f2:0"],
        "gradients": ["b1:0"],
    }
    assert cut.recomputing(GRAPH, stateful=[], **arguments) == ()
    assert cut.recomputing(GRAPH, stateful=["f1"], **arguments) == ("f1:0",)
