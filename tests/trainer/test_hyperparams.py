"""Hyperparameter classes: checked, overridden by text, written and read back."""

from __future__ import annotations

import copy
import math
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpipe_params import template
from tfgpipe_params.image.classifiers import ConvNet
from tfgpipe_trainer import hyperparams
from tfgpipe_trainer.config import Optimizer, Training
from tfgpipe_trainer.hyperparams import (
    HyperparameterError,
    Hyperparams,
    describe,
    diff,
    field,
    flatten,
    from_text,
    override,
    to_text,
)

pytestmark = pytest.mark.pure


class Part(Hyperparams):
    number: int = field(default=1, help="A number.", at_least=0)
    name: str = field(default="", help="A name.")


class Whole(Hyperparams):
    """One field of every kind."""

    integer: int = field(default=0, help="An int.")
    real: float = field(default=0.0, help="A float.")
    flag: bool = field(default=False, help="A bool.")
    text: str = field(default="", help="A str.")
    choice: Literal["one", "other"] = field(default="one", help="A Literal.")
    maybe_integer: int | None = field(default=None, help="An Optional.")
    maybe_text: str | None = field(default=None, help="Another Optional.")
    integers: tuple[int, ...] = field(default=(), help="A tuple.")
    reals: tuple[float, ...] = field(default=(), help="A tuple of floats.")
    texts: tuple[str, ...] = field(default=(), help="A tuple of strings.")
    pair: tuple[int, str] = field(default=(0, ""), help="A tuple of two.")
    maybe_pairs: tuple[tuple[int, float | None], ...] | None = field(
        default=None, help="All at once."
    )
    part: Part = field(default=Part(), help="A group.")
    maybe_part: Part | None = field(default=None, help="A group or none.")


texts = st.text(st.characters(exclude_categories=()))  # Lone surrogates as well.
reals = st.floats(allow_nan=False)
parts = st.builds(Part, number=st.integers(min_value=0), name=texts)
wholes = st.builds(
    Whole,
    integer=st.integers(),
    real=reals,
    flag=st.booleans(),
    text=texts,
    choice=st.sampled_from(["one", "other"]),
    maybe_integer=st.none() | st.integers(),
    maybe_text=st.none() | texts | st.just("None"),
    integers=st.lists(st.integers()).map(tuple),
    reals=st.lists(reals).map(tuple),
    texts=st.lists(texts).map(tuple),
    pair=st.tuples(st.integers(), texts),
    maybe_pairs=st.none()
    | st.lists(st.tuples(st.integers(), st.none() | reals)).map(tuple),
    part=parts,
    maybe_part=st.none() | parts,
)


class Scaled(Hyperparams):
    width: int = field(default=8, help="A multiple of heads.")
    heads: int = field(default=4, help="Divides the width.")

    def validate(self) -> None:
        if self.width % self.heads:
            raise HyperparameterError(
                f"width: expected a multiple of heads={self.heads}; "
                f"received {self.width}."
            )


class Holder(Hyperparams):
    model: Scaled = field(default=Scaled(), help="The model.")


@given(wholes)
def test_text_reads_back_to_an_equal_object(params: Whole) -> None:
    assert from_text(to_text(params), Whole) == params


@given(wholes, wholes)
def test_overriding_everything_gives_the_other_object(a: Whole, b: Whole) -> None:
    assignments = [f"{name}={value!r}" for name, value in flatten(b).items()]
    assert override(a, assignments) == b


@given(wholes, wholes)
def test_a_difference_is_empty_exactly_for_equal_objects(a: Whole, b: Whole) -> None:
    assert diff(a, a) == ""
    assert (diff(a, b) == "") == (to_text(a) == to_text(b))


def test_a_difference_names_what_one_side_lacks() -> None:
    assert diff(Whole(), Whole(part=Part(number=3), maybe_part=Part())) == (
        "part.number: 1 -> 3\n"
        "maybe_part: None -> absent\n"
        "maybe_part.number: absent -> 1\n"
        "maybe_part.name: absent -> ''"
    )


def test_describing_gives_each_value_its_help() -> None:
    assert describe(Holder()) == (
        "model.width  8  A multiple of heads.\nmodel.heads  4  Divides the width."
    )


@pytest.mark.parametrize(
    ("assignment", "name", "value"),
    [
        ("integer=-12", "integer", -12),
        ("integer=1_000", "integer", 1000),
        ("real=1", "real", 1.0),
        ("real=1e-3", "real", 1e-3),
        ("real=-inf", "real", -math.inf),
        ("flag=true", "flag", True),
        ("flag=False", "flag", False),
        ("text=", "text", ""),
        ("text=a=b, 'c'", "text", "a=b, 'c'"),
        ("text=' spaces '", "text", " spaces "),
        ("text=None", "text", "None"),
        ("choice=other", "choice", "other"),
        ("maybe_integer=None", "maybe_integer", None),
        ("maybe_integer=3", "maybe_integer", 3),
        ("maybe_text='None'", "maybe_text", "None"),
        ("integers=1,2", "integers", (1, 2)),
        ("integers=[1, 2]", "integers", (1, 2)),
        ("integers=3", "integers", (3,)),
        ("integers=()", "integers", ()),
        ("reals=1, inf", "reals", (1.0, math.inf)),
        ("texts=a, 'b c'", "texts", ("a", "b c")),
        ("texts=block_*/a,b/[12]", "texts", ("block_*/a", "b/[12]")),
        ("texts=('a, b',)", "texts", ("a, b",)),
        ("texts=[ab]*", "texts", ("[ab]*",)),
        ("texts=(it's, \"b's\")", "texts", ("it's", "b's")),
        ("pair=(1, x)", "pair", (1, "x")),
        ("part.number=5", "part", Part(number=5)),
        ("maybe_part.number=5", "maybe_part", Part(number=5)),
    ],
)
def test_an_override_is_parsed_by_the_type_of_its_field(
    assignment: str, name: str, value: Any
) -> None:
    changed = override(Whole(), [assignment])
    assert getattr(changed, name) == value
    assert type(getattr(changed, name)) is type(value)


def test_an_override_keeps_what_it_does_not_name() -> None:
    params = Whole(part=Part(number=7, name="kept"), integer=3)
    assert override(params, ["part.number=8"]) == Whole(
        part=Part(number=8, name="kept"), integer=3
    )


def test_of_two_overrides_of_one_name_the_last_counts() -> None:
    assert override(Whole(), ["integer=1", "integer=2"]).integer == 2
    switched_off = override(Whole(), ["maybe_part.number=3", "maybe_part=None"])
    assert switched_off.maybe_part is None


def test_overrides_are_applied_together_before_anything_is_checked() -> None:
    # Either alone would break `width % heads == 0`.
    changed = override(Holder(), ["model.heads=5", "model.width=10"])
    assert changed.model == Scaled(width=10, heads=5)


def test_a_check_across_fields_names_the_field_in_full() -> None:
    with pytest.raises(HyperparameterError) as error:
        override(Holder(), ["model.heads=3"])
    assert str(error.value) == (
        "model.width: expected a multiple of heads=3; received 8."
    )


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("integer=x", "integer: expected an int; received 'x'."),
        ("integer=1.5", "integer: expected an int; received '1.5'."),
        ("real=nan", "real: expected a float; received 'nan'."),
        ("flag=yes", "flag: expected true or false; received 'yes'."),
        ("text='open", 'text: expected a string; received "\'open".'),
        ("choice=two", "choice: expected one of one, other; received 'two'."),
        ("maybe_integer=x", "maybe_integer: expected an int or None; received 'x'."),
        (
            "integers=1,x",
            "integers: expected a tuple, each item an int; received '1,x'.",
        ),
        ("integers=1,", None),
        ("integers=(1", "integers: expected a tuple, each item an int; received '(1'."),
        (
            "texts=a,,b",
            "texts: expected a tuple, each item a string; received 'a,,b'.",
        ),
        ("pair=1", "pair: expected a tuple of an int and a string; received '1'."),
        (
            "part.number=-1",
            "part.number: expected an int, at least 0; received '-1'.",
        ),
        ("maybe_part=3", "maybe_part: expected a Part or None; received '3'."),
        ("integr=1", "integr: Whole has no such name. Did you mean integer?"),
        ("number=1", "number: Whole has no such name. Did you mean part.number?"),
        (
            "part.nuber=1",
            "part.nuber: Whole has no such name. Did you mean part.number?",
        ),
        ("integer", "integer: expected NAME=VALUE, such as integer=VALUE."),
    ],
)
def test_a_wrong_override_says_what_was_expected(
    assignment: str, message: str | None
) -> None:
    if message is None:  # Python's own way to write a tuple of one.
        assert override(Whole(), [assignment]).integers == (1,)
        return
    with pytest.raises(HyperparameterError) as error:
        override(Whole(), [assignment])
    assert str(error.value) == message


def test_a_name_like_no_other_lists_those_there_are() -> None:
    with pytest.raises(HyperparameterError) as error:
        override(Holder(), ["zzz=1"])
    assert str(error.value) == (
        "zzz: Holder has no such name. Expected model.width, model.heads."
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"integer": "1"}, "integer: expected an int; received '1'."),
        ({"integer": True}, "integer: expected an int; received True."),
        ({"integer": None}, "integer: expected an int; received None."),
        ({"real": math.nan}, "real: expected a float; received nan."),
        ({"real": 10**400}, None),
        (
            {"integers": [1]},
            "integers: expected a tuple, each item an int; received [1].",
        ),
        ({"integr": 1}, "integr: Whole has no such name. Did you mean integer?"),
    ],
)
def test_values_are_checked_when_an_object_is_made(
    values: dict[str, Any], message: str | None
) -> None:
    with pytest.raises(HyperparameterError) as error:
        Whole(**values)
    if message:
        assert str(error.value) == message


def test_an_int_will_do_for_a_float() -> None:
    assert type(Whole(real=2).real) is float


def test_objects_are_frozen_and_hashable_and_can_be_copied() -> None:
    params = Whole(integer=3)
    with pytest.raises(AttributeError, match="cannot assign"):
        params.integer = 4  # type: ignore[misc]
    assert hash(params) == hash(Whole(integer=3))
    assert copy.deepcopy(params) == params == pickle.loads(pickle.dumps(params))


def test_a_subclass_lists_only_what_differs() -> None:
    class Child(Whole):
        integer: int = 5

    assert to_text(Child()) == to_text(Whole(integer=5))
    assert "An int." in describe(Child())


def test_a_default_without_its_type_has_that_of_the_parent() -> None:
    class Child(Whole):
        integer = 5

    assert Child().integer == 5
    assert "An int." in describe(Child())
    with pytest.raises(HyperparameterError, match="integer: expected an int"):
        Child(integer="5")


def test_defaults_come_from_all_base_classes_as_attributes_do() -> None:
    class Wide(Scaled):
        width = 16

    class Other(Scaled):
        pass

    class Plain:
        heads = 2

    class Both(Other, Wide):  # `Other` has the default of `Scaled` at hand.
        pass

    class Mixed(Plain, Wide):
        pass

    class Two(Part, Wide):
        width = 32

    class Third(Scaled):
        width = 64

    class Diamond(Both, Third):  # Between `Both` and `Wide`: C3.
        pass

    assert (Both().width, Both.width, Both().heads) == (16, 16, 4)
    assert (Mixed().width, Mixed().heads) == (16, 2)
    assert (Two().width, Two().number) == (32, 1)
    assert Diamond().width == Diamond.width
    with pytest.raises(HyperparameterError, match="width: expected an int"):
        Mixed(width="5")


def test_a_group_of_a_subclass_needs_no_annotation() -> None:
    class Ours(Training):
        clock: int = field(default=3, help="An int of ours.")

    class Child(template.Mine):
        training = Ours(clock=4)

    assert override(Child(), ["training.clock=5"]).training == Ours(clock=5)

    class Maybe(Hyperparams):
        part: Part | None = field(default=Part(), help="A group, or none.")

    assert override(type("Below", (Maybe,), {})(), ["part=None"]).part is None


def test_a_field_without_help_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Bare\.size is declared without help"):

        class Bare(Hyperparams):
            size: int = 1


def test_a_type_that_text_cannot_give_is_refused() -> None:
    class Odd(Hyperparams):
        table: dict = field(default=None, help="No good.")  # type: ignore[type-arg]

    with pytest.raises(TypeError, match="cannot be of type"):
        Odd()


def test_what_a_text_from_before_lacks_has_its_default() -> None:
    class Newer(Holder):
        model: Scaled = Scaled(width=6, heads=3)
        added: int = field(default=5, help="It is newer than the text.")

    text = "model.width = 9\n"
    assert from_text(text, Newer) == Newer(model=Scaled(width=9, heads=3), added=5)


def test_comments_and_empty_lines_are_skipped() -> None:
    text = f"# A run.\n\n{to_text(Holder())}"
    assert from_text(text, Holder) == Holder()


def test_type_checkers_see_wrong_names_and_types(tmp_path: Path) -> None:
    # A copy, so that the rest of the package is not checked as well.
    shutil.copy(hyperparams.__file__, tmp_path)
    code = tmp_path / "experiment.py"
    code.write_text(
        "from hyperparams import Hyperparams, field\n"
        "class Model(Hyperparams):\n"
        '    width: int = field(default=1, help="A number.")\n'
        "Model(width=2)\n"
        "Model(with_=2)\n"
        'Model(width="2")\n'
        "Model().width = 3\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", str(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line.partition(".py:")[2] for line in run.stdout.splitlines()]
    assert [error[:2] for error in errors[:-1]] == ["5:", "6:", "7:"], run.stdout


def test_a_number_is_within_its_bounds():
    class Rates(Hyperparams):
        dropout: float = field(default=0.0, at_least=0, less_than=1, help="A share.")
        maybe: int | None = field(default=None, less_than=2**32, help="A seed.")

    assert Rates(dropout=0.5, maybe=2**32 - 1).maybe == 2**32 - 1
    for received in ("1.0", "2.0", "-0.5"):
        with pytest.raises(
            HyperparameterError,
            match=rf"^dropout: expected a float, at least 0, less than 1; received "
            rf"'{received}'",
        ):
            override(Rates(), [f"dropout={received}"])
    with pytest.raises(HyperparameterError, match="an int or None, less than 42949672"):
        Rates(maybe=2**32)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        (
            "learning_rate=inf",
            "^learning_rate: expected a float, at least 0, less than",
        ),
        (
            "learning_rate=1e400",
            "^learning_rate: expected a float, at least 0, less th",
        ),
        (
            "learning_rate=nan",
            "^learning_rate: expected a float, at least 0, less than",
        ),
        (
            "weight_decay=inf",
            "^weight_decay: expected a float, at least 0, less than i",
        ),
        (
            "global_clipnorm=inf",
            "^global_clipnorm: expected a float or None, at least 0, less than",
        ),
        (
            "global_clipnorm=0",
            "^global_clipnorm: expected a number above 0, or None for no clippi",
        ),
    ],
)
def test_an_optimizer_with_which_nothing_is_learnt_is_refused(assignment, words):
    with pytest.raises(HyperparameterError, match=words):
        override(Optimizer(), [assignment])


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["channels=8,8,8", "strides=1,2"], "^strides: expected 3 numbers of at least"),
        (["channels=8", "strides=0"], "^strides: expected 1 numbers of at least 1"),
        (
            ["channels=8,0", "strides=1,1"],
            "^channels: expected 2 numbers of at least 1",
        ),
    ],
)
def test_each_convolution_has_channels_and_a_stride(assignments, words):
    with pytest.raises(HyperparameterError, match=words):
        override(ConvNet(), assignments)


class Renamed(Hyperparams):
    rate: float = field(default=1.0, help="Rate.", formerly="speed")
    waits: bool = field(
        default=True,
        help="Whether it waits.",
        formerly="when",
        former_values={"later": "True", "at_once": "False"},
    )


class RenamedGroup(Hyperparams):
    own: Renamed = field(default=Renamed(), help="Group.", formerly="group")


def test_a_former_name_is_refused_with_the_new_one() -> None:
    for assignment, words in (
        (
            "group.speed=2",
            r"group\.speed: expected own\.rate; received its former name",
        ),
        ("own.speed=2", r"own\.speed: expected own\.rate"),
        ("own.when=at_once", r"own\.when: expected own\.waits=False"),
        ("group=None", "group: expected own"),
    ):
        with pytest.raises(HyperparameterError, match=f"^{words}"):
            override(RenamedGroup(), [assignment])
    with pytest.raises(HyperparameterError, match=r"^when: expected waits=False"):
        Renamed(when="at_once")
    with pytest.raises(HyperparameterError, match=r"^speed: expected rate"):
        Renamed().replace(speed=2.0)
    with pytest.raises(TypeError, match=r"Below\.speed: expected rate"):
        type("Below", (Renamed,), {"speed": 2.0, "__annotations__": {"speed": float}})


def test_a_text_of_before_is_read() -> None:
    text = "group.speed = 2.5\ngroup.when = 'at_once'\n"
    read = from_text(text, RenamedGroup)
    assert read == RenamedGroup(own=Renamed(rate=2.5, waits=False))
    assert from_text("own.when = 'later'\n", RenamedGroup).own.waits
    with pytest.raises(HyperparameterError, match=r"own\.fast: "):
        from_text("group.fast = 1\n", RenamedGroup)


def test_a_class_may_take_a_former_name_for_something_new() -> None:
    class Taken(Renamed):
        speed: int = field(default=3, help="Another thing.")

    assert override(Taken(), ["speed=4"]).speed == 4
    assert from_text("speed = 5\n", Taken).speed == 5
