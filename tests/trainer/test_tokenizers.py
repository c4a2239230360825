"""Tokenizers of files: as their packages have it, and every text comes back."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers as hugging_face
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import tokenizer_files
from tests.helpers.subprocesses import ROOT
from tfgpipe_params.lm import tokenizer_training, tokenizers
from tfgpipe_params.lm.tokenizers import FileTokenizer
from tfgpipe_trainer.hyperparams import HyperparameterError

pytestmark = pytest.mark.pure

SUFFIXES = [".json", ".model"]
ASCII = "def square_7(x):\n\treturn   8 * x \n\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {suffix: tokenizer_files.write(folder, suffix) for suffix in SUFFIXES}


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(
    text=st.one_of(
        st.binary(),
        st.text().map(str.encode),
        st.lists(st.sampled_from(["def ", "  ", "\n", "\u2581", "é", "<s>", "\0"])).map(
            lambda parts: "".join(parts).encode()
        ),
    )
)
def test_every_text_comes_back(suffix: str, text: bytes, files: dict[str, str]) -> None:
    tokenizer = tokenizers.load(files[suffix])
    ids, empty, again = tokenizer.encode([text, b"", text])
    assert tokenizer.decode(ids.tolist()) == text
    assert np.array_equal(ids, again)
    assert not len(empty)
    assert (ids < tokenizer.vocabulary_size).all()


def test_ids_are_those_of_the_packages(files: dict[str, str]) -> None:
    theirs = {
        ".json": hugging_face.Tokenizer.from_file(files[".json"]).encode(ASCII).ids,
        ".model": sentencepiece.SentencePieceProcessor(
            model_file=files[".model"]
        ).encode(ASCII),
    }
    for suffix, expected in theirs.items():
        tokenizer = tokenizers.load(files[suffix])
        (ids,) = tokenizer.encode([ASCII.encode()])
        assert ids.tolist() == expected
        assert ids.dtype == tokenizer.dtype == np.uint16
        assert tokenizer.start == tokenizer.vocabulary_size
        assert len(ids) < 0.6 * len(ASCII)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_bytes_that_are_no_utf8_leave_the_tokens_around_them(
    suffix: str, files: dict[str, str]
) -> None:
    tokenizer = tokenizers.load(files[suffix])
    word, whole, byte = tokenizer.encode([b"return", b"return\xffreturn", b"\xff"])
    assert whole.tolist() == [*word, *byte, *word]
    assert len(byte) == 1


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_text_has_the_same_file(suffix: str, tmp_path: Path, files) -> None:
    again = tokenizer_files.write(tmp_path, suffix)
    assert Path(again).read_bytes() == Path(files[suffix]).read_bytes()


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(HyperparameterError) as error:
        tokenizer_training.train(
            [tokenizer_files.TEXT], name="a.model", vocabulary_size=257
        )
    assert str(error.value).startswith(
        "data.vocabulary_size: expected a number of tokens that the text has; received "
        "257: Vocabulary size is smaller than required_chars."
    )


# Files of others.


def _parsed(tokenizer: hugging_face.Tokenizer) -> FileTokenizer:
    return tokenizers.parse(tokenizer.to_str().encode(), name="others.json")


def test_tokens_of_bytes_are_found_as_llama_has_them() -> None:
    vocabulary = {f"<0x{b:02X}>": b for b in range(256)} | {"a": 256, "b": 257}
    others = hugging_face.Tokenizer(
        hugging_face.models.BPE(vocabulary, [], byte_fallback=True)
    )
    others.decoder = hugging_face.decoders.Sequence(
        [hugging_face.decoders.ByteFallback(), hugging_face.decoders.Fuse()]
    )
    tokenizer = _parsed(others)
    (ids,) = tokenizer.encode(["aéb".encode() + b"\xff"])
    assert ids.tolist() == [256, 0xC3, 0xA9, 257, 0xFF]
    assert tokenizer.decode(ids[:-1].tolist()) == "aéb".encode()


def test_neither_padding_nor_special_tokens_are_added() -> None:
    others = hugging_face.Tokenizer(
        hugging_face.models.WordLevel({"[CLS]": 0, "a": 1, "[PAD]": 9}, "[CLS]")
    )
    others.pre_tokenizer = hugging_face.pre_tokenizers.Whitespace()
    others.post_processor = hugging_face.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 0)]
    )
    others.enable_padding(length=8)
    others.enable_truncation(2)
    tokenizer = _parsed(others)
    assert [each.tolist() for each in tokenizer.encode([b"a a a", b"a"])] == [
        [1, 1, 1],
        [1],
    ]
    assert tokenizer.vocabulary_size == 10  # Ids need not be without gaps.
    with pytest.raises(HyperparameterError) as error:
        tokenizer.encode([b"a\xe9"])
    assert str(error.value) == (
        "data.files: expected text in UTF-8, as others.json has no tokens for single "
        "bytes; received the byte 0xe9. Leave the file out, or take a tokenizer with "
        "byte fallback."
    )


def test_random_ids_are_refused() -> None:
    others = hugging_face.Tokenizer(hugging_face.models.BPE({"a": 0}, [], dropout=0.1))
    with pytest.raises(HyperparameterError, match="BPE has dropout"):
        _parsed(others)


def test_a_large_vocabulary_has_ids_of_four_bytes() -> None:
    vocabulary = {str(i): i for i in range(1 << 16)}
    tokenizer = _parsed(
        hugging_face.Tokenizer(hugging_face.models.WordLevel(vocabulary, "0"))
    )
    assert tokenizer.encode([b"65535"])[0].tolist() == [65535]
    assert tokenizer.dtype == np.int32
    assert tokenizer.start == 65536


# What is wrong with a file.


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", ["", "{}", "half"])
def test_a_damaged_file_is_refused(
    suffix: str, content: str, tmp_path: Path, files: dict[str, str]
) -> None:
    whole = Path(files[suffix]).read_bytes()
    path = tmp_path / f"words{suffix}"
    path.write_bytes(
        whole[: len(whole) // 2] if content == "half" else b"" + content.encode()
    )
    with pytest.raises(HyperparameterError) as error:
        tokenizers.load(str(path))
    assert str(error.value).startswith("data.tokenizer: expected a tokenizer of ")
    assert f"received '{path}', which cannot be read: " in str(error.value)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(HyperparameterError) as error:
        tokenizers.load("none.json")
    assert str(error.value) == (
        "data.tokenizer: expected a file that can be read; received 'none.json': No "
        "such file or directory. --mode=tokenizer trains one."
    )


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\n")
    with pytest.raises(HyperparameterError, match=r"ends in \.json, of Hugging Face"):
        tokenizers.load(f"{tmp_path}/vocab.txt")


@pytest.mark.parametrize(
    ("suffix", "requirement"),
    [(".json", "tokenizers>=0.20,<0.24"), (".model", "sentencepiece>=0.2,<0.3")],
)
def test_a_missing_package_is_named_as_setup_py_has_it(
    suffix: str, requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = requirement.partition(">")[0]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HyperparameterError) as error:
        tokenizers.parse(b"not read before", name=f"words{suffix}")
    assert str(error.value) == (
        f"data.tokenizer: expected the package {package}, which 'words{suffix}' needs; "
        f"it is not installed. Try: pip install '{requirement}'"
    )
    setup = ROOT / "setup.py"
    assert setup.read_text("utf-8").count(f'"{requirement}"') == 2


# Long texts.


@given(st.lists(st.integers(1, 40_000), max_size=4), st.booleans())
def test_pieces_are_whole_lines_of_a_text(lengths: list[int], ends: bool) -> None:
    text = b"\n".join(b"x" * n for n in lengths) + b"\n" * ends
    pieces = list(tokenizers.split_lines([text]))
    assert b"".join(pieces) == text
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert all(b"\n" not in piece[tokenizers._LINES : -1] for piece in pieces)


def test_texts_keep_their_order_over_batches(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "_BATCH", 10)
    tokenizer = tokenizers.load(files[".json"])
    texts = [b"def ", b"return", b"", b"x" * 30, b"\xff"]
    encoded = tokenizers.encode_all(tokenizer, texts, lines=False)
    assert [tokenizer.decode(ids.tolist()) for ids in encoded] == texts
