"""Networks that tell images apart, as experiments choose from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe_params.image.digits import DigitImages
from tfgpipe_params.image.images import ClassificationData
from tfgpipe_params.image.task import ImageClassifier
from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras


class DigitClassifier(ImageClassifier):
    """Some network on scikit-learn's digits, or on images of the user's."""

    data: ClassificationData = field(default=DigitImages(), help="Images.")


class ConvNet(Hyperparams):
    """Convolutions, each with batch normalization and ReLU, then two dense layers."""

    channels: tuple[int, ...] = field(
        default=(32, 64, 64), help="Channels of each convolution."
    )
    strides: tuple[int, ...] = field(
        default=(1, 2, 2), help="Stride of each convolution."
    )
    width: int = field(default=128, at_least=1, help="Width of the dense layer.")

    def validate(self) -> None:
        """Checks that there is a stride for each convolution."""
        for name, numbers in (("channels", self.channels), ("strides", self.strides)):
            if len(numbers) != len(self.channels) or min(numbers, default=1) < 1:
                raise HyperparameterError(
                    f"{name}: expected {len(self.channels)} numbers of at least 1, one "
                    f"for each convolution; received {numbers}."
                )

    def build(self, shape: tuple[int, ...], classes: int) -> keras.Model:
        """Returns the network, from pixels to logits.

        Args:
            shape: Height, width, channels of an image.
            classes: Number of classes.
        """
        import keras

        layers = keras.layers
        stack = [keras.Input(shape)]
        for channels, strides in zip(self.channels, self.strides, strict=True):
            stack += [
                layers.Conv2D(
                    channels, 3, strides=strides, padding="same", use_bias=False
                ),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
            ]
        stack += [
            layers.Flatten(),
            layers.Dense(self.width, activation="relu"),
            layers.Dense(classes),
        ]
        return keras.Sequential(stack)


class ConvNetClassifier(DigitClassifier):
    """A plain convolutional network."""

    model: ConvNet = field(default=ConvNet(), help="Network.")

    def network(self) -> keras.Model:
        """Returns the network, from pixels to logits."""
        return self.model.build(self.data.shape, self.data.num_classes)


class AmoebaNet(Hyperparams):
    """The size of an AmoebaNet-D, as GPipe gives it."""

    num_layers: int = field(
        default=18, at_least=3, help="Number of normal cells, L; a multiple of 3."
    )
    num_filters: int = field(
        default=208, at_least=16, help="Filters of the first cell, D; a multiple of 16."
    )


class AmoebaNetClassifier(DigitClassifier):
    """AmoebaNet-D, the network that GPipe was measured with."""

    model: AmoebaNet = field(default=AmoebaNet(), help="Network.")

    def network(self) -> keras.Model:
        """Returns the network, from pixels to logits."""
        from tfgpipe_params.image.amoebanet import amoebanet_d

        try:
            return amoebanet_d(
                num_layers=self.model.num_layers,
                num_filters=self.model.num_filters,
                classes=self.data.num_classes,
                input_shape=self.data.shape,
            )
        except ValueError as error:
            raise HyperparameterError(f"model: {error}") from None


class ResNetClassifier(DigitClassifier):
    """ResNet-50 as Keras has it, from random weights."""

    def network(self) -> keras.Model:
        """Returns the network, from pixels to logits."""
        import keras

        height, width, _ = self.data.shape
        if min(height, width) < 32:
            raise HyperparameterError(
                "data.shape: expected a height and a width of at least 32, which "
                f"ResNet-50 takes; received {self.data.shape}."
            )
        return keras.applications.ResNet50(
            weights=None,
            input_shape=self.data.shape,
            classes=self.data.num_classes,
            classifier_activation=None,
        )
