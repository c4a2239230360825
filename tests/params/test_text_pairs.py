"""Pairs of texts, made or in files: pure, never shared by splits, told by hand."""

from __future__ import annotations

import ast
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.sentences import SENTENCES
from tests.helpers.subprocesses import python
from tfgpipe_params.translate import text_pairs
from tfgpipe_params.translate.synthetic import (
    DATE_FORMATS,
    Dates,
    Reversals,
    write_date,
)
from tfgpipe_params.translate.text_pairs import Pair, PairFiles, SyntheticPairs
from tfgpipe_trainer.hyperparams import HyperparameterError

pytestmark = pytest.mark.pure

TASKS: dict[str, Callable[..., SyntheticPairs]] = {
    "reversals": Reversals,
    "dates": Dates,
}

task = pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)


@task
def test_a_pair_depends_on_seed_and_index_alone(
    make: Callable[..., SyntheticPairs],
) -> None:
    forwards = [make(seed=3).pair(i) for i in range(20)]
    backwards = [make(seed=3, num_pairs=7).pair(i) for i in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) > 18
    assert forwards != [make(seed=4).pair(i) for i in range(20)]


@task
def test_no_target_is_in_both_splits(make: Callable[..., SyntheticPairs]) -> None:
    pairs = make(num_pairs=3000)
    train, validation = pairs.read("train"), pairs.read("validation")
    assert len(train) + len(validation) == 3000
    assert 0.07 < len(validation) / 3000 < 0.13
    assert not {p.target for p in train} & {p.target for p in validation}


@task
def test_lengths_are_the_longest_there_are(make: Callable[..., SyntheticPairs]) -> None:
    pairs = make(num_pairs=4000)
    every = pairs.read("train") + pairs.read("validation")
    assert max(len(pair.source) for pair in every) == pairs.source_length
    assert max(len(pair.target) for pair in every) == pairs.target_length


def test_strings_are_reversed_and_of_all_lengths() -> None:
    pairs = Reversals(shortest=2, longest=5)
    drawn = [pairs.pair(i) for i in range(100)]
    assert all(pair.target == pair.source[::-1] for pair in drawn)
    assert {len(pair.source) for pair in drawn} == {2, 3, 4, 5}
    assert all(pair.source.isalnum() and pair.source.islower() for pair in drawn[:1])


@settings(max_examples=60, deadline=None)
@given(st.dates(datetime.date(1970, 1, 1), datetime.date(2069, 12, 31)))
def test_no_two_dates_are_written_alike_in_any_two_formats(date: datetime.date) -> None:
    written = [write_date(date, form) for form in DATE_FORMATS]
    for other in (
        date.replace(day=date.month, month=min(date.day, 12)),
        date.replace(
            year=date.year - 50 if date.year > 2019 else date.year + 50, day=1
        ),
    ):
        if other != date:
            assert not set(written) & {write_date(other, form) for form in DATE_FORMATS}


def test_every_format_as_written_by_hand() -> None:
    date = datetime.date(2001, 11, 3)
    assert [write_date(date, form) for form in DATE_FORMATS] == [
        "3 November 2001",
        "November 3, 2001",
        "Saturday, 3 November 2001",
        "Saturday, November 3rd, 2001",
        "the 3rd of November 2001",
        "3 Nov 2001",
        "03-Nov-2001",
        "Nov 3 '01",
        "3.11.2001",
        "03.11.01",
        "11/3/2001",
        "11/03/01",
        "20011103",
    ]


@pytest.mark.parametrize(
    ("day", "written"),
    [(1, "1st"), (2, "2nd"), (11, "11th"), (13, "13th"), (22, "22nd"), (31, "31st")],
)
def test_ordinal_numbers(day: int, written: str) -> None:
    date = datetime.date(2000, 1, day)
    assert f"the {written} of" in write_date(date, DATE_FORMATS[4])


def test_targets_are_iso_dates_of_the_years_asked_for() -> None:
    pairs = Dates(first_year=1999, last_year=2000)
    drawn = [pairs.pair(i) for i in range(200)]
    years = {datetime.date.fromisoformat(pair.target).year for pair in drawn}
    assert years == {1999, 2000}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Dates(last_year=2070),
            "last_year: expected first_year=1970 or up to 99 years later, at most "
            "9999; received 2070.",
        ),
        (
            lambda: Reversals(longest=3),
            "longest: expected at least shortest=4; received 3.",
        ),
    ],
)
def test_ranges_that_are_none_are_refused(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(HyperparameterError) as error:
        make()
    assert str(error.value) == message


# Characters.


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12))
def test_characters_come_back(text: str) -> None:
    (numbers,) = text_pairs.encode_texts([text], length=12)
    assert text_pairs.decode_text(numbers) == text
    assert numbers.max() < text_pairs.ASCII.size
    assert (numbers > text_pairs.END).sum() == len(text)


def test_what_is_no_character_shows() -> None:
    assert text_pairs.decode_text(np.array([68, text_pairs.START, 69])) == "a\ufffdb"


@pytest.mark.parametrize("text", ["abcd", "\n", "é"])
def test_texts_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="at most 3 printable characters") as error:
        text_pairs.encode_texts(["a", text], length=3)
    assert str(error.value).endswith(f"received {text!r}.")


# In files.


def test_pairs_are_read_from_files_and_each_is_in_one_split(tmp_path: Path) -> None:
    lines = [f"{i}\t{i * i}" for i in range(200)]
    (tmp_path / "a.tsv").write_text("\n".join(lines[:120]) + "\n")
    (tmp_path / "b.tsv").write_text("\r\n".join(lines[120:]))
    pairs = PairFiles(files=str(tmp_path / "*.tsv"))
    train, validation = (pairs.read(split) for split in ("train", "validation"))
    assert {(p.source, p.target) for p in (*train, *validation)} == {
        tuple(line.split("\t")) for line in lines
    }
    assert len(train) + len(validation) == 200
    assert 5 < len(validation) < 40


def test_lines_that_are_no_pairs_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs"
    path.write_bytes(b"a\tb\nnothing\n\xe4\tb\nabcde\tb\nc\td\n")
    pairs = PairFiles(files=str(path), longest_source=4, max_bad_records=3)
    assert list(pairs.all()) == [Pair("a", "b"), Pair("c", "d")]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"Bad record, not used: {path} line 2: expected SOURCE, a tab, TARGET; "
        "received 'nothing'.",
        f"Bad record, not used: {path} line 3: expected UTF-8; received 'utf-8' codec "
        "can't decode byte 0xe4 in position 0: invalid continuation byte.",
        f"Bad record, not used: {path} line 4: Expected at most 4 bytes of UTF-8, "
        "none of them a control character; received 'abcde'.",
    ]
    with pytest.raises(HyperparameterError, match=r"^data\.max_bad_records: expected"):
        list(PairFiles(files=str(path), longest_source=4, max_bad_records=2).all())


def test_sentences_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    text = "".join(f"{pair.source}\t{pair.target}\n" for pair in SENTENCES)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode("utf-8"))
    code = (
        "import sys; from tfgpipe_params.translate.text_pairs import PairFiles\n"
        f"pairs = list(PairFiles(files={str(path)!r}).all())\n"
        "print(ascii([(p.source, p.target) for p in pairs]))"
    )
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    run = python("-X", "utf8=0", "-c", code, **locale)
    assert run.stderr == ""
    assert ast.literal_eval(run.stdout) == [(p.source, p.target) for p in SENTENCES]


def test_files_are_read_once_for_both_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{i}\t{i}\n" for i in range(50)) + "nothing\n")
    pairs = PairFiles(files=str(path))
    assert len(pairs.read("train")) + len(pairs.read("validation")) == 50
    assert capsys.readouterr().err.count("Bad record, not used") == 1


def test_files_that_are_not_there_are_refused() -> None:
    with pytest.raises(
        HyperparameterError, match=r"^data\.files: .* received '', which matches none\."
    ):
        PairFiles().read("train")


@pytest.mark.parametrize("line", ["x" * 100_000, f"{'x' * 100_000}\ty"])
def test_a_long_line_that_is_no_pair_is_shown_in_part(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.tsv").write_text(f"{line}\na\tb\n")
    pairs = PairFiles(files=str(tmp_path / "pairs.tsv"))
    assert pairs.all() == [Pair("a", "b")]
    said = capsys.readouterr().err
    assert "and 99,9" in said
    assert len(said) < 1000
