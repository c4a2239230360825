"""In which numbers an experiment computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    from tfgpipe.quantization import QuantizeConfig


class Precision(Hyperparams):
    """Half precision, and training for 8-bit integers."""

    policy: Literal["float32", "mixed_float16", "mixed_bfloat16"] = field(
        default="float32", help="What layers compute in; weights are in float32."
    )
    quantize: Literal["none", "8bit"] = field(
        default="none", help="8bit: trains for int8: see tfgpipe.quantization."
    )
    quantize_start_step: int = field(
        default=0, at_least=0, help="Steps that only look at ranges before it rounds."
    )
    freeze_ranges_step: int | None = field(
        default=None, at_least=1, help="Steps after which ranges stay; None: never."
    )
    ranges: Literal["ramped", "slow"] = field(
        default="ramped", help="ramped: averages that soon forget how they began."
    )

    def validate(self) -> None:
        """Checks that ranges are seen before they are frozen, or rounded to."""
        frozen = self.freeze_ranges_step
        if frozen is not None and frozen < self.quantize_start_step:
            raise HyperparameterError(
                "freeze_ranges_step: expected at least quantize_start_step="
                f"{self.quantize_start_step}, or None; received {frozen}."
            )

    @property
    def quantizes(self) -> bool:
        """Whether the model trains for 8 bits."""
        return self.quantize != "none"

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Has layers that are made meanwhile compute in this precision."""
        from tfgpipe.capture import dtype_policies

        return dtype_policies.default_policy_scope(self.policy)

    def apply(
        self,
        model_or_layers: Any,
        rules: Callable[[], Mapping[type, QuantizeConfig]] = dict,
    ) -> Any:
        """Returns a model, or layers, trained for 8 bits if that is asked for.

        Args:
            model_or_layers: As of `tfgpipe.quantization.apply`.
            rules: Returns how layers of an experiment's own are quantized.

        Raises:
            HyperparameterError: If it cannot be.
        """
        if not self.quantizes:
            return model_or_layers
        from tfgpipe import quantization

        activations = quantization.MovingAverageRange(ramp=self.ranges == "ramped")
        scheme = quantization.default_8bit(activations=activations)
        for kind, rule in rules().items():
            scheme = scheme.with_rule(kind, rule)
        try:
            return quantization.apply(
                model_or_layers,
                scheme=scheme,
                delay=self.quantize_start_step,
                freeze_after=self.freeze_ranges_step,
            )
        except ValueError as error:
            raise HyperparameterError(f"precision.quantize: {error}") from None
