"""Experts balanced by the mini-batch are exact, and make a step 1.3 times as long.

Losses that balance experts: their cost and their error, exact or by microbatch.

    python -m benchmarks.studies.added_losses

A Mixtral of keras-hub under 1F1B, on a logical CPU device a stage, with each choice of
`added_losses` and of `remat`. Columns: milliseconds of a step, the median of `--rounds`
rounds in which all take turns; its ratio to that of `"microbatch"`; and the largest
difference of a weight from the plain model's after a step of SGD, of its largest
change.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any

import keras
import numpy as np

import tfgpipe
from benchmarks import tables
from benchmarks.studies.tune import in_turns, stepper

VOCABULARY = 512


def make_model(flags: Any) -> keras.Model:
    """Returns a causal model, whose experts are balanced with a weight of 0.1."""
    import keras_hub

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.MixtralBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=flags.layers,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=flags.width,
        intermediate_dim=2 * flags.width,
        num_experts=4,
        top_k=2,
        router_aux_loss_coef=0.1,
    )
    inputs = {name: x for name, x in backbone.input.items() if name == "token_ids"}
    mask = keras.ops.ones_like(inputs["token_ids"])
    hidden = backbone({**inputs, "padding_mask": mask})
    logits = backbone.token_embedding(hidden, reverse=True)
    model = keras.Model(inputs["token_ids"], logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # So large that a change of a weight is no rounding of it.
    model.compile(keras.optimizers.SGD(10.0), loss)
    return model


def rows(flags: Any) -> list[tables.Row]:
    """Returns a row for each choice."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, VOCABULARY, (2, flags.batch, flags.length))
    plain = make_model(flags)
    before = [w.numpy() for w in plain.trainable_weights]
    plain.train_on_batch(x, y)
    after = [w.numpy() for w in plain.trainable_weights]
    models, errors = {}, {}
    for key in itertools.product(("none", "stage"), ("microbatch", "mini_batch")):
        options: Any = dict(zip(("remat", "added_losses"), key, strict=True))
        models[key] = model = tfgpipe.pipeline(
            make_model(flags),
            num_stages=flags.stages,
            num_microbatches=flags.microbatches,
            schedule="1f1b",
            **options,
        )
        model.train_on_batch(x, y)
        model.optimizer.learning_rate = 0.0
        errors[key] = max(
            float(np.abs(w.numpy() - b).max() / np.abs(b - a).max())
            for w, a, b in zip(model.trainable_weights, before, after, strict=True)
        )
    sides = {key: stepper(model, (x, y)) for key, model in models.items()}
    times = in_turns(sides, flags.rounds)
    medians = {key: statistics.median(each) for key, each in times.items()}
    return [
        {
            "remat": remat,
            "added_losses": added_losses,
            "ms": 1e3 * medians[remat, added_losses],
            "ratio": medians[remat, added_losses] / medians[remat, "microbatch"],
            "error": f"{errors[remat, added_losses]:.1e}",
        }
        for remat, added_losses in models
    ]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    flags = parser.parse_args()
    tfgpipe.make_logical_cpus(flags.stages)
    print(tables.draw(rows(flags)))


if __name__ == "__main__":
    main()
