"""Two stages answer with keras-hub's tokens, 186 a second where it has 174.

Generation with a cache of keys and values on each stage's device: tokens a second.

    python -m benchmarks.studies.generation

A GPT-2 of keras-hub with random weights answers a mini-batch of prompts greedily: by
keras-hub's own `generate`, compiled by XLA and not, and by that of pipelines on logical
CPU devices. Columns: K and parts of the mini-batch; whether XLA compiles; milliseconds
of an answer, the median of `--rounds` in turns; tokens a second of all examples; the
ratio to keras-hub's of the same kind; whether all tokens are those of keras-hub.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.studies.tune import in_turns


def make_model(flags: Any) -> Any:
    """Returns the model."""
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=flags.vocabulary,
        num_layers=flags.layers,
        num_heads=8,
        hidden_dim=flags.width,
        intermediate_dim=4 * flags.width,
        max_sequence_length=flags.length,
    )
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


@dataclasses.dataclass(frozen=True)
class Side:
    """A way to answer.

    Attributes:
        stages: K; None for keras-hub's own.
        parts: Parts of the mini-batch.
        xla: Whether XLA compiles.
    """

    stages: int | None
    parts: int
    xla: bool

    def answer(self, flags: Any, prompts: np.ndarray) -> Callable[[], np.ndarray]:
        """Returns a function that answers, with a model of its own."""
        import keras

        import tfgpipe

        keras.utils.set_random_seed(0)
        model = make_model(flags)
        if self.stages is not None:
            pipelined = tfgpipe.pipeline(
                model,
                num_stages=self.stages,
                num_microbatches=1,
                jit_compile=self.xla,
            )
            return functools.partial(
                pipelined.generate,
                prompts,
                max_length=flags.length,
                num_microbatches=self.parts,
            )
        model.compile(sampler="greedy", jit_compile=self.xla)
        missing = [(0, 0), (0, flags.length - flags.prompt)]
        given = np.pad(np.ones(prompts.shape, bool), missing)
        inputs = {"token_ids": np.pad(prompts, missing), "padding_mask": given}
        return lambda: model.generate(inputs, stop_token_ids=None)["token_ids"]


def rows(flags: Any) -> list[tables.Row]:
    """Returns a row for each way."""
    K = flags.stages
    shape = flags.batch, flags.prompt
    random = np.random.default_rng(0)
    prompts = random.integers(flags.vocabulary, size=shape, dtype=np.int32)
    results: list[tables.Row] = []
    for xla in (True, False):
        ways = [
            Side(None, 1, xla),
            *(Side(k, m, xla) for k, m in ((1, 1), (K, 1), (K, K))),
        ]
        sides = {str(way): way.answer(flags, prompts) for way in ways}
        tokens = [answer() for answer in sides.values()]
        times = in_turns(sides, flags.rounds).values()
        seconds = [statistics.median(each) for each in times]
        num_tokens = flags.batch * (flags.length - flags.prompt)
        results += [
            {
                "K": way.stages or "keras-hub",
                "parts": way.parts,
                "XLA": xla,
                "ms": 1e3 * time,
                "tokens/s": num_tokens / time,
                "ratio": seconds[0] / time,
                "equal": np.array_equal(found, tokens[0]),
            }
            for way, time, found in zip(ways, seconds, tokens, strict=True)
        ]
    return results


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--length", type=int, default=96, help="of prompt and answer")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    import tfgpipe

    tfgpipe.make_logical_cpus(flags.stages)
    print(tables.draw(rows(flags)))


if __name__ == "__main__":
    main()
