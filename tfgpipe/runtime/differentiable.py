"""A step as one operation with a gradient of its own.

The forward actions are emitted when it is called, the backward ones by its gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfgpipe._compat import custom_gradients
from tfgpipe.capture import TensorKey, is_differentiable, stack_losses
from tfgpipe.runtime.executor import Executor, StepResult, Tensors
from tfgpipe.runtime.state import VariableUpdate
from tfgpipe.runtime.step import Step


@dataclasses.dataclass(frozen=True)
class DifferentiableStep:
    """A step, differentiable by its inputs and weights.

    Attributes:
        step: The step.
        evaluates: True if it is traced without gradients.
        begin: Function from inputs and `initial_state` to the same step, with them.
        device: Device of the operation.
        num_replicas: Number of replicas, over which Keras takes the mean of losses.
    """

    step: Step
    evaluates: bool
    begin: Callable[..., Step]
    device: str
    num_replicas: int

    def run(self, inputs: Mapping[TensorKey, tf.Tensor]) -> StepResult:
        """Emits the step on a mini-batch, `[B, ...]` each."""
        updates: list[VariableUpdate] = []
        are_differentiable: dict[TensorKey, bool] = {}

        @custom_gradients.custom_gradient
        def run(*tensors: tf.Tensor) -> Any:
            given = dict(zip(inputs, tensors, strict=False))
            executor = Executor(self.step)
            result = executor.forward(given)
            losses = [] if result.loss is None else [result.loss]
            summed = executor.summed_loss
            if summed is not None:
                losses.append(summed * self.num_replicas)
            # Not differentiated, so they need not be results of this function.
            updates.extend(result.updates)
            are_differentiable.update(
                (key, is_differentiable(y)) for key, y in result.outputs.items()
            )
            loss = stack_losses(losses)
            added = [] if loss is None else [tf.reduce_sum(loss)]
            gradient = self._gradient(given, executor, are_differentiable, added)
            return [*result.outputs.values(), *added], gradient

        with tf.device(self.device):
            results = run(*inputs.values(), *self.step.weights)
        keys = list(are_differentiable)
        outputs = dict(zip(keys, results, strict=False))
        loss = results[len(keys)] if len(results) > len(keys) else None
        outputs = {**self.step.passed_through(inputs), **outputs}
        return StepResult(outputs, loss, updates)

    def _gradient(
        self,
        given: Tensors,
        first: Executor,
        are_differentiable: Mapping[TensorKey, bool],
        added: list[tf.Tensor],
    ) -> Callable[..., Any]:
        """Returns the function from the gradients of all results to those of inputs.

        Args:
            given: The inputs.
            first: The executor that has run forward.
            are_differentiable: For each output, whether it has a gradient.
            added: The added loss, which is the last result, if any.
        """
        executors = [] if self.evaluates else [first]

        # TensorFlow passes `variables` if it finds one behind the results, such as a
        # frozen weight, and then wants a gradient for it.
        def gradient(*output_grads: tf.Tensor, variables: Any = None) -> Any:
            if executors:
                executor = executors[0]
            else:
                # The forward was traced without, or a persistent tape's first gradient
                # has freed what it used.
                step, state = self.step, self.step.initial_state
                if self.evaluates:
                    step = self.begin(given, initial_state=state)
                executor = Executor(step)
                executor.forward(given)
            frees = tf.executing_eagerly() and not self.step.has_side_effects
            if frees:
                executors.clear()
            loss_grad = output_grads[-1] if added else None
            grads = executor.backward(
                {
                    key: tf.convert_to_tensor(gradient)
                    for (key, wanted), gradient in zip(
                        are_differentiable.items(), output_grads, strict=False
                    )
                    if wanted and gradient is not None
                },
                loss_grad,
                None if loss_grad is None else loss_grad * self.num_replicas,
                frees=frees,
            )
            return grads if variables is None else (grads, [None] * len(variables))

        return gradient
