"""The text that language models learn: its files, and the bigram model's view."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tfgpipe_params.lm import task as language_model
from tfgpipe_params.lm.corpus import Corpus
from tfgpipe_trainer.hyperparams import HyperparameterError

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def library() -> dict[str, bytes]:
    """The default text, read once: several megabytes."""
    return {split: Corpus().read(split).tobytes() for split in ("train", "validation")}


def _files(folder: Path, count: int) -> str:
    for i in range(count):
        (folder / f"{i:02}.txt").write_bytes(b"%02d" % i * 5)
    return str(folder / "*.txt")


def test_every_tenth_file_is_for_validation(tmp_path: Path) -> None:
    corpus = Corpus(files=_files(tmp_path, 20))
    assert corpus.read("validation").tobytes() == b"00" * 5 + b"\n" + b"10" * 5
    train = corpus.read("train").tobytes().split(b"\n")
    assert train == [b"%02d" % i * 5 for i in range(20) if i % 10]


def test_a_split_compares_no_file_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class File(type(tmp_path)):  # type: ignore[misc]
        def __eq__(self, other: object) -> bool:
            raise AssertionError("Each with each other is quadratic.")

        __hash__ = None  # type: ignore[assignment]

    (tmp_path / "file").write_bytes(b"x")
    paths = [File(tmp_path / "file") for _ in range(30)]
    monkeypatch.setattr(Corpus, "_paths", lambda _: paths)
    assert len(Corpus().read("validation").tobytes().split(b"\n")) == 3
    assert len(Corpus().read("train").tobytes().split(b"\n")) == 27


def test_a_few_files_are_each_cut(tmp_path: Path) -> None:
    corpus = Corpus(files=_files(tmp_path, 2))
    assert corpus.read("train").tobytes() == b"000000000\n010101010"
    assert corpus.read("validation").tobytes() == b"0\n1"


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HyperparameterError) as error:
        Corpus(files=f"{tmp_path}/*.none").read("train")
    assert str(error.value) == (
        "data.files: expected a glob that matches files, such as 'texts/**/*.txt'; "
        f"received '{tmp_path}/*.none', which matches none."
    )


def test_a_pattern_may_go_down_into_folders_and_skips_them(tmp_path: Path) -> None:
    (tmp_path / "deep.txt").mkdir()
    _files(tmp_path / "deep.txt", 1)
    corpus = Corpus(files=f"{tmp_path}/**/*.txt")
    assert corpus.read("train").tobytes() == b"000000000"


def test_a_file_of_the_kernel_which_may_have_no_end_is_empty() -> None:
    assert not len(Corpus(files="/proc/self/mem").read("train"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    corpus = Corpus(files=_files(tmp_path, 1))
    parts = corpus.parts("train")
    path = tmp_path / "00.txt"
    with mock.patch.object(Corpus, "_paths", return_value=[path]):
        path.unlink()
        with pytest.raises(
            HyperparameterError, match=rf"^data\.files: .* {path}: No s"
        ):
            list(parts)


def test_documents_are_paragraphs_that_keep_their_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\n\none\ntwo\n\n\nthree\n\n four" + b"x" * 9)
    corpus = Corpus(files=f"{tmp_path}/text", documents="packed")
    assert corpus.read_documents("train") == [
        b"\n\n",
        b"one\ntwo\n\n\n",
        b"three\n\n",
        b" four" + b"x" * 5,
    ]
    assert corpus.read_documents("validation") == [b"xxxx"]


def test_documents_are_all_of_the_text(library: dict[str, bytes]) -> None:
    text = library["validation"].replace(b"\n", b"")
    joined = b"".join(Corpus().read_documents("validation"))
    assert joined.replace(b"\n", b"") == text


def test_documents_with_zero_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a\0b" * 10)
    with pytest.raises(HyperparameterError) as error:
        Corpus(files=f"{tmp_path}/text").read_documents("train")
    assert str(error.value) == (
        "data.files: expected text without zero bytes, which start packed documents; "
        "received a file that has some. Leave it out, or try data.documents=joined."
    )


def test_the_default_is_the_standard_library_without_its_tests(
    library: dict[str, bytes],
) -> None:
    train, validation = library["train"], library["validation"]
    assert len(train) > 5e6
    assert 0.05 < len(validation) / len(train) < 0.3
    assert b"\nclass OrderedDict(dict):" in train + validation
    assert b"import pytest" not in train


def test_splits_do_not_overlap_and_do_not_change(library: dict[str, bytes]) -> None:
    assert Corpus().read("validation").tobytes() == library["validation"]
    assert library["validation"][:5000] not in library["train"]


def _table(text: bytes, *, ignored: int | None = None) -> np.ndarray:
    """Returns P(next | previous) of bytes, add-one smoothed, `[256, 256]`."""
    counts = np.ones([256, 256])
    for previous, following in itertools.pairwise(text):
        counts[previous, following] += 1
    if ignored is not None:
        counts[:, ignored] = 0
    return counts / counts.sum(axis=1, keepdims=True)


def _bigram(text: bytes, asked: bytes, **settings: int) -> float:
    tokens, pairs = (np.frombuffer(each, np.uint8) for each in (text, asked))
    return language_model.bigram_cross_entropy(
        tokens, pairs[:-1], pairs[1:], vocabulary_size=256, **settings
    )


def test_the_bigram_cross_entropy_is_that_worked_out_by_hand() -> None:
    # `a` is followed by b, a, b; `b` by a.
    expected = -(math.log(3 / 259) + math.log(1 / 257)) / 2
    assert _bigram(b"abaab", b"abb") == pytest.approx(expected)


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("ignored", [None, 3])
def test_the_bigram_model_is_that_of_the_whole_table(
    block: int, ignored: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "_BLOCK", block)
    random = np.random.default_rng(0)
    text, asked = (random.integers(0, 5, 300).astype(np.uint8) for _ in range(2))
    table = _table(text.tobytes(), ignored=ignored)
    pairs = asked.reshape(2, -1, 3)
    previous, following = pairs
    if ignored is not None:
        counted = following != ignored
        previous, following = previous[counted], following[counted]
    received = language_model.bigram_cross_entropy(
        text, previous, following, vocabulary_size=256, ignored=ignored
    )
    assert received == pytest.approx(-np.log(table[previous, following]).mean())


def test_the_bigram_model_of_a_large_vocabulary_needs_no_table_of_it() -> None:
    # A table of 2 ** 17 squared counts would be of 128 GiB.
    text = np.array([100_000, 7, 100_000, 7, 131_071], np.int32)
    received = language_model.bigram_cross_entropy(
        text, text[:1], text[1:2], vocabulary_size=1 << 17
    )
    assert received == pytest.approx(-math.log(3 / (2 + (1 << 17))))
