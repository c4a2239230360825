"""What a pipeline refuses, and the words in which it does.

Each check returns the value it was given, or raises an error that says what is wrong,
what was received and what to try.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import keras
import tensorflow as tf

from tfgpipe import normalization, recording, seams


def dense_tensors(inputs: Any, name: str) -> None:
    """Raises TypeError if there is a ragged or sparse tensor among the inputs."""
    # Not `keras.tree`, which would take them for structures.
    for tensor in tf.nest.flatten(inputs):
        if isinstance(tensor, tf.RaggedTensor):
            raise TypeError(
                "A pipeline takes padded tensors, since microbatches of a ragged one "
                f"have no common shape. Layer '{name}' received a RaggedTensor of "
                f"shape {tensor.shape}. Pad it with `x.to_tensor()`, and mark the "
                "padding: `keras.layers.Embedding(..., mask_zero=True)` or "
                "`keras.layers.Masking()` as the first layer."
            )
        if isinstance(tensor, tf.SparseTensor):
            raise TypeError(
                f"A pipeline takes dense tensors. Layer '{name}' received a "
                f"SparseTensor of shape {tensor.shape}. Convert it with "
                "`tf.sparse.to_dense(x)`, or keep the layer that reads it outside."
            )


def same_structure(expected: Any, received: Any) -> None:
    """Raises ValueError if inputs are nested otherwise than when it was built.

    Where there was a tensor there may be None, but not the other way round.
    """
    try:
        keras.tree.assert_same_structure(expected, received)
        pairs = zip(*map(keras.tree.flatten, (expected, received)), strict=True)
        same = all(a is not None or b is None for a, b in pairs)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            "A pipeline is called on the structure of inputs it was built with. "
            f"Expected {_outline(expected)}; received {_outline(received)}. Nest the "
            "inputs in the same way."
        )


def _outline(structure: Any) -> str:
    shapes = keras.tree.map_structure(
        lambda x: "None" if x is None else f"Tensor(shape={tuple(x.shape)})", structure
    )
    return str(shapes).replace("'", "")


def side_inputs_are_asked_for(
    layers: Sequence[keras.layers.Layer], side_inputs: Iterable[str]
) -> None:
    """Raises ValueError if no layer has an argument of a side input's name."""
    for name in side_inputs:
        if not any(recording.asks_for(layer, name) for layer in layers):
            raise ValueError(
                "A side input goes to every layer whose `call` has an argument of its "
                f"name. Received '{name}', which no layer asks for. Name the argument "
                f"of the layer that uses it, `def call(self, x, {name}=None)`, or "
                "leave it out."
            )


def same_side_inputs(expected: Sequence[str], received: Mapping[str, Any]) -> None:
    """Raises ValueError for a side input that it was not built with."""
    given = [name for name, x in received.items() if x is not None]
    new = [name for name in given if name not in expected]
    if new:
        raise ValueError(
            "Side inputs are those that the pipeline was built with. Expected "
            f"{list(expected) or 'none'}; received {new}. Pass them in the first call "
            "as well; a Functional model takes them as inputs of its own."
        )


def equal_batches(tensors: Mapping[str, tf.Tensor]) -> None:
    """Raises ValueError if inputs have no rows, or differ in their number."""
    for name, tensor in tensors.items():
        if len(tensor.shape) == 0:
            raise ValueError(
                "All inputs of a pipeline are cut into microbatches, along their first "
                f"axis. Received a scalar, of shape (), as {name}. Give it a batch "
                "dimension, or keep it in a layer."
            )
    (first, batch), *others = [(name, x.shape[0]) for name, x in tensors.items()]
    for name, rows in others:
        if rows is not None and batch is not None and rows != batch:
            raise ValueError(
                "All inputs of a pipeline are cut into microbatches together, so all "
                f"have the same number of rows. Received {batch} rows of {first} and "
                f"a shape {tuple(tensors[name].shape)} of {name}. Repeat {name} for "
                "each row, `tf.repeat(x[None], rows, axis=0)`, or keep it in a layer."
            )


def compiles_on_one_device(jit_compile: bool | str, num_shards: int) -> None:
    """Raises ValueError if XLA is asked for stages of several devices."""
    if jit_compile is True and num_shards > 1:
        raise ValueError(
            "XLA compiles for one device, and a stage in shards is on several. "
            f"Received jit_compile=True with layers in {num_shards} shards. Leave "
            "`jit_compile` out."
        )


# Their update of an entry depends on others of the same weight.
_OF_WHOLE_WEIGHTS = (
    keras.optimizers.Adafactor,
    keras.optimizers.Lamb,
    keras.optimizers.Muon,
)


def updates_entries_one_by_one(
    optimizer: keras.optimizers.Optimizer, num_shards: int
) -> None:
    """Warns of an optimizer to which a part of a weight is a weight of its own."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    of_whole = isinstance(inner, _OF_WHOLE_WEIGHTS)
    if num_shards == 1 or not (of_whole or inner.clipnorm):
        return
    what = type(inner).__name__ if of_whole else f"clipnorm={inner.clipnorm}"
    warnings.warn(
        "The parts of a weight in shards are updated one by one, as if they were "
        f"weights. Received {what}, which takes a norm, a mean or a product of a whole "
        "weight: training differs from that of the layers without shards. Use an "
        "optimizer such as Adam, and `global_clipnorm`.",
        stacklevel=3,
    )


def no_memory_of_rows(called: Iterable[Any]) -> None:
    """Raises ValueError for a recurrent layer that remembers the batch before."""
    for layer in called:
        for inner in seams.inner_layers(layer):
            if isinstance(inner, keras.layers.RNN) and inner.stateful:
                raise ValueError(
                    "A recurrent layer with `stateful=True` goes on where the batch "
                    "before ended, row by row, and would take one microbatch for the "
                    f"next of another. Received '{inner.name}'. Use `stateful=False` "
                    "and hand its state over as inputs and outputs of the model, or "
                    "keep the layer outside the pipeline."
                )


def no_overwriting(called: Iterable[Any]) -> None:
    """Raises ValueError for float8 layers, whose "gradients" are new values."""
    for layer in called:
        for inner in seams.inner_layers(layer):
            overwritten = [v for v in inner.variables if v.overwrite_with_gradient]
            if inner.quantization_mode == "float8" or overwritten:
                raise ValueError(
                    "Layers of float8 hand their new scales to the optimizer as "
                    "gradients, and a pipeline adds up the gradients of microbatches. "
                    f"Received layer '{inner.name}' of policy "
                    f"{inner.dtype_policy.name!r}. Use 'mixed_bfloat16', or keep the "
                    "layer outside the pipeline."
                )


def state_moves_once_a_microbatch(
    called: Iterable[Any], changed: Iterable[keras.Variable]
) -> None:
    """Warns of variables other than seeds that each microbatch has changed.

    Batch normalization is left out: `batch_norm_is_deferred` speaks of it.
    """
    called = list(called)
    norms = [v for norm in normalization.batch_norms(called) for v in norm.variables]
    known = {id(v) for v in norms}
    known.update(id(v) for layer in called for v in seams.seeds(layer))
    names = [v.path for v in changed if id(v) not in known]
    if names:
        warnings.warn(
            "Some layers change variables of their own whenever they are called, and "
            "in a pipeline that is once a microbatch, in order, rather than once a "
            f"step. Received {_some(names)}. Use `num_microbatches=1`, or change them "
            "outside the pipeline, if that is not meant.",
            stacklevel=2,
        )


# What other libraries call an argument, and what to use here.
_ARGUMENTS_ELSEWHERE = {
    **dict.fromkeys(
        ("chunks", "num_chunks", "n_microbatches", "num_micro_batches", "microbatches"),
        "Use `num_microbatches`.",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "microbatch_size"),
        "Use `num_microbatches`: the number of rows of a batch, divided by it.",
    ),
    **dict.fromkeys(
        ("num_partitions", "stages", "n_stages", "num_pipeline_stages"),
        "Use `num_stages`.",
    ),
    **dict.fromkeys(
        ("split_spec", "split_points"),
        "Use `balance`, with the names of the layers that end each stage but the last.",
    ),
    **dict.fromkeys(
        ("checkpoint", "recompute"),
        'Use `remat`: "stage" for torchgpipe\'s "always", "except_last", or "none" for '
        '"never".',
    ),
    "schedule": "Use `tfgpipe.PipelinedModel`, or `tfgpipe.pipeline(model, ...)`: "
    "schedules beyond GPipe's need the loss inside the pipeline.",
    "loss_fn": "Use `tfgpipe.PipelinedModel`, and `compile(loss=...)`.",
}
_Call = TypeVar("_Call", bound=Callable[..., Any])


def names_of_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], *others: str
) -> None:
    """Raises TypeError for an argument by the name that another library has for it.

    Python by itself would complain of the argument that is missing in its place.

    Args:
        function: What is called.
        given: The keyword arguments.
        *others: Names that the function's `**kwargs` takes.
    """
    known = {*inspect.signature(function).parameters, *others}
    for name in given:
        if name in _ARGUMENTS_ELSEWHERE and name not in known:
            raise TypeError(
                "An argument has another name here, or another place. Received "
                f"{name}={given[name]!r}. {_ARGUMENTS_ELSEWHERE[name]}"
            )


def with_names_checked(*others: str) -> Callable[[_Call], _Call]:
    """Decorates a function to call `names_of_arguments` first."""

    def decorated(function: _Call) -> _Call:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            names_of_arguments(function, kwargs, *others)
            return function(*args, **kwargs)

        return cast(_Call, checked)

    return decorated


def layer_list(
    layers: Sequence[keras.layers.Layer],
) -> Sequence[keras.layers.Layer]:
    """Returns `layers` if it is a non-empty list of Keras layers."""
    if isinstance(layers, keras.Model):
        raise TypeError(
            "A pipeline cuts Functional and Sequential models, whose calls Keras "
            f"knows. Received '{layers.name}' of type {type(layers).__name__}, which "
            "has a `call` of its own. Give its layers as a list, or write it with "
            "`keras.Model(inputs, outputs)`."
        )
    if not isinstance(layers, Sequence) or not layers:
        raise ValueError(
            "`layers` must be a non-empty list of Keras layers, or a Keras model. "
            f"Received {layers!r}."
        )
    for position, layer in enumerate(layers):
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(
                "`layers` must hold Keras layers. Received at position "
                f"{position}: {layer!r} of type {type(layer).__name__}. Wrap a "
                "function as `keras.layers.Lambda(function)`."
            )
    return layers


def counts_for_stages(
    counts: Sequence[int], given: Sequence[Any], num_stages: int | None
) -> None:
    """Raises ValueError if a cut is for another number of stages than was given."""
    if num_stages not in (None, len(counts)):
        raise ValueError(
            "A `balance` list says how many stages there are. Received num_stages="
            f"{num_stages} and balance={list(given)}, which makes {len(counts)}. Leave "
            "`num_stages` out."
        )


def num_microbatches(num_microbatches: int) -> int:
    """Returns M if it is a positive integer."""
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(
            "`num_microbatches` must be an integer of at least 1. Received "
            f"{num_microbatches!r}. Four times the number of stages is a good start."
        )
    return num_microbatches


def choice(argument: str, value: Any, choices: Sequence[Any]) -> Any:
    """Returns the value of an argument if it is one of the choices."""
    if not any(value is choice or value == choice for choice in choices):
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{argument}` must be one of {expected}. Received {value!r}.")
    return value


def batch_norm_is_deferred(calls: Iterable[Any], batch_norm: str) -> None:
    """Warns of moving averages that would move once a microbatch."""
    norms = [norm for norm in normalization.batch_norms(calls) if norm.trainable]
    moved = [
        x for x in norms if not isinstance(x, normalization.DeferredBatchNormalization)
    ]
    if batch_norm == "deferred":
        moved = [norm for norm in moved if not normalization.is_handled(norm)]
        way_out = (
            "These renormalise, or have a class of their own, which cannot be made to "
            "wait: let the class inherit from "
            "`tfgpipe.layers.DeferredBatchNormalization`, use "
        )
    else:
        way_out = 'Try `batch_norm="deferred"` for the averages, '
    if not moved:
        return
    warnings.warn(
        "Batch normalization sees one microbatch at a time in a pipeline: each is "
        "normalised on its own, and the moving averages move once for each, so that "
        "evaluation differs from that of the unpipelined model. Received "
        f"{len(moved)} such layers: {_some([norm.name for norm in moved])}. {way_out}"
        "`num_microbatches=1` for everything, or GroupNormalization or "
        "LayerNormalization, which know no batch.",
        stacklevel=2,
    )


def can_synchronize(calls: Iterable[Any]) -> None:
    """Raises ValueError for a layer that would sum over replicas and cannot."""
    for norm in normalization.batch_norms(calls):
        if norm.synchronized and norm.trainable and not normalization.is_handled(norm):
            raise ValueError(
                "Keras sums over replicas only outside a pipeline; inside, tfgpipe "
                "does, for Keras' own layer. Received "
                f"'{norm.name}' of type {type(norm).__name__} with synchronized=True, "
                "which renormalises or has a class of its own. Let the class inherit "
                "from `tfgpipe.layers.DeferredBatchNormalization`, or leave "
                "`synchronized` out."
            )


def can_run_on_tpu(
    num_rows: int | None, *, num_replicas: int = 1, timed: bool = False
) -> None:
    """Raises ValueError for what a computation for TPUs cannot hold.

    Args:
        num_rows: Rows of the mini-batch, if they are known.
        num_replicas: How many replicas layers sum over.
        timed: Whether actions are to be timed.
    """
    if num_rows is None:
        raise ValueError(
            "On TPUs the number of rows of a mini-batch must be known, since XLA "
            "compiles for known shapes. Received a mini-batch of any number. Use "
            "`dataset.batch(size, drop_remainder=True)`."
        )
    if num_replicas > 1:
        raise ValueError(
            "On TPUs layers in a pipeline cannot sum over replicas. Received "
            f"`synchronized=True` in training on {num_replicas} replicas. Leave it "
            'out, and try `batch_norm="deferred"`.'
        )
    if timed:
        raise ValueError(
            "On TPUs single actions cannot be timed, since XLA compiles a step as a "
            "whole. Received a TimelineCallback. Use `tf.profiler` instead."
        )


def _some(names: Sequence[str]) -> str:
    """Names the first few, and says how many more there are."""
    first = ", ".join(f"'{name}'" for name in names[:3])
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")
