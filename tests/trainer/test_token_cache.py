"""Ids in files: encoded once, and never those of another text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tfgpipe_params.lm import token_cache
from tfgpipe_trainer.hyperparams import HyperparameterError

pytestmark = pytest.mark.pure

IDS = np.dtype("<u2")


class _Encoder:
    """Doubles each byte, and counts how often it was asked."""

    calls = 0

    def __call__(self, parts: Iterable[bytes]) -> Iterator[np.ndarray]:
        self.calls += 1
        for part in parts:
            yield 2 * np.frombuffer(part, np.uint8).astype(IDS)


@pytest.fixture
def encoder() -> _Encoder:
    return _Encoder()


@pytest.fixture
def encoded(tmp_path: Path, encoder: _Encoder) -> Callable[..., list[int]]:
    def call(*parts: bytes, version: str = "1") -> list[int]:
        return token_cache.encoded(
            tmp_path / "tokens",
            read=lambda: parts,
            encode=encoder,
            version=version,
            dtype=IDS,
        ).tolist()

    return call


def test_a_text_is_encoded_once(encoder: _Encoder, encoded, capsys) -> None:
    assert encoded(b"ab", b"\xff") == [194, 196, 510]
    assert "The text has 3 tokens, 3 bytes." in capsys.readouterr().out
    assert encoded(b"ab", b"\xff") == [194, 196, 510]
    assert encoder.calls == 1
    assert capsys.readouterr().out == ""


def test_another_text_or_version_is_encoded_anew(encoder: _Encoder, encoded) -> None:
    encoded(b"ab")
    assert encoded(b"ac") == [194, 198]
    assert encoded(b"a", b"b") == [194, 196]
    assert encoded(b"ab", version="2") == [194, 196]
    assert encoder.calls == 4


def test_a_text_without_tokens_is_none(encoder: _Encoder, encoded) -> None:
    assert encoded() == encoded() == []
    assert encoder.calls == 1


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "renamed"])
def test_a_damaged_file_is_encoded_anew(
    damage: str, tmp_path: Path, encoder: _Encoder, encoded, capsys
) -> None:
    encoded(b"ab")
    (path,) = (tmp_path / "tokens").iterdir()
    content = path.read_bytes()
    if damage == "renamed":  # Whole, but of another text.
        encoded(b"cd")
        (other,) = set((tmp_path / "tokens").iterdir()) - {path}
        other.replace(path)
    else:
        flipped = bytes([content[0] ^ 1]) + content[1:]
        path.write_bytes(
            {"cut": content[:-2], "changed": flipped, "empty": b""}[damage]
        )
    calls = encoder.calls
    assert encoded(b"ab") == [194, 196]
    assert encoder.calls == calls + 1
    assert f"{path} is damaged." in capsys.readouterr().out
    assert path.read_bytes() == content


def test_a_text_that_changes_meanwhile_is_kept_under_its_own_name(
    tmp_path: Path, encoder: _Encoder, encoded
) -> None:
    texts = iter([[b"old"], [b"new"]])
    ids = token_cache.encoded(
        tmp_path / "tokens",
        read=lambda: next(texts),
        encode=encoder,
        version="1",
        dtype=IDS,
    )
    assert bytes((ids // 2).astype(np.uint8)) == b"new"
    assert encoded(b"new") == ids.tolist()
    assert encoder.calls == 1
    assert encoded(b"old") == [2 * byte for byte in b"old"]
    assert encoder.calls == 2


def test_what_fails_leaves_no_file(tmp_path: Path) -> None:
    def fails(parts: Iterable[bytes]) -> Iterator[np.ndarray]:
        yield np.zeros(3, IDS)
        raise HyperparameterError("data.files: wrong")

    with pytest.raises(HyperparameterError, match="wrong"):
        token_cache.encoded(
            tmp_path / "tokens",
            read=lambda: [b"a"],
            encode=fails,
            version="1",
            dtype=IDS,
        )
    assert not list((tmp_path / "tokens").iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, encoded) -> None:
    (tmp_path / "tokens").write_text("a file")
    with pytest.raises(HyperparameterError) as error:
        encoded(b"ab")
    assert str(error.value) == (
        "data.tokenizer: expected a file in a folder that can be written to, where the "
        f"tokens of the text are kept; {tmp_path}/tokens cannot: File exists. Copy the "
        "tokenizer to another folder."
    )
