"""The workloads of `benchmarks.workloads` in torch's own layers.

Those that `Chain` calls take what the one before returned: one tensor, or in the
decoder of `translation` also the encoder's output, which goes on to the next. There
`tokens` are the model's input, which every stage has.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

from benchmarks.peers import protocol
from benchmarks.peers.protocol import EPSILON, LEARNING_RATE, Weights


class Dense(nn.Linear):
    """A linear layer, with relu or without.

    Args:
        layer: Keras' Dense.
    """

    def __init__(self, layer: protocol.Layer) -> None:
        super().__init__(*layer.weights["kernel"].shape)
        self.relu = layer.config["activation"] == "relu"
        _assign_linear(self, layer.weights)

    def forward(
        self, x: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Projects the last dimension."""
        y = super().forward(x)
        return functional.relu(y) if self.relu else y


class LayerNormalization(nn.LayerNorm):
    """Layer normalization, after which an encoder's output goes no further.

    Args:
        layer: Keras' LayerNormalization.
    """

    def __init__(self, layer: protocol.Layer) -> None:
        super().__init__(layer.weights["gamma"].shape, eps=EPSILON)
        _assign_norm(self, layer.weights)

    def forward(
        self, x: torch.Tensor, *memory: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalizes the last dimension."""
        return super().forward(x)


class TokenEmbedding(nn.Module):
    """The sum of token and learned position embeddings.

    Args:
        layer: The Keras layer.
    """

    def __init__(self, layer: protocol.Layer) -> None:
        super().__init__()
        self.column = layer.config["column"]
        weights = layer.weights
        self.embedding = nn.Embedding(*weights["tokens.embeddings"].shape)
        _assign(self.embedding.weight, weights["tokens.embeddings"])
        self.positions = nn.Parameter(torch.empty(weights["positions"].shape))
        _assign(self.positions, weights["positions"])
        self.dropout = nn.Dropout(layer.config["dropout"])

    def forward(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> Any:
        """Embeds tokens, those of a target beside the encoder's output, `x`."""
        if self.column == 1:
            assert tokens is not None
            return self.embed(tokens[:, 1]), x
        return self.embed(x if self.column is None else x[:, 0])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of tokens."""
        return self.dropout(self.embedding(tokens) + self.positions)


class Attention(nn.MultiheadAttention):
    """Multi-head attention.

    Args:
        weights: Those of the Keras block.
        name: Which of its attention layers it is.
        dropout: Rate on the probabilities.
    """

    def __init__(self, weights: Weights, name: str, *, dropout: float) -> None:
        width, num_heads, _ = weights[f"{name}.query.kernel"].shape
        super().__init__(width, num_heads, dropout=dropout, batch_first=True)
        some = _within(weights, name)
        qkv = ("query", "key", "value")
        kernels = [some[f"{n}.kernel"].reshape(width, width).T for n in qkv]
        biases = [some[f"{n}.bias"].ravel() for n in qkv]
        _assign(self.in_proj_weight, np.concatenate(kernels))
        _assign(self.in_proj_bias, np.concatenate(biases))
        kernel = some["attention_output.kernel"].reshape(width, width)
        _assign(self.out_proj.weight, kernel.T)
        _assign(self.out_proj.bias, some["attention_output.bias"])


class EncoderBlock(nn.Module):
    """A pre-LN transformer block without cross attention.

    Args:
        layer: The Keras layer.
    """

    def __init__(self, layer: protocol.Layer) -> None:
        super().__init__()
        weights, rate = layer.weights, layer.config["dropout"]
        width = weights["attention_norm.gamma"].size
        hidden = weights["hidden.bias"].size
        self.causal = layer.config["causal"]
        self.attention_norm = nn.LayerNorm(width, eps=EPSILON)
        self.attention = Attention(weights, "attention", dropout=rate)
        self.mlp_norm = nn.LayerNorm(width, eps=EPSILON)
        self.hidden = nn.Linear(width, hidden)
        self.output_projection = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(rate)
        for name in ("attention_norm", "mlp_norm"):
            _assign_norm(self.get_submodule(name), _within(weights, name))
        for name in ("hidden", "output_projection"):
            _assign_linear(self.get_submodule(name), _within(weights, name))

    def forward(
        self, x: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attends, then transforms each position, each on a residual path."""
        padding = None if tokens is None else tokens[:, 0] == 0
        return self.transform(self.attend(x, padding))

    def attend(
        self, x: torch.Tensor, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Adds what each position attends to."""
        y, length = self.attention_norm(x), x.shape[1]
        later = None
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
        y, _ = self.attention(
            y,
            y,
            y,
            key_padding_mask=padding,
            attn_mask=later,
            is_causal=self.causal,
            need_weights=False,
        )
        return x + self.dropout(y)

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the MLP makes of each position."""
        y = functional.gelu(self.hidden(self.mlp_norm(x)))
        return x + self.dropout(self.output_projection(y))


class DecoderBlock(EncoderBlock):
    """A block that also attends to an encoder's output.

    Args:
        layer: The Keras layer.
    """

    def __init__(self, layer: protocol.Layer) -> None:
        super().__init__(layer)
        weights = layer.weights
        rate = layer.config["dropout"]
        self.cross_norm = nn.LayerNorm(weights["cross_norm.gamma"].size, eps=EPSILON)
        self.cross_attention = Attention(weights, "cross_attention", dropout=rate)
        _assign_norm(self.cross_norm, _within(weights, "cross_norm"))

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, memory: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends to itself and the source, then transforms each position."""
        x = self.attend(x)
        # So that gradients are contiguous, as gloo will have them to send.
        source = memory.flatten(0, 1).unflatten(0, memory.shape[:2])
        y, _ = self.cross_attention(
            self.cross_norm(x),
            source,
            source,
            key_padding_mask=tokens[:, 0] == 0,
            need_weights=False,
        )
        return self.transform(x + self.dropout(y)), memory


class Normalized(nn.Sequential):
    """A convolution without bias and the batch normalization of its output.

    Args:
        weights: Those of the Keras layer.
        suffix: Of the names of the two.
        strides: Of the convolution.
    """

    def __init__(self, weights: Weights, suffix: str = "", *, strides: int) -> None:
        kernel = weights[f"convolution{suffix}.kernel"]
        size, _, channels, filters = kernel.shape
        convolution = nn.Conv2d(
            channels, filters, size, stride=strides, padding=size // 2, bias=False
        )
        # Torch's momentum is one less Keras'.
        norm = nn.BatchNorm2d(filters, eps=EPSILON, momentum=0.01)
        super().__init__(convolution, norm)
        _assign(convolution.weight, kernel.transpose(3, 2, 0, 1))
        _assign_norm(norm, _within(weights, f"norm{suffix}"))


class Stem(nn.Module):
    """The first layers of ResNet50: convolution, batch normalization, relu, maximum.

    Args:
        layer: The Keras layer.
    """

    def __init__(self, layer: protocol.Layer) -> None:
        super().__init__()
        self.normalized = Normalized(layer.weights, strides=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes an image to features."""
        x = functional.relu(self.normalized(x))
        return functional.max_pool2d(x, 3, stride=2, padding=1)


class Bottleneck(nn.Module):
    """A block of ResNet50: convolutions of 1, 3 and 1 on a residual path.

    Args:
        layer: The Keras layer.
    """

    def __init__(self, layer: protocol.Layer) -> None:
        super().__init__()
        weights, strides = layer.weights, layer.config["strides"]
        self.residual = nn.Sequential(
            Normalized(weights, "1", strides=strides),
            nn.ReLU(),
            Normalized(weights, "2", strides=1),
            nn.ReLU(),
            Normalized(weights, "3", strides=1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if "convolution0.kernel" in weights:
            self.shortcut = Normalized(weights, "0", strides=strides)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the residual path to the other."""
        return functional.relu(self.residual(x) + self.shortcut(x))


class GlobalAveragePooling2D(nn.Module):
    """The mean over height and width.

    Args:
        layer: The Keras layer.
    """

    def __init__(self, layer: protocol.Layer) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean of each channel."""
        return x.mean((2, 3))


class Chain(nn.Module):
    """Layers one after the other: all of a model, or a stage's.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *x: torch.Tensor, **given: torch.Tensor) -> Any:
        """Returns what the last layer returns, a tensor or two."""
        y: Any = x
        for layer in self.layers:
            y = layer(*y, **given) if isinstance(y, tuple) else layer(y, **given)
        return y


class Rematerialised(nn.Module):
    """Layers of which only the input is kept for the backward.

    Args:
        layers: What is run, and run again.
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *x: torch.Tensor, **given: torch.Tensor) -> Any:
        """Returns what the layers return."""
        return checkpoint.checkpoint(self.layers, *x, use_reentrant=False, **given)


KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Bottleneck,
        DecoderBlock,
        Dense,
        EncoderBlock,
        GlobalAveragePooling2D,
        LayerNormalization,
        Stem,
        TokenEmbedding,
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A workload in torch, with the batch it is fed.

    Attributes:
        layers: With their initial weights.
        spans: Which of them each stage has, in order.
        inputs: What the first layer takes, images with their channels first.
        targets: What outputs are compared with.
        given: What every stage takes by name.
    """

    layers: list[nn.Module]
    spans: list[slice]
    inputs: torch.Tensor
    targets: torch.Tensor
    given: dict[str, torch.Tensor]

    @property
    def stages(self) -> list[Chain]:
        """The layers of each stage."""
        return [Chain(self.layers[span]) for span in self.spans]


def read(task: protocol.Task, *, num_stages: int) -> Model:
    """Returns the model of a task in stages, several of which a process may have."""
    source = protocol.read(task)
    inputs, targets = torch.from_numpy(source.x), torch.from_numpy(source.y)
    if inputs.ndim == 4:
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    layers = [KINDS[layer.kind](layer) for layer in source.layers]
    decodes = any(isinstance(layer, DecoderBlock) for layer in layers)
    return Model(
        layers=layers,
        spans=source.spans(num_stages),
        inputs=inputs,
        targets=targets if targets.is_floating_point() else targets.long(),
        given={"tokens": inputs} if decodes else {},
    )


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the loss of `benchmarks.workloads`, padding counted as zeros."""
    if targets.is_floating_point():
        return functional.mse_loss(outputs, targets)
    logits = outputs.flatten(0, -2)
    total = functional.cross_entropy(
        logits, targets.flatten(), ignore_index=0, reduction="sum"
    )
    return total / targets.numel()


def make_optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of all workloads."""
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def whole_step(module: nn.Module, model: Model) -> protocol.StepFn:
    """Returns the step of a model that is called like any other.

    Args:
        module: What to call.
        model: The batch.
    """
    optimizer = make_optimizer(module)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(module(model.inputs, **model.given), model.targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _within(weights: Weights, name: str) -> Weights:
    """Returns the weights of a sublayer by their names in it."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value
        for key, value in weights.items()
        if key.startswith(prefix)
    }


def _assign_linear(linear: Any, weights: Weights) -> None:
    _assign(linear.weight, weights["kernel"].T)
    _assign(linear.bias, weights["bias"])


def _assign_norm(norm: Any, weights: Weights) -> None:
    _assign(norm.weight, weights["gamma"])
    _assign(norm.bias, weights["beta"])


def _assign(parameter: torch.Tensor, value: np.ndarray) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
