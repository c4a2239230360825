"""Every command of the page on training runs, with few steps and files made here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tests.helpers import image_files, presets, s3
from tests.helpers.subprocesses import ROOT
from tfgpipe_trainer.main import main

pytestmark = pytest.mark.nightly

PAGE = ROOT / "docs" / "how-to" / "training.md"
SHORT = [
    *("--set=training.num_steps=2", "--set=training.batch_size=8"),
    "--set=evaluation.max_batches=1",
]
TEXT = [
    *("--set=model.context=8", "--set=sampling.num_bytes=2"),
    "--set=pipelining.num_microbatches=2",
]


def _commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


def test_every_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    text = "".join(f"{i} squared is {i * i}.\n\n" for i in range(3000))
    (tmp_path / "TEXTS" / "in").mkdir(parents=True)
    (tmp_path / "TEXTS" / "in" / "a.txt").write_text(text)
    for number in range(40):
        folder = tmp_path / "PICTURES" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(image_files.png(number))
    presets.write(tmp_path / "PRESET")
    commands = _commands()
    assert len(commands) >= 13
    with s3.served() as port:
        for name, value in s3.variables(port).items():
            monkeypatch.setenv(name, value)
        files: Any = s3fs.S3FileSystem(use_listings_cache=False)
        files.mkdir("bucket")
        files.put_file("TEXTS/in/a.txt", "bucket/text/a.txt")
        for command in commands:
            _check(command, tmp_path, capsys)
        assert files.exists("bucket/tiny/metrics.jsonl")


def _check(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *given = command
    if program == "python":
        assert given[:2] == ["-m", "trainer"]
        given = given[2:]
    else:
        assert program == "tfgpipe-train"
    target = given[-1] if ">" in given else None
    if target is not None:
        given = given[: given.index(">")]
    given = [each.replace("s3://BUCKET", "s3://bucket") for each in given]
    more = [] if "--mode=template" in given else [*SHORT]
    if "--params=mine.Mine" not in given and more:
        if "--params=image.Digits" not in given:
            more += TEXT
            if not any("data.files" in each for each in given):
                more.append("--set=data.files=TEXTS/**/*.txt")
        if not any("logdir" in each for each in given):
            more.append(f"--logdir=runs/{len(list(folder.glob('runs/*')))}")
    if "--mode=tokenizer" in given:
        more = ["--set=data.files=TEXTS/**/*.txt"]
    capsys.readouterr()
    status = main(["trainer", *given, *more])
    told = capsys.readouterr()
    assert status == 0, (command, told.err[-2000:])
    if target is not None:
        (folder / target).write_text(told.out)
