"""The comparison with other libraries, without the other libraries."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.peers import protocol, turns, weights
from benchmarks.peers.__main__ import main
from benchmarks.worker import Step

TASK = protocol.Task(
    workload="mlp",
    given="",
    num_stages=2,
    num_processes=2,
    num_microbatches=4,
    schedule="gpipe",
    remat="none",
    port=0,
)
ROW = {"workload": "mlp", "M": 4, "remat": "none", "side": "jax gpipe", "ms": 31.25}


def step(seconds, loss):
    return Step(seconds=seconds, cpu_seconds=seconds, stolen_seconds=0.0, loss=loss)


def test_times_are_medians_and_ratios_are_of_neighbouring_steps():
    turn = [
        {
            "tfgpipe plain": step(3 * slow, loss),
            "tfgpipe 1f1b": step(2 * slow, loss),
            "jax gpipe": step(1 * slow, loss + 1e-7),
        }
        for slow, loss in ((100.0, 0.9), (1.0, 0.8), (5.0, 0.7), (2.0, 0.6))
    ]
    row = turns.summarise(turn, warmup=1)[-1]
    assert row["side"] == "jax gpipe"
    assert (row["ms"], row["least"], row["cores"]) == (2000, 1000, 1)
    assert row["of tfgpipe 1f1b"] == 0.5
    assert row["CPU ms"] == 2000
    assert row["loss"] == "0.90000 to 0.60000"


@pytest.mark.parametrize("wrong", [0.8001, float("nan")])
def test_no_time_is_told_of_a_side_with_other_losses(wrong):
    turn = [
        {
            "tfgpipe plain": step(1.0, 0.9),
            "tfgpipe 1f1b": step(1.0, 0.9),
            "jax gpipe": step(1.0, 0.9),
        },
        {
            "tfgpipe plain": step(1.0, 0.8),
            "tfgpipe 1f1b": step(1.0, 0.8),
            "jax gpipe": step(1.0, wrong),
        },
    ]
    *agree, differs = turns.summarise(turn, warmup=0)
    assert [row["ms"] for row in agree] == [1000, 1000]
    assert differs["ms"] == "losses differ"
    empty = ("least", "of tfgpipe 1f1b", "CPU ms", "cores")
    assert {differs[key] for key in empty} == {""}
    assert list(differs) == list(agree[0])


def test_a_peer_that_stops_is_named():
    with pytest.raises(RuntimeError, match="jax_pipeline stopped"):
        turns.PeerProcess("false", module="jax_pipeline", task=TASK, cores=(0,))


def test_pipelines_with_batch_normalization_are_compared_with_each_other():
    turn = [
        {
            "tfgpipe plain": step(1.0, 0.9),
            "tfgpipe 1f1b": step(1.0, 0.7),
            "torch plain": step(1.0, 0.9),
            "torch 1f1b": step(1.0, 0.7),
            "torch gpipe": step(1.0, 0.9),
        }
    ]
    rows = turns.summarise(turn, warmup=0, pipelines_as="tfgpipe 1f1b")
    assert [row["ms"] for row in rows] == [1000] * 4 + ["losses differ"]


def test_with_dropout_losses_are_said_not_to_be_compared():
    turn = [{"tfgpipe plain": step(1.0, 0.9), "tfgpipe 1f1b": step(1.0, 0.7)}]
    rows = turns.summarise(turn, warmup=0, compare_losses=False)
    assert [row["ms"] for row in rows] == [1000, 1000]
    assert all(row["loss"].endswith("not compared") for row in rows)


@pytest.mark.parametrize("workload", list(turns.SMALL))
def test_peers_read_what_keras_starts_from(workload, tmp_path):
    path = tmp_path / "given.npz"
    made = workloads.WORKLOADS[workload](**turns.SMALL[workload])
    layers = made.make_layers()
    model = made.make_model(layers)
    workloads.set_weights(layers)
    x, y = made.make_data()
    assert x.shape == made.batch_shape
    given = protocol.Given(
        x=x,
        y=y,
        layers=[weights.describe(layer) for layer in layers],
        layers_per_stage=made.layers_per_stage,
    )
    protocol.write(path, given)

    task = protocol.Task(**{**vars(TASK), "workload": workload, "given": str(path)})
    read = protocol.read(task)
    np.testing.assert_array_equal(read.x, x)
    np.testing.assert_array_equal(read.y, y)
    assert [type(layer).__name__ for layer in layers] == [r.kind for r in read.layers]
    for layer, other in zip(layers, read.layers, strict=True):
        for weight, value in zip(
            layer.trainable_weights, other.weights.values(), strict=True
        ):
            np.testing.assert_array_equal(value, weight.numpy())
    if workload == "transformer":
        block, named = layers[1], read.layers[1].weights
        query = block.attention.query_dense.kernel
        np.testing.assert_array_equal(named["attention.query.kernel"], query)
        np.testing.assert_array_equal(named["hidden.kernel"], block.hidden.kernel)
    for num_stages in (1, 2, 4):
        spans = read.spans(num_stages)
        joined = [name for span in spans for name in range(len(layers))[span]]
        assert joined == list(range(len(layers)))
        ends = [layers[span.stop - 1].name for span in spans[:-1]]
        assert made.stage_ends(layers, num_stages) == ends
    assert len(model.trainable_weights) == sum(len(r.weights) for r in read.layers)


def test_what_is_padding_or_to_come_changes_no_logits():
    made = workloads.WORKLOADS["translation"](**turns.SMALL["translation"])
    layers = made.make_layers()
    model = made.make_model(layers)
    workloads.set_weights(layers)
    tokens, targets = made.make_data()
    assert (targets == 0).any()
    shortest = np.argmax((tokens[:, 0] == 0).sum(1))
    tokens = tokens[shortest : shortest + 1]
    before = model(tokens).numpy()
    changed = tokens.copy()
    changed[:, 1, 9:] = 1
    np.testing.assert_allclose(model(changed)[:, :9], before[:, :9], rtol=1e-4)
    assert np.abs(model(changed)[:, 9:] - before[:, 9:]).max() > 1e-2
    # Whatever the encoder makes of padding, no decoder attends to it.
    padded = tokens[0, 0] == 0
    assert padded.any()
    positions = layers[0].positions
    positions.assign(positions + padded[:, None] * np.arange(32, dtype="float32"))
    np.testing.assert_allclose(model(tokens), before, rtol=1e-4)


def test_padding_counts_as_a_loss_of_zero():
    logits = np.zeros((1, 4, 8), "float32")
    losses = workloads.cross_entropy(np.array([[3, 1, 0, 0]]), logits)
    np.testing.assert_allclose(losses[0], [np.log(8), np.log(8), 0, 0], rtol=1e-6)


def test_the_command_measures_the_peers_that_are_there(monkeypatch, capsys, tmp_path):
    asked = []

    def measure(workload, **arguments):
        asked.append((workload, arguments["num_microbatches"], arguments["pythons"]))
        return turns.Comparison(rows=[ROW], versions={"jax": "0.10.2"}, others=0.25)

    monkeypatch.setattr(turns, "measure", measure)
    document = tmp_path / "peers.md"
    document.write_text("# Peers\n")
    main(["--workloads=mlp", "--microbatches=4,8", f"--report={document}"])
    assert asked == [("mlp", 4, {}), ("mlp", 8, {})]
    said = capsys.readouterr().out
    assert "torchgpipe is left out: no environment was named for it." in said
    assert "Other work took 25% to 25% of the cores." in said
    text = document.read_text("utf-8")
    assert text.startswith("# Peers\n## Measured\n")
    assert "jax 0.10.2" in text
    assert "torchgpipe is left out" in text
