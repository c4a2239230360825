"""The configuration of a pipeline: all that a user chooses.

`PipelinedLayer`, `PipelinedModel`, `pipeline` and `plan` take its fields as keyword
arguments, and hold it. A new option is a field of `PipelineConfig`, documented there;
the type of its argument, among the options below; and the place that uses it.
Signatures, documentation and saved models follow.
"""

# ruff: noqa: RUF009  (`option` returns a field.)

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Required,
    TypeAlias,
    TypedDict,
    TypeVar,
    get_args,
)

from tfgpipe._util import argument_checks, docstrings
from tfgpipe.partition import balances
from tfgpipe.partition.balances import Balance, BalanceLike
from tfgpipe.partition.given import Partition
from tfgpipe.partition.step_config import StepConfig, option, saved
from tfgpipe.remat import RematLike
from tfgpipe.schedules import Schedule, SchedulePolicy

if TYPE_CHECKING:
    from tfgpipe.partition.profiles import PlanSettings
    from tfgpipe.runtime import AddedLosses
    from tfgpipe.stage import Codec, StageOptions, normalization
    from tfgpipe.stage.codecs import CodecLike

_Face = TypeVar("_Face", bound=Callable[..., Any])

# An argument `schedule`: a `ScheduleName`, which may have `+offload` behind it.
ScheduleLike: TypeAlias = str | SchedulePolicy | Schedule

JitCompile = bool | Literal["auto"]


class _Options(TypedDict, total=False):
    """Arguments of all that partitions a model."""

    num_stages: int | None
    num_microbatches: Required[int]
    balance: BalanceLike | Sequence[int] | Sequence[str]
    partition: Sequence[int] | Sequence[str] | None
    memory_limit: float | Sequence[float] | None
    device_speeds: Sequence[float] | None
    remat: RematLike
    transfer_dtype: CodecLike


class PlanOptions(_Options, total=False):
    """Arguments of `plan`."""

    schedule: ScheduleLike


class LayerOptions(_Options, total=False):
    """Arguments of a `PipelinedLayer`."""

    jit_compile: JitCompile
    batch_norm: normalization.BatchNorm
    added_losses: AddedLosses
    offload_optimizer: bool
    devices: Sequence[str] | None
    dtype: Any


class ModelOptions(PlanOptions, LayerOptions, total=False):
    """Arguments of a `PipelinedModel`."""


def _find_codec(transfer_dtype: Any) -> Codec:
    from tfgpipe.stage import codecs

    return codecs.find(transfer_dtype)


def _find_jit_compile(value: Any) -> JitCompile:
    choices = ("auto", True, False)
    found: JitCompile = argument_checks.check_choice("jit_compile", value, choices)
    return found


def _find_batch_norm(value: Any) -> normalization.BatchNorm:
    from tfgpipe.stage import normalization

    choices = get_args(normalization.BatchNorm)
    found: normalization.BatchNorm
    found = argument_checks.check_choice("batch_norm", value, choices)
    return found


def _find_added_losses(value: Any) -> AddedLosses:
    from tfgpipe import runtime

    choices = get_args(runtime.AddedLosses)
    found: AddedLosses = argument_checks.check_choice("added_losses", value, choices)
    return found


def _find_offload_optimizer(value: Any) -> bool:
    argument_checks.check_choice("offload_optimizer", value, (True, False))
    return bool(value)


def _as_list(value: Any) -> Any:
    """Returns a tuple as a list, as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig(StepConfig):
    """All that a user chooses about a pipeline.

    Attributes:
        num_stages: Number of stages, K, counting each of several on one device.
            Defaults to that of `partition`, else of the schedule or of the
            `PipelineStrategy` in scope, else to as many as `devices`, or visible GPUs
            or logical CPUs, are enough for. `schedule="interleaved"` has no default.
        num_microbatches: Number of microbatches of a mini-batch, M. Should be several
            times K: devices idle for (K - 1) / (M + K - 1) of the time. A mini-batch of
            fewer examples than M is split into single ones.
        schedule: Order of forwards and backwards on each device: `"gpipe"`, `"1f1b"`,
            `"interleaved"`, `"zero_bubble"`, another of `tfgpipe.schedules.NAMES`,
            `"auto"` for the best that a search finds for the FLOPs of the stages, a
            `tfgpipe.schedules.SchedulePolicy`, or a `tfgpipe.Schedule`. With `+offload`
            behind a name, microbatches wait for their backward in the memory of the
            host: see `tfgpipe.schedules.Offload`.
        remat: Rematerialisation: activations that backwards recompute. `"stage"` keeps
            the inputs of each stage, and recomputes the rest in the backward; `"layer"`
            recomputes layer by layer as well, never holding a whole stage's
            activations; `"except_last"` is `"stage"` except for microbatches whose
            backward follows at once; `"products"` keeps the results of matrix products
            and convolutions as well, and recomputes what lies between; `"auto"` keeps
            what spares most FLOPs, as much as fits within `memory_limit`, or within
            what `"stage"` needs; `"none"` keeps all activations. Or a
            `tfgpipe.remat.Remat` of your own, such as
            `tfgpipe.remat.ProductsRemat(ops)` for the results of other operations.
        balance: Cost whose largest stage value, the bottleneck, the partition
            minimises: `"params"`; `"flops"`, counted in the layers' traced forward and
            backward; `"time"`, measured by running each layer's forward and backward on
            a microbatch; or `"memory"`, the bytes of weights, gradients, optimizer
            slots and activations. See `tfgpipe.plan`. Or a `tfgpipe.Balance` of your
            own, such as a function of a layer's cost.
        partition: A given partition instead: each stage's number of layers (calls of
            layers, in a model), or the names of the layers that end each stage but the
            last.
        memory_limit: Bytes that a device has for weights, gradients, two optimizer
            slots a weight, and activations, of all its stages; or a number for each
            of the P devices. None for no limit.
        device_speeds: Relative speed of each of the P devices: a stage on a device of
            speed 0.5 takes twice the time that it takes on one of speed 1, and gets
            less of the model. None for equal ones.
        transfer_dtype: Dtype of values on their way from stage to stage, forward and
            backward: `"bfloat16"` or `"float16"`; or, forward alone, `"int8"`, with a
            scale for each example, or `"int8_channel"`, with one for each channel of
            a microbatch. Or a `tfgpipe.Codec` of your own. Defaults to no compression,
            which all else is an approximation of: `docs/how-to/half-precision.md` has
            measured errors.
        jit_compile: True if XLA compiles each stage's functions. `"auto"` does so on
            GPUs; on CPUs it compiles large chains of elementwise operations and
            reductions, such as a normalization, and everything else runs on TensorFlow
            kernels. Stages in shards are not compiled.
        batch_norm: Time at which `BatchNormalization` layers, wherever they are, update
            their moving statistics: `"microbatch"` for every microbatch, by its
            statistics, or `"deferred"` for once a step, by those of the whole
            mini-batch, as they do unpipelined.
            (`tfgpipe.layers.DeferredBatchNormalization` does always.)
        added_losses: Examples of which a loss is taken that a layer adds and that
            couples them, as one does that balances experts: those of the
            `"mini_batch"`, as unpipelined, for which a step of a `PipelinedModel` first
            runs all forwards; or those of each `"microbatch"`, of which the mean is
            taken, as gradient accumulation does. Other losses are exact anyway.
        offload_optimizer: True to have the optimizer's slots in the memory of the host,
            which then computes the updates (Ren et al. 2021, "ZeRO-Offload", section
            3). For one replica.
        devices: Names of K devices, such as `["GPU:0", "GPU:1"]`; of K * T, those of
            one stage next to each other, if layers are split into T shards. With a
            schedule that has several stages on a device, names of the P devices, to
            which stages are dealt round robin. Not to be given under a
            `PipelineStrategy`, which has devices of its own.
        dtype: A dtype or dtype policy such as `"mixed_bfloat16"`, for the layers inside
            that were made without one, as if Keras' global policy had been this one.
            Defaults to leaving them as they are. See `docs/how-to/half-precision.md`.
    """

    balance: Balance = option(balances.find, "params", save=saved("save_balance"))
    partition: Partition | None = option(
        lambda value: None if value is None else Partition.of(value),
        None,
        save=lambda value: None if value is None else list(value.entries),
    )
    memory_limit: argument_checks.MemoryLimit = option(
        argument_checks.check_memory_limit, None, save=_as_list
    )
    device_speeds: tuple[float, ...] | None = option(
        argument_checks.check_device_speeds, None, save=_as_list
    )
    transfer_dtype: Codec = option(_find_codec, None, save=saved("save_codec"))
    jit_compile: JitCompile = option(_find_jit_compile, "auto")
    batch_norm: normalization.BatchNorm = option(_find_batch_norm, "microbatch")
    added_losses: AddedLosses = option(_find_added_losses, "mini_batch")
    offload_optimizer: bool = option(_find_offload_optimizer, False)
    devices: tuple[str, ...] | None = option(
        argument_checks.check_device_names, None, save=_as_list
    )
    dtype: Any = option(lambda value: value, None, save=saved("save_dtype"))

    def __post_init__(self) -> None:
        # `balance` was once the argument for a given partition as well.
        if not isinstance(self.balance, str) and isinstance(self.balance, Iterable):
            if self.partition is not None:
                raise ValueError(
                    "`balance` is a quantity, and `partition` a given partition. "
                    f"Received balance={self.balance!r} beside it. Leave it out."
                )
            object.__setattr__(self, "partition", self.balance)
            object.__setattr__(self, "balance", "params")
        super().__post_init__()

    @classmethod
    def split(
        cls, options: Mapping[str, Any], takes: type
    ) -> tuple[PipelineConfig, dict[str, Any]]:
        """Returns the configuration of some arguments, and the arguments left over.

        Args:
            options: Keyword arguments of a public class or function.
            takes: The options that it takes: a typed dictionary.

        Raises:
            TypeError: If an argument is missing, or has its name in another library.
            ValueError: If an argument is none of its choices.
        """
        known = takes.__annotations__
        others = {name: x for name, x in options.items() if name not in known}
        argument_checks.check_argument_names(others)
        return cls(**{n: x for n, x in options.items() if n in known}), others

    @classmethod
    def of(cls, options: Mapping[str, Any], takes: type) -> PipelineConfig:
        """Returns the configuration of arguments, as `split` does, if none is left."""
        config, others = cls.split(options, takes)
        if others:
            raise TypeError(
                f"There is no argument {', '.join(map(repr, others))}. Expected "
                f"{', '.join(takes.__annotations__)}."
            )
        return config

    @classmethod
    def default_of(cls, name: str) -> Any:
        """Returns the default argument of a field."""
        return cls.__dataclass_fields__[name].metadata["default"]

    @classmethod
    def summary_of(cls, name: str) -> str:
        """Returns the first words of the documentation of a field, as a sentence.

        >>> tfgpipe.PipelineConfig.summary_of("num_microbatches")
        'Number of microbatches of a mini-batch, M.'
        """
        words = " ".join(documented_options([name])).split()[1:]
        return re.split(r"\.(?: |$)|: `", " ".join(words))[0] + "."

    @classmethod
    def from_saved(cls, arguments: Mapping[str, Any]) -> PipelineConfig:
        """Returns the configuration that `saved_arguments` is of.

        Its fields are arguments of `tfgpipe.pipeline`:

        >>> import json
        >>> config = tfgpipe.PipelineConfig(num_stages=2, num_microbatches=4)
        >>> text = json.dumps(config.saved_arguments())
        >>> tfgpipe.PipelineConfig.from_saved(json.loads(text)) == config
        True
        """
        from tfgpipe.partition import saved_choices

        return cls(**saved_choices.load_options(arguments))

    def with_partition(self, partition: Any) -> PipelineConfig:
        """Returns the configuration with another given partition."""
        return dataclasses.replace(self, partition=Partition.of(partition))

    @property
    def stage_options(self) -> StageOptions:
        """The options of each stage, before its device and the step are known."""
        from tfgpipe.stage import StageOptions

        return StageOptions(
            remat=self.remat.within(self.memory_limit),
            jit_compile=self.jit_compile,
            batch_norm=self.batch_norm,
            codec=self.transfer_dtype,
        )

    def plan_settings(
        self,
        schedule: Schedule,
        num_slots: int,
        *,
        order: SchedulePolicy | Schedule | None = None,
    ) -> PlanSettings:
        """Returns the settings of a plan.

        Args:
            schedule: The schedule.
            num_slots: Slots of an optimizer; those on the host are not counted.
            order: Policy that makes another schedule for the stages, if one does.
        """
        from tfgpipe.partition.profiles import PlanSettings

        return PlanSettings(
            num_stages=schedule.num_stages,
            num_microbatches=self.num_microbatches,
            remat=self.remat,
            memory_limit=self.memory_limit,
            speeds=argument_checks.of_each_device(
                "device_speeds", self.device_speeds, schedule.num_devices, 1.0
            ),
            num_slots=0 if self.offload_optimizer else num_slots,
            codec=self.transfer_dtype,
            schedule=schedule,
            order=order or schedule,
        )

    def saved_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `from_saved`, as JSON has them."""
        return {
            field.name: field.metadata["save"](getattr(self, field.name))
            for field in dataclasses.fields(self)
        }


def takes_options(options: type) -> Callable[[_Face], _Face]:
    """Decorates a class or function whose `**options` are fields of `PipelineConfig`.

    Its signature and docstring then have each of them.

    Args:
        options: The typed dictionary of its options.
    """
    fields = [
        field
        for field in dataclasses.fields(PipelineConfig)
        if field.name in options.__annotations__
    ]

    def decorated(face: _Face) -> _Face:
        function: Any = face.__init__ if inspect.isclass(face) else face
        signature = inspect.signature(function)
        parameters = []
        for each in signature.parameters.values():
            if each.kind is each.VAR_KEYWORD:
                parameters += [_parameter(field, options) for field in fields]
            else:
                parameters.append(each)
        function.__signature__ = signature.replace(parameters=parameters)
        face.__doc__ = docstrings.with_entries(
            face.__doc__, "**options", documented_options([x.name for x in fields])
        )
        return face

    return decorated


def documented_options(names: Sequence[str]) -> list[str]:
    """Returns the documentation of some fields of `PipelineConfig`, as lines."""
    entries = docstrings.entries(PipelineConfig.__doc__)
    return [line for name in names for line in entries.get(name, ())]


def _parameter(field: dataclasses.Field[Any], options: type) -> inspect.Parameter:
    annotation = options.__annotations__[field.name].__forward_arg__
    default = field.metadata["default"]
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
        annotation = annotation.removeprefix("Required[").removesuffix("]")
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=annotation,
    )
