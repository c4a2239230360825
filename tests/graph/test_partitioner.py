"""Taking a graph apart, on graphs small enough to check by eye."""

from __future__ import annotations

import pytest

from tfgpipe.graph import partitioner

pytestmark = pytest.mark.pure

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
    piece = partitioner.subgraph(GRAPH, fetches=["f2:0"], feeds=SOURCES)
    assert piece.operations == {"f1", "f2", "c"}
    assert piece.feeds == ("x:0", "w:0")


def test_a_program_names_only_the_feeds_it_uses_in_the_order_given():
    piece = partitioner.subgraph(
        GRAPH, fetches=["b2"], feeds=("w:0", "dy:0", "x:0", "f1:0")
    )
    assert piece.operations == {"b2", "c"}
    assert piece.feeds == ("w:0", "dy:0", "f1:0")


def test_a_fetch_that_is_fed_needs_no_operation():
    piece = partitioner.subgraph(GRAPH, fetches=["x:0"], feeds=SOURCES)
    assert piece == partitioner.Subgraph(frozenset(), ("x:0",))


def test_a_control_dependency_on_a_fed_operation_is_not_followed():
    feeds = ("x:0", "b2:0", "f2:1")
    assert partitioner.subgraph(GRAPH, fetches=["b1"], feeds=feeds).operations == {"b1"}


def test_saving_keeps_exactly_what_crosses_and_copies_constants():
    residuals = partitioner.saved_tensors(
        GRAPH,
        sources=(*SOURCES, "dy:0"),
        outputs=["f2:0"],
        gradients=["b1:0"],
        constants=["c"],
    )
    assert sorted(residuals) == ["f1:0", "f2:1"]


def test_saving_keeps_a_gradient_that_the_forward_already_has():
    residuals = partitioner.saved_tensors(
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
    assert partitioner.saved_tensors_under_remat(GRAPH, stateful=[], **arguments) == ()
    assert partitioner.saved_tensors_under_remat(
        GRAPH, stateful=["f1"], **arguments
    ) == ("f1:0",)


def test_what_is_saved_of_a_recomputed_chain_is_what_the_backward_starts_from():
    # x -> m1 -> m2 -> t -> y, and a backward that reads m2, t and y.
    graph = {
        "x": (),
        "m1": ("x",),
        "m2": ("m1",),
        "t": ("m2",),
        "y": ("t",),
        "dy": (),
        "b": ("dy", "t", "y"),
        "d": ("b", "m2"),
    }
    found = partitioner.saved_tensors_under_remat(
        graph,
        sources=("x:0", "dy:0"),
        outputs=["y:0"],
        gradients=["d:0"],
        stateful=[],
        saved=["m1:0", "m2:0"],
    )
    assert found == ("m2:0",)  # Nothing is computed from m1 again.


# -- lasting --------------------------------------------------------------------------


def lasting(graph, *, fetches, worthwhile, stateful=()):
    return partitioner.hoistable_tensors(
        partitioner.topological_order(graph),
        invariant=("w:0",),
        fetches=fetches,
        constants=["c"],
        stateful=stateful,
        hoistable_ops=worthwhile,
    )


# What is made of w and c alone, and y, which is not.
COPIES = {
    "y": ("x", "padded", "turned"),
    "turned": ("cast",),
    "padded": ("cast", "c"),
    "cast": ("w",),
    "number": ("c",),
    "z": ("y", "number"),
    "unused": ("w",),
    "w": (),
    "c": (),
    "x": (),
}


def test_operations_are_ordered_behind_what_they_need():
    order = list(partitioner.topological_order(COPIES))
    assert sorted(order) == sorted(COPIES)
    for name, inputs in COPIES.items():
        assert all(order.index(i) < order.index(name) for i in inputs)


def test_what_is_made_of_weights_alone_lasts_where_it_is_worth_it():
    all_of_it = ["cast", "padded", "number", "unused"]
    found = lasting(COPIES, fetches=["z:0"], worthwhile=all_of_it)
    # Constants are no weights; what nobody fetches is not made.
    assert sorted(found) == ["cast:0", "padded:0"]
    assert lasting(COPIES, fetches=["z:0"], worthwhile=["padded"]) == ("padded:0",)
    assert lasting(COPIES, fetches=["z:0"], worthwhile=[]) == ()
    assert lasting(COPIES, fetches=["number:0"], worthwhile=all_of_it) == ()


def test_nothing_lasts_that_may_be_something_else_each_time():
    graph = {**COPIES, "padded": ("cast", "number")}
    arguments = {"fetches": ["z:0"], "worthwhile": ["padded"]}
    assert lasting(graph, **arguments) == ("padded:0",)
    assert lasting(graph, stateful=["number"], **arguments) == ()
    assert lasting(graph, stateful=["cast"], **arguments) == ()


def test_what_only_leads_to_something_that_lasts_does_not():
    graph = {**COPIES, "y": ("x", "padded")}
    found = lasting(graph, fetches=["z:0"], worthwhile=["cast", "padded"])
    assert found == ("padded:0",)
    found = lasting(graph, fetches=["z:0", "cast:0"], worthwhile=["cast", "padded"])
    assert sorted(found) == ["cast:0", "padded:0"]


# -- halves ---------------------------------------------------------------------------

# Two layers: x -> f1 (w1) -> f2 (w2) -> y. Each has a gradient of its input, b, and of
# its weight, g; those of the second layer's come first.
LAYERS = {
    "x": (),
    "w1": (),
    "w2": (),
    "f1": ("x", "w1"),
    "f2": ("f1", "w2"),
    "dy": (),
    "c": (),
    "a2": ("dy", "f2"),  # Through the activation.
    "g2": ("f1", "a2"),
    "b2": ("a2", "w2"),
    "a1": ("b2", "f1"),
    "t1": ("a1", "c"),  # Only the weight's gradient needs it.
    "g1": ("x", "t1"),
    "b1": ("a1", "w1"),
}
GIVEN = ("x:0", "w1:0", "w2:0", "dy:0")


def halves(graph=LAYERS, weight_grads=("g1:0", "g2:0"), **arguments):
    arguments = {
        "sources": GIVEN,
        "outputs": ["f2:0"],
        "input_grads": ["b1:0"],
        "constants": ["c"],
        **arguments,
    }
    return partitioner.backward_split_tensors(
        graph, weight_grads=weight_grads, **arguments
    )


def programs(between, *, kept=(), input_grads=("b1:0",), weight_grads=("g1:0", "g2:0")):
    """Returns the operations of both halves, as `programs.Programs` makes them."""
    made = [*input_grads, *(x for x in between if x not in kept)]
    feeds = (*kept, *GIVEN)
    chain = partitioner.subgraph(LAYERS, fetches=made, feeds=feeds)
    hanging = partitioner.subgraph(
        LAYERS, fetches=weight_grads, feeds=(*between, *feeds)
    )
    return chain.operations, hanging.operations


def test_the_chain_leads_to_the_inputs_and_weights_hang_off_it():
    between = halves()
    assert sorted(between) == ["a1:0", "a2:0", "f1:0"]
    chain, hanging = programs(between)
    assert chain == {"f1", "f2", "a2", "b2", "a1", "b1"}
    assert hanging == {"g2", "t1", "g1", "c"}


def test_neither_half_repeats_anything_of_the_other_but_constants():
    chain, hanging = programs(halves(constants=[]))
    assert not chain & hanging
    needed = partitioner.subgraph(LAYERS, fetches=["b1:0", "g1:0", "g2:0"], feeds=GIVEN)
    assert chain | hanging == needed.operations


def test_what_the_forward_kept_goes_between_as_it_is():
    between = halves()
    chain, hanging = programs(between, kept=("f1:0", "f2:0"))
    assert chain == {"a2", "b2", "a1", "b1"}
    assert hanging == {"g2", "t1", "g1", "c"}


def test_without_gradients_of_inputs_the_chain_ends_at_the_first_layer():
    """What leads from one layer's weight to another's is on it; the rest hangs."""
    between = halves(input_grads=[])
    assert sorted(between) == ["a2:0", "f1:0"]
    chain, hanging = programs(between, input_grads=())
    assert chain == {"f1", "f2", "a2"}
    assert hanging == {"g2", "b2", "a1", "t1", "g1", "c"}


def test_one_weight_without_gradients_of_inputs_leaves_no_chain():
    between = halves(weight_grads=["g1:0"], input_grads=[])
    assert sorted(between) == ["f1:0", "f2:0"]
    chain, hanging = programs(between, input_grads=(), weight_grads=["g1:0"])
    assert chain == {"f1", "f2"}
    assert hanging == {"a2", "b2", "a1", "t1", "g1", "c"}


def test_an_operation_that_makes_both_gradients_is_on_the_chain():
    """A fused one gives the gradient of the input first, that of the weight second."""
    graph = {**LAYERS, "b1": ("x", "w1", "a1")}
    del graph["g1"], graph["t1"]
    weight_grads = ("b1:1", "g2:0")
    between = halves(graph, weight_grads)
    assert sorted(between) == ["a2:0", "b1:1", "f1:0"]
    feeds = (*between, *GIVEN)
    hanging = partitioner.subgraph(graph, fetches=weight_grads, feeds=feeds)
    assert hanging.operations == {"g2"}


def test_what_two_weights_need_is_on_the_chain():
    """Lest it be handed on for one and made again for the other."""
    graph = {**LAYERS, "bias1": ("t1",)}
    between = halves(graph, ("g1:0", "bias1:0", "g2:0"))
    assert sorted(between) == ["a2:0", "f1:0", "t1:0"]


def test_a_gradient_that_is_held_in_two_tensors():
    """Rows of an embedding's gradient, and which rows, from a forward that has them."""
    graph = {**LAYERS, "g1": ("b2",), "rows": ("x",)}
    between = halves(graph, ("g1:0", "rows:0", "g2:0"))
    assert sorted(between) == ["a2:0", "b2:0", "f1:0"]


def test_a_gradient_that_the_chain_has_is_handed_on():
    between = halves(weight_grads=("g2:0", "a1:0"))
    assert sorted(between) == ["a1:0", "a2:0", "f1:0"]


def test_operations_that_have_run_are_waited_for_by_neither_half():
    graph = {**LAYERS, "print": ("f1",), "g2": ("f1", "a2", "^print")}
    assert sorted(halves(graph, completed=["print"])) == ["a1:0", "a2:0", "f1:0"]
