"""A perceptron that tells images apart, on one device or many, as an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from params.image_classifier import ImageClassifier
from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras


class Mlp(Hyperparams):
    """Perceptrons of two layers, one after another, between a dense layer at each end.

    Shards are of the hidden layers: each device has a part of every one.
    """

    num_blocks: int = field(default=4, at_least=1, help="Perceptrons of two layers.")
    width: int = field(default=128, at_least=1, help="Numbers between them.")
    hidden: int = field(default=512, at_least=1, help="Numbers inside each.")
    dropout: float = field(
        default=0.0,
        at_least=0,
        less_than=1,
        help="Share of activations dropped after each.",
    )


class Classifier(ImageClassifier):
    """A perceptron that tells images apart."""

    model: Mlp = field(default=Mlp(), help="The network.")

    def network(self) -> keras.Model:
        """Returns the network, from pixels to logits."""
        import keras

        layers = keras.layers
        stack = [
            keras.Input(self.data.shape),
            layers.Flatten(),
            layers.Dense(self.model.width, activation="gelu"),
        ]
        for _ in range(self.model.num_blocks):
            stack += [layers.LayerNormalization(), *self._block()]
            if self.model.dropout:
                stack.append(layers.Dropout(self.model.dropout))
        return keras.Sequential([*stack, layers.Dense(self.data.num_classes)])

    def _block(self) -> list[Any]:
        """Returns the layers of a perceptron: one in shards, or two that are whole."""
        import keras

        import tfgpipe

        hyper, pipelining = self.model, self.pipelining
        if pipelining.num_shards > 1:
            try:
                block = tfgpipe.layers.TPMLP(
                    hyper.hidden,
                    units=hyper.width,
                    collective="ring" if pipelining.sharding == "ring" else "gather",
                    num_shards=pipelining.num_shards,
                )
            except ValueError as error:
                raise HyperparameterError(f"model: {error}") from None
            return [block]
        return [
            keras.layers.Dense(hyper.hidden, activation="gelu"),
            keras.layers.Dense(hyper.width),
        ]
