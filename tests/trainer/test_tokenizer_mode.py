"""--mode=tokenizer, tokens of a corpus, and runs whose tokenizer has changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import tokenizer_files
from tests.helpers.tokenizer_files import TEXT
from tfgpipe_params.lm import tokenizer_training, tokenizers
from tfgpipe_params.lm.corpus import Corpus
from tfgpipe_trainer import run_dir
from tfgpipe_trainer.experiment import find
from tfgpipe_trainer.hyperparams import HyperparameterError, override
from tfgpipe_trainer.main import main

pytestmark = pytest.mark.pure

SUFFIXES = [".json", ".model"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(TEXT + b"invalid: \xff\xfe\n" * 40)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_mode_writes_a_file_of_the_training_split(
    suffix: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"words{suffix}"
    flags = ["--params=lm.Tiny", f"--set=data.files={text}"]
    flags.append(f"--set=data.tokenizer={path}")
    command = ["trainer", "--mode=tokenizer", *flags, "--set=data.vocabulary_size=400"]
    assert main(command) == 0
    corpus = Corpus(files=str(text))
    content = tokenizer_training.train(
        [corpus.read("train").tobytes()], name=str(path), vocabulary_size=400
    )
    assert path.read_bytes() == content
    tokenizer = tokenizers.load(str(path))
    validation = corpus.read("validation").tobytes()
    (ids,) = tokenizer.encode([validation])
    assert capsys.readouterr().out == (
        f"{path} has {tokenizer.vocabulary_size} tokens, of "
        f"{len(validation) / len(ids):.2f} bytes each on the validation split.\n"
        f"Train with it:\n  python -m trainer {' '.join(flags)} --logdir=runs/tokens\n"
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == ["text", path.name]
    # A file that is there may be that of a run.
    assert main(command) == 2
    assert "expected a file that is not there" in capsys.readouterr().err
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("params", "tokenizer", "words"),
    [
        ("lm.Tiny", "None", "data.tokenizer: expected the file to write, such as"),
        ("lm.Tiny", "/none/a.json", "data.tokenizer: expected a file in a folder that"),
        ("lm.Tiny", "a.txt", "data.tokenizer: expected a file that ends in .json"),
        ("image.Digits", "", "Expected a language model for --mode=tokenizer, such as"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    params: str, tokenizer: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"--set=data.tokenizer={tokenizer}"] if tokenizer else []
    command = ["trainer", "--mode=tokenizer", f"--params={params}", *settings]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith(words)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tokens_of_a_corpus_are_its_text(
    suffix: str, text: Path, tmp_path: Path
) -> None:
    name = tokenizer_files.write(tmp_path, suffix)
    tokenizer = tokenizers.load(name)
    settings = {"files": str(text), "tokenizer": name}
    for split in ("train", "validation"):
        expected = Corpus(files=str(text)).read(split).tobytes()
        ids = Corpus(**settings).read_tokens(split, window=9)
        assert tokenizer.decode(ids.tolist()) == expected
        packed = Corpus(**settings, documents="packed").read_tokens(split, window=9)
        windows = packed.reshape(-1, 9)
        assert (windows[:, 0] == tokenizer.start).all()
        pieces = np.split(packed, np.flatnonzero(packed == tokenizer.start))
        texts = [tokenizer.decode(piece[1:].tolist()) for piece in pieces]
        assert sum(map(len, texts)) == len(expected)
        assert sorted(b"".join(texts)) == sorted(expected)


def test_a_size_that_is_not_that_of_the_file_is_refused(tmp_path: Path) -> None:
    name = tokenizer_files.write(tmp_path, ".json")
    Corpus(tokenizer=name, vocabulary_size=400).load_tokenizer()
    with pytest.raises(HyperparameterError) as error:
        Corpus(tokenizer=name, vocabulary_size=500).load_tokenizer()
    assert str(error.value) == (
        f"data.vocabulary_size: expected None or 400, the tokens of {name}; received "
        "500, which only --mode=tokenizer asks for."
    )


def test_a_run_refuses_another_file_in_place_of_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = tokenizer_files.write(tmp_path, ".json")
    folder = tmp_path / "run"
    folder.mkdir()
    experiment = override(find("lm.Tiny")(), [f"data.tokenizer={name}"])
    run_dir.write_params(folder, name="lm.Tiny", experiment=experiment)
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    run_dir.check(folder, name="lm.Tiny", experiment=experiment)
    run_dir.check_files(folder, experiment)
    with Path(name).open("a") as file:
        file.write("\n")
    flags = ["trainer", f"--logdir={folder}"]
    train = ["--params=lm.Tiny", f"--set=data.tokenizer={name}"]
    for others, what in ((train, "hyperparameters"), (["--mode=eval"], "files")):
        assert main([*flags, *others]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"{folder} holds a run of other {what} (its -> yours):")
        assert "\nsha256 of data.tokenizer: " in error
    # Asked for, the change is kept.
    run_dir.write_params(folder, name="lm.Tiny", experiment=experiment)
    run_dir.check_files(folder, experiment)
    assert "sha256 of data.tokenizer: " in (folder / "changes.txt").read_text()
