"""lm-evaluation-harness: its numbers are those of the model, computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.helpers import runs
from tfgpipe_params import lm
from tfgpipe_params.lm.harness import Harness
from tfgpipe_trainer.hyperparams import override
from tfgpipe_trainer.main import main

CHOICE = """\
task: squares
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{number}}}} squared is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
"""
ROLLING = """\
task: texts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""
GENERATED = """\
task: said
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{number}}}} squared"
doc_to_target: "{{{{said}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 4
metric_list:
  - metric: exact_match
"""
DOCS = [
    {
        "number": n,
        "choices": [str(n * n), str(n * n + 1), "x"],
        "label": n % 3,
        "text": f"{n} squared is {n * n}, and no more.\n",
        "said": "",
    }
    for n in range(6)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, text in (("c", CHOICE), ("r", ROLLING), ("g", GENERATED)):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=data))
    return tmp_path


def _experiment(folder: Path, *more: str) -> lm.Tiny:
    flags = runs.text_flags(folder / "corpus.txt")[1:]
    settings = [each.removeprefix("--set=") for each in flags]
    return override(lm.Tiny(), [*settings, *more])


def _log_odds(model: keras.Model, text: list[int], length: int) -> list[float]:
    """Of each byte but the first, by what stands before it in windows of a length."""
    found = []
    for i in range(1, len(text)):
        before = text[max(0, i - length) : i]
        window = np.zeros([1, length], np.int32)
        window[0, : len(before)] = before
        row = np.float64(model.predict_on_batch(window)[0, len(before) - 1])
        found.append(float(row[text[i]] - np.log(np.exp(row).sum())))
    return found


def test_choices_are_those_that_the_model_finds_likeliest(folder: Path) -> None:
    own = _experiment(folder, "model.context=32")
    model = own.build_model()
    harness = Harness(own, ["squares"], include_path=str(folder))
    right = 0
    for doc in DOCS:
        asked = f"{doc['number']} squared is".encode()
        sums = []
        for choice in doc["choices"]:
            text = [*asked, *f" {choice}".encode()]
            odds = _log_odds(model, text, 32)
            sums.append(sum(odds[len(asked) - 1 :]))
        right += int(np.argmax(sums) == doc["label"])
    assert harness.evaluate(model) == {"squares_acc": pytest.approx(right / len(DOCS))}


@pytest.mark.parametrize("more", [(), ("data.documents=packed",)])
def test_texts_longer_than_a_window_are_scored_whole(
    folder: Path, more: tuple[str, ...]
) -> None:
    own = _experiment(folder, "model.context=16", *more)
    model = own.build_model()
    found = Harness(own, ["texts"], include_path=str(folder)).evaluate(model)
    start, nats, size = [0] * bool(more), 0.0, 0
    room = 16 - len(start)
    for doc in DOCS:
        text = [10, *doc["text"].encode()]
        size += len(text) - 1
        for first in range(0, len(text) - 1, room):
            part = text[first : first + room + 1]
            if len(part) <= room and first:  # The last window is filled up.
                whole = text[-room - 1 :]
                odds = _log_odds(model, [*start, *whole], 16)[-len(part) + 1 :]
            else:
                odds = _log_odds(model, [*start, *part], 16)[len(start) :]
            nats -= sum(odds)
    assert found == {"texts_bits_per_byte": pytest.approx(nats / size / math.log(2))}


def test_a_run_logs_what_the_harness_finds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluators(self: lm.Tiny) -> dict[str, Harness]:
        tasks = ["squares", "said"]
        return {"own": Harness(self, tasks, every_steps=4, include_path=str(folder))}

    monkeypatch.setattr(lm.Tiny, "evaluators", evaluators)
    flags = runs.text_flags(folder / "corpus.txt")
    assert main(["trainer", *flags, f"--logdir={folder / 'run'}"]) == 0
    found = {
        record["step"]: (record["own_squares_acc"], record["own_said_exact_match"])
        for record in runs.records(folder / "run")
        if "own_squares_acc" in record
    }
    assert [*found] == [4, 8]
    assert all(0 <= x <= 1 for pair in found.values() for x in pair)
