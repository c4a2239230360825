"""Language models around a backbone of keras-hub: Llama, Gemma, Qwen, GPT-2 and others.

Normalization, rotary positions, grouped queries, gated perceptrons and experts are
those of the backbone. From random weights by its class, or from a preset's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tfgpipe_params.lm import tokenizers
from tfgpipe_params.lm.corpus import Corpus
from tfgpipe_params.lm.task import LanguageModel
from tfgpipe_trainer import files
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.config import keyword_arguments
from tfgpipe_trainer.experiment import Split
from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf


class Backbone(Hyperparams):
    """A backbone of keras-hub, and its arguments."""

    split_vocabulary: ClassVar[bool] = False

    backbone: str = field(
        default="LlamaBackbone",
        help="Class of keras_hub.models, or folder of a preset, with its weights.",
    )
    arguments: tuple[str, ...] = field(
        default=(), help="NAME=VALUE: arguments of the class; vocabulary_size is known."
    )
    context: int = field(default=128, at_least=1, help="Context length in tokens.")
    lora_rank: int | None = field(
        default=None,
        at_least=1,
        help="LoRA: only low-rank changes of this rank are trained; None: all weights.",
    )

    def build(self, vocabulary_size: int) -> keras.Model:
        """Returns a causal language model, from tokens and their mask to logits.

        Raises:
            HyperparameterError: If there is no such backbone, or it is of another kind.
        """
        keras_hub = _import()
        is_folder = Path(self.backbone).expanduser().is_dir()
        if self.backbone.isidentifier() and not is_folder:
            backbone = self._made(keras_hub, vocabulary_size)
        else:
            backbone = self._loaded(keras_hub, vocabulary_size)
        if self.lora_rank is not None:
            backbone.enable_lora(self.lora_rank)
        if not hasattr(backbone, "token_embedding"):
            raise HyperparameterError(
                "model.backbone: expected one of a causal language model; received "
                f"{type(backbone).__name__}, which has no `token_embedding`."
            )
        import keras

        hidden = backbone(backbone.input)
        logits = backbone.token_embedding(hidden, reverse=True)
        return keras.Model(backbone.input, logits)

    def _made(self, keras_hub: Any, vocabulary_size: int) -> Any:
        cls = getattr(keras_hub.models, self.backbone, None)
        if not (isinstance(cls, type) and issubclass(cls, keras_hub.models.Backbone)):
            names = [x for x in dir(keras_hub.models) if x.endswith("Backbone")]
            raise HyperparameterError(
                f"model.backbone: expected one of {', '.join(names)}, or the folder of "
                f"a preset; received {self.backbone!r}."
            )
        arguments = keyword_arguments(
            "model.arguments", self.arguments, example="num_layers=4"
        )
        try:
            return cls(**{"vocabulary_size": vocabulary_size, **arguments})
        except (TypeError, ValueError) as error:
            raise HyperparameterError(
                f"model.arguments: expected those of keras_hub.models.{self.backbone}; "
                f"received {', '.join(self.arguments) or 'none'}: {error}"
            ) from None

    def _loaded(self, keras_hub: Any, vocabulary_size: int) -> Any:
        path = Path(self.backbone).expanduser()
        if files.is_remote(self.backbone) or not path.is_dir() or self.arguments:
            raise HyperparameterError(
                "model.backbone: expected a class of keras_hub.models, or the folder "
                "of a preset, without model.arguments; received "
                f"{self.backbone!r}."
            )
        backbone = keras_hub.models.Backbone.from_preset(str(path))
        if backbone.vocabulary_size < vocabulary_size:
            raise HyperparameterError(
                f"data.tokenizer: expected at most {backbone.vocabulary_size} tokens, "
                f"as {path} has; received {vocabulary_size}."
            )
        return backbone


class BackboneLanguageModel(LanguageModel):
    """A causal language model around a backbone of keras-hub."""

    model: Backbone = field(  # type: ignore[assignment]
        default=Backbone(), help="Network."
    )

    def network(self) -> keras.Model:
        """Returns the network, from tokens and their mask to logits."""
        return self.model.build(self._vocabulary_size)

    def quantize_rules(self) -> Mapping[type, Any]:
        """Returns none: layers of keras-hub have no configurations here."""
        return {}

    def batches(
        self, split: Split, *, first_step: int = 0, shard: HostShard | None = None
    ) -> tf.data.Dataset:
        """Returns batches of windows, as the backbone's inputs."""
        found = self._windows(split, first_step=first_step, shard=shard)
        return found.map(lambda x, y: (_inputs(x), y))

    @property
    def corpus(self) -> Corpus:
        """The text, in tokens of a preset's own tokenizer unless another is named."""
        path = Path(self.model.backbone).expanduser()
        if self.data.tokenizer or not tokenizers.is_preset(path):
            return self.data
        return self.data.replace(tokenizer=self.model.backbone)

    def of_tokens(self, model: keras.Model) -> Any:
        """Returns a model whose `predict_on_batch` maps tokens to logits."""
        return _OfTokens(model)


class _OfTokens:
    """A model of tokens alone."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def predict_on_batch(self, tokens: np.ndarray) -> np.ndarray:
        return self._model.predict_on_batch(_inputs(tokens))


def _inputs(tokens: Any) -> dict[str, Any]:
    import keras

    return {"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)}


def _import() -> Any:
    try:
        import keras_hub
    except ImportError:
        raise HyperparameterError(
            "model.backbone: expected the package keras-hub; received an environment "
            "without. Try: pip install keras-hub"
        ) from None
    return keras_hub
