"""The comparison with other libraries, without the other libraries."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.peers import protocol, turns
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


@pytest.mark.parametrize("workload", ["mlp", "transformer"])
def test_peers_read_the_weights_of_keras_by_their_names(workload, tmp_path):
    made = workloads.WORKLOADS[workload](**{**turns.SMALL[workload], "num_layers": 2})
    layers = made.make_layers()
    keras.Sequential([keras.Input(made.batch_shape[1:]), *layers])
    workloads.set_weights(layers)
    given = [[w.numpy() for w in layer.trainable_weights] for layer in layers]
    x, y = made.make_data()
    path = tmp_path / "given.npz"
    protocol.write(path, x=x, y=y, layers=given)

    task = protocol.Task(**{**vars(TASK), "workload": workload, "given": str(path)})
    read_x, read_y, read = protocol.read(task)
    np.testing.assert_array_equal(read_x, x)
    np.testing.assert_array_equal(read_y, y)
    assert len(read) == 2
    for layer, weights in zip(layers, read, strict=True):
        for weight, (name, value) in zip(
            layer.trainable_weights, weights.items(), strict=True
        ):
            assert weight.path.endswith(name.rpartition(".")[-1])
            np.testing.assert_array_equal(value, weight.numpy())
    if workload == "transformer":
        block, weights = layers[1], read[1]
        query = block.attention.query_dense.kernel
        np.testing.assert_array_equal(weights["query.kernel"], query)
        np.testing.assert_array_equal(weights["hidden.kernel"], block.hidden.kernel)


def test_the_command_measures_the_peers_that_are_there(monkeypatch, capsys, tmp_path):
    asked = []

    def measure(workload, **arguments):
        asked.append((workload, arguments["num_microbatches"], arguments["pythons"]))
        return turns.Comparison(rows=[ROW], versions={"jax": "0.10.2"}, others=0.25)

    monkeypatch.setattr(turns, "measure", measure)
    document = tmp_path / "peers.md"
    document.write_text("# Peers\n")
    main(["--workload=mlp", "--microbatches=4,8", f"--report={document}"])
    assert asked == [("mlp", 4, {}), ("mlp", 8, {})]
    said = capsys.readouterr().out
    assert "torchgpipe is left out: no environment was named for it." in said
    assert "Other work took 25% to 25% of the two cores." in said
    text = document.read_text("utf-8")
    assert text.startswith("# Peers\n## Measured\n")
    assert "jax 0.10.2" in text
    assert "torchgpipe is left out" in text
