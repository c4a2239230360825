"""A language model over bytes, as an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from params import bigram
from params.corpus import Corpus
from params.experiment import Experiment, Split
from params.sampling import Sampling
from tfgpipe.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    import tfgpipe


class Transformer(Hyperparams):
    """A decoder-only transformer with learnt positions and norms before each block."""

    num_layers: int = field(default=4, at_least=1, help="Blocks.")
    width: int = field(default=128, at_least=1, help="Numbers in a byte's vector.")
    num_heads: int = field(default=4, at_least=1, help="Heads of each attention.")
    mlp_width: int = field(
        default=512, at_least=1, help="Width inside each block's perceptron."
    )
    context: int = field(default=128, at_least=1, help="Bytes that the model reads.")
    dropout: float = field(
        default=0.0, at_least=0, help="Share of activations dropped in training."
    )
    softmax: Literal["tied", "untied"] = field(
        default="untied", help="tied: the embedding's vectors give the logits as well."
    )

    def validate(self) -> None:
        """Checks that the heads share the width."""
        if self.width % self.num_heads:
            raise HyperparameterError(
                f"width: expected a multiple of num_heads={self.num_heads}; "
                f"received {self.width}."
            )


class LanguageModel(Experiment):
    """A transformer that predicts the next byte of a text."""

    unit: ClassVar[str] = "byte"

    data: Corpus = field(default=Corpus(), help="The text.")
    model: Transformer = field(default=Transformer(), help="The network.")
    sampling: Sampling = field(default=Sampling(), help="The text drawn at the end.")

    @property
    def tokens_per_step(self) -> int:
        """How many bytes a step trains on; a byte is a token here."""
        return self.training.batch_size * self.model.context

    def build_model(self) -> tfgpipe.PipelinedModel:
        """Returns the compiled model, from bytes to logits.

        A tied softmax shares its weights with the embedding, over all stages between.
        """
        import keras

        from params.transformer import Block, Positions, quantize_rules

        hyper, precision = self.model, self.precision
        with precision.scope():
            layers = [
                Positions(),
                *(
                    Block(
                        width=hyper.width,
                        num_heads=hyper.num_heads,
                        mlp_width=hyper.mlp_width,
                        dropout=hyper.dropout,
                    )
                    for _ in range(hyper.num_layers)
                ),
                keras.layers.LayerNormalization(),
            ]
            inputs = keras.Input([hyper.context], dtype="int32")
            rules = quantize_rules() if precision.quantizes else {}
            if hyper.softmax == "tied":
                embedding = keras.layers.ReversibleEmbedding(256, hyper.width)
                vectors = embedding(inputs)
                for layer in layers:
                    vectors = layer(vectors)
                logits = embedding(vectors, reverse=True)
                whole = precision.apply(keras.Model(inputs, logits), rules)
                model = self.pipelining.build(whole)
            else:
                embedding = keras.layers.Embedding(256, hyper.width)
                stack = [embedding, *layers, keras.layers.Dense(256)]
                model = self.pipelining.build(precision.apply(stack, rules))
                model(inputs)  # Which builds it; gives [batch_size, context, 256].
            model.compile(
                optimizer=self.optimizer.build(self.training.num_steps),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        return model

    def build_dataset(self, split: Split, *, first_step: int = 0) -> tf.data.Dataset:
        """Returns batches of windows: random ones to train, even ones to validate."""
        from params import windows

        text = self._read(split)
        length, batch_size = self.model.context, self.training.batch_size
        if split == "validation":
            return windows.even_windows(
                text,
                length=length,
                batch_size=batch_size,
                num_batches=self.training.num_validation_batches,
            )
        return windows.random_windows(
            text,
            length=length,
            batch_size=batch_size,
            steps=range(first_step, self.training.num_steps),
            seed=self.seed,
        )

    def baselines(self) -> dict[str, float]:
        """Returns the loss of the bigram model, of the very bytes validated on."""
        log_probabilities = bigram.fit(self._read("train"))
        pairs = list(self.build_dataset("validation").as_numpy_iterator())
        inputs, targets = (np.concatenate(side) for side in zip(*pairs, strict=True))
        return {"bigram": bigram.cross_entropy(log_probabilities, inputs, targets)}

    def sample(self, model: keras.Model) -> str:
        """Returns a text drawn from the model."""
        return self.sampling.draw(model, length=self.model.context, seed=self.seed)

    def _read(self, split: Split) -> np.ndarray:
        text = self.data.read(split)
        if len(text) <= self.model.context:
            raise HyperparameterError(
                f"data.files: expected more than model.context={self.model.context} "
                f"bytes for {split}; received {len(text)}. Give more text, or a "
                "smaller model.context."
            )
        return text
