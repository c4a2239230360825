"""The workloads of `benchmarks.workloads` in torch's own layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils import checkpoint

from benchmarks.peers import protocol
from benchmarks.peers.protocol import EPSILON, LEARNING_RATE, Weights


class EncoderBlock(nn.Module):
    """A pre-LN transformer encoder block without dropout.

    Args:
        weights: Those of the Keras layer.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        width, num_heads, _ = weights["query.kernel"].shape
        hidden = weights["hidden.bias"].size
        self.attention_norm = nn.LayerNorm(width, eps=EPSILON)
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.mlp_norm = nn.LayerNorm(width, eps=EPSILON)
        self.hidden = nn.Linear(width, hidden)
        self.output_projection = nn.Linear(hidden, width)

        qkv = ("query", "key", "value")
        kernels = [weights[f"{n}.kernel"].reshape(width, width).T for n in qkv]
        biases = [weights[f"{n}.bias"].ravel() for n in qkv]
        _assign(self.attention.in_proj_weight, np.concatenate(kernels))
        _assign(self.attention.in_proj_bias, np.concatenate(biases))
        kernel = weights["attention_output.kernel"].reshape(width, width)
        _assign(self.attention.out_proj.weight, kernel.T)
        _assign(self.attention.out_proj.bias, weights["attention_output.bias"])
        for name in ("attention_norm", "mlp_norm"):
            norm = self.get_submodule(name)
            _assign(norm.weight, weights[f"{name}.gamma"])
            _assign(norm.bias, weights[f"{name}.beta"])
        for name in ("hidden", "output_projection"):
            linear = self.get_submodule(name)
            _assign(linear.weight, weights[f"{name}.kernel"].T)
            _assign(linear.bias, weights[f"{name}.bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attends, then transforms each position, each on a residual path."""
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = nn.functional.gelu(self.hidden(self.mlp_norm(x)))
        return x + self.output_projection(y)


class Rematerialised(nn.Module):
    """Layers of which only the input is kept for the backward.

    Args:
        layers: What is run, and run again.
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the layers return."""
        return checkpoint.checkpoint(self.layers, x, use_reentrant=False)


def make_layer(workload: str, weights: Weights) -> nn.Module:
    """Returns a layer of a workload with its initial weights."""
    if workload == "transformer":
        return EncoderBlock(weights)
    linear = nn.Linear(*weights["kernel"].shape)
    _assign(linear.weight, weights["kernel"].T)
    _assign(linear.bias, weights["bias"])
    return nn.Sequential(linear, nn.ReLU())


def make_optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of all workloads."""
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def read(
    task: protocol.Task,
) -> tuple[list[nn.Module], torch.Tensor, torch.Tensor]:
    """Returns the layers of a task with their weights, its inputs and its targets."""
    x, y, weights = protocol.read(task)
    layers = [make_layer(task.workload, some) for some in weights]
    return layers, torch.from_numpy(x), torch.from_numpy(y)


def whole_step(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> protocol.StepFn:
    """Returns the step of a model that is called like any other."""
    optimizer = make_optimizer(model)

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _assign(parameter: torch.Tensor, value: np.ndarray) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
