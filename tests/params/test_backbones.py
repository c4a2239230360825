"""Language models around backbones of keras-hub: exact, with LoRA, from presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest

from tests.helpers import presets, runs
from tfgpipe_params import lm
from tfgpipe_trainer.checkpoint import variable_names
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.hyperparams import HyperparameterError, override
from tfgpipe_trainer.main import main

SIZES = {
    "LlamaBackbone": "num_layers=2,hidden_dim=16,intermediate_dim=24,num_query_heads=4,"
    "num_key_value_heads=2",
    "GPT2Backbone": "num_layers=2,num_heads=2,hidden_dim=16,intermediate_dim=24,"
    "max_sequence_length=32,dropout=0.0",
    "MixtralBackbone": "num_layers=2,hidden_dim=16,intermediate_dim=24,"
    "num_query_heads=4,num_key_value_heads=2,num_experts=4,top_k=2,"
    "sliding_window=8",
}


def experiment(folder: Path, *settings: str, name: str = "LlamaBackbone") -> Experiment:
    (folder / "text").write_bytes(
        b"".join(b"%d is %d\n" % (i, i * i) for i in range(500))
    )
    return override(
        lm.Llama(),
        [
            *(f"data.files={folder / 'text'}", "model.context=16"),
            *(f"model.backbone={name}", f"model.arguments={SIZES.get(name, '()')}"),
            *("training.batch_size=4", "pipelining.num_microbatches=2"),
            *("optimizer.global_clipnorm=None", "optimizer.name=sgd", *settings),
        ],
    )


@pytest.mark.parametrize("name", SIZES)
def test_it_trains_as_the_plain_model_of_keras_hub(name: str, tmp_path: Path) -> None:
    own = experiment(tmp_path, name=name)
    model = own.build_model()
    kind = getattr(keras_hub.models, name.replace("Backbone", "CausalLM"))
    sizes = dict(each.split("=") for each in SIZES[name].split(","))
    numbers = {key: float(x) if "." in x else int(x) for key, x in sizes.items()}
    backbone = getattr(keras_hub.models, name)(vocabulary_size=256, **numbers)
    plain = kind(backbone=backbone, preprocessor=None)
    pairs = zip(model.unpipelined().weights, backbone.weights, strict=True)
    for ours, theirs in pairs:
        assert ours.path.split("/")[-1] == theirs.path.split("/")[-1]
        theirs.assign(ours)
    optimizer = own.optimizer.build(own.training.num_steps)
    plain.compile(
        optimizer=optimizer, loss=own.loss(), sampler="greedy", weighted_metrics=[]
    )
    x, y = next(iter(own.batches("train")))
    for _ in range(3):
        losses = model.train_on_batch(x, y), plain.train_on_batch(x, y)
        np.testing.assert_allclose(*losses, rtol=2e-5)
    pairs = zip(model.unpipelined().weights, backbone.weights, strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-3, atol=2e-6)


def test_lora_trains_what_it_adds_alone(tmp_path: Path) -> None:
    own = experiment(tmp_path, "model.lora_rank=2", "optimizer.learning_rate=0.5")
    model = own.build_model()
    model.optimizer.build(model.trainable_variables)
    named = variable_names.weights(model)
    before = {name: np.array(v) for name, v in named.items()}
    x, y = next(iter(own.batches("train")))
    for _ in range(3):
        model.train_on_batch(x, y)
    moved = {n for n, v in named.items() if (np.array(v) != before[n]).any()}
    assert moved
    assert all("lora_kernel" in name for name in moved)
    assert len(moved) == len(model.trainable_variables)


def test_a_preset_brings_its_weights(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}
    heads = {"num_query_heads": 4, "num_key_value_heads": 2}
    saved = keras_hub.models.LlamaBackbone(vocabulary_size=300, **sizes, **heads)
    saved.save_to_preset(str(tmp_path / "preset"))
    own = override(
        experiment(tmp_path),
        [f"model.backbone={tmp_path / 'preset'}", "model.arguments=()"],
    )
    network = own.network()
    for ours, theirs in zip(network.weights, saved.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_a_run_of_it_goes_on_and_draws_text(tmp_path: Path) -> None:
    text = runs.text_flags(tmp_path / "text")
    ours = ("data", "training", "checkpoint", "evaluation", "sampling")
    flags = [x for x in text if x.removeprefix("--set=").startswith(ours)]
    sizes = SIZES["LlamaBackbone"]
    flags += [f"--set=model.arguments={sizes}", "--set=model.context=8"]
    command = ["trainer", "--params=lm.Llama", *flags]
    assert main([*command, f"--logdir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "decode" / "sample.txt").read_text().startswith("def ")
    for step in (6, 8):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08}").rename(
            tmp_path / f"step-{step}"
        )
    expected = runs.timeless(tmp_path / "run")
    assert main([*command, f"--logdir={tmp_path / 'run'}"]) == 0
    assert runs.timeless(tmp_path / "run") == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.backbone=Llama"], "model.backbone: expected one of .*LlamaBackbone"),
        (["model.backbone=/none"], "folder of a preset, without model.arguments"),
        (["model.backbone=ResNetBackbone", "model.arguments=()"], "model.arguments: "),
        (
            ["model.arguments=num_layer=2"],
            "expected those of .*LlamaBackbone; received",
        ),
        (["model.arguments=two"], "model.arguments: expected NAME=VALUE"),
    ],
)
def test_what_is_no_backbone_is_refused(
    settings: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(HyperparameterError, match=words):
        override(experiment(tmp_path), settings).network()


def test_the_network_is_causal(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    network = experiment(tmp_path).network()
    x = np.arange(16, dtype=np.int32)[None]
    mask = np.ones_like(x)
    one = network.predict({"token_ids": x, "padding_mask": mask}, verbose=0)
    x[0, 9:] = 3
    other = network.predict({"token_ids": x, "padding_mask": mask}, verbose=0)
    np.testing.assert_allclose(one[0, :9], other[0, :9], atol=1e-6)
    assert np.abs(one[0, 9:] - other[0, 9:]).max() > 1e-3


def test_a_preset_brings_its_tokenizer(tmp_path: Path, capsys) -> None:
    preset = presets.write(tmp_path / "preset")
    flags = [f"--set=model.backbone={preset}", "--set=model.arguments=()"]
    own = experiment(tmp_path, f"model.backbone={preset}", "model.arguments=()")
    tokenizer = own.corpus.load_tokenizer()
    text = b"7 is 49 \xc3\xa9\n"
    (ids,) = tokenizer.encode([text])
    digits = [ord(c) - 33 for c in "749"]
    expected = [digits[0], 257, 220, *digits[1:], 220, 127, 102, 198]
    assert ids.tolist() == expected
    assert tokenizer.decode(ids) == text
    assert own.unit == "token"
    assert own.network().output.shape[-1] == 259
    with pytest.raises(HyperparameterError, match="no tokens for single bytes"):
        tokenizer.encode([b"\xff"])
    common = [
        *("--params=lm.Llama", f"--set=data.files={tmp_path / 'text'}"),
        *("--set=model.context=8", "--set=training.batch_size=4"),
        *("--set=training.num_steps=4", "--set=pipelining.num_microbatches=2"),
        *("--set=sampling.num_bytes=4", *flags),
    ]
    assert main(["trainer", *common, f"--logdir={tmp_path / 'run'}"]) == 0
    assert "nats/token" in capsys.readouterr().out
    (preset / "tokenizer.json").write_text("{}")
    assert main(["trainer", *common, f"--logdir={tmp_path / 'run'}"]) == 2
    assert "data.tokenizer" in capsys.readouterr().err
