"""Models of keras-hub whose examples are independent are exact up to rounding.

Models of keras-hub: gradients of the pipeline against those of the plain model.

    python -m benchmarks.studies.keras_hub --families=llama,swin

Each family is made at a small size with random weights, in float64, and takes one
mini-batch of 8 examples twice: as it is, and as a `PipelinedLayer` of K stages and M
microbatches that holds the same weights. Columns: the largest difference of two
outputs, and of two gradients of a weight, of the largest entry of that output or
gradient; `one by one`, that of gradients if the plain model takes the mini-batch one
microbatch after another; the smallest type of floats in the model, since some families
compute in float32 whatever they are asked. Below are the pipeline's warnings, and the
errors of families that cannot be pipelined.

Where a layer mixes the examples of a batch only `one by one` is rounding, and a warning
names the layer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from benchmarks import tables

BATCH, LENGTH, IDS = 8, 6, 11
NUM_STAGES, NUM_MICROBATCHES = 2, 4

# Sizes of a small transformer, by the names that most families have for them.
_SMALL = {
    "vocabulary_size": IDS,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 12,
}
_NO_DROPOUT = {**_SMALL, "dropout": 0.0}
# The same with fewer heads for keys than for queries.
_GROUPED = {
    "vocabulary_size": IDS,
    "num_layers": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 8,
    "intermediate_dim": 12,
}
_IMAGE = (16, 16, 3)
_VISION = {
    "image_shape": _IMAGE,
    "patch_size": 4,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        make: Makes a small one.
        sizes: Sizes of inputs, but for the first, that the model leaves open, by the
            input's name. Others are `LENGTH`.
        exact: Whether examples of a batch are independent, so that the pipeline is
            exact.
        floatx: The type of floats; float32 where the plain model takes no other.
    """

    make: Callable[[], keras.Model]
    sizes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    exact: bool = True
    floatx: str = "float64"


def _of(name: str, **arguments: Any) -> Callable[[], keras.Model]:
    """Returns a function that makes a model of a class of `keras_hub.models`."""

    def make() -> keras.Model:
        import keras_hub

        return getattr(keras_hub.models, name)(**arguments)

    return make


def _clip() -> keras.Model:
    import keras_hub

    vision = keras_hub.models.CLIPVisionEncoder(**_VISION, intermediate_dim=12)
    text = keras_hub.models.CLIPTextEncoder(
        **_SMALL, embedding_dim=8, max_sequence_length=LENGTH
    )
    return keras_hub.models.CLIPBackbone(vision, text, projection_dim=4)


def _mmdit() -> keras.Model:
    """Returns what is trained of Stable Diffusion 3."""
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    return MMDiT(
        patch_size=2,
        hidden_dim=8,
        num_layers=2,
        num_heads=2,
        position_size=8,
        latent_shape=(4, 4, 3),
        context_shape=(None, 8),
        pooled_projection_shape=(6,),
    )


def _sam() -> keras.Model:
    import keras_hub

    encoder = keras_hub.models.ViTDetBackbone(
        hidden_size=8,
        num_layers=2,
        intermediate_dim=12,
        num_heads=2,
        global_attention_layer_indices=[1],
        image_shape=_IMAGE,
        patch_size=4,
        num_output_channels=8,
        window_size=2,
    )
    prompts = keras_hub.layers.SAMPromptEncoder(
        hidden_size=8,
        image_embedding_size=(4, 4),
        input_image_size=_IMAGE[:2],
        mask_in_channels=16,
    )
    decoder = keras_hub.layers.SAMMaskDecoder(
        num_layers=1,
        hidden_size=8,
        intermediate_dim=8,
        num_heads=2,
        embedding_dim=8,
    )
    return keras_hub.models.SAMBackbone(encoder, prompts, decoder)


_MIXTURE = {**_GROUPED, "num_experts": 3, "top_k": 2}

FAMILIES = {
    "albert": Family(_of("AlbertBackbone", **_NO_DROPOUT, embedding_dim=6)),
    "bart": Family(_of("BartBackbone", **_NO_DROPOUT)),
    "bert": Family(_of("BertBackbone", **_NO_DROPOUT)),
    "bloom": Family(_of("BloomBackbone", **_NO_DROPOUT)),
    "clip": Family(_clip, exact=False),
    "deberta_v3": Family(_of("DebertaV3Backbone", **_NO_DROPOUT, bucket_size=4)),
    "deit": Family(_of("DeiTBackbone", **_VISION, intermediate_dim=12)),
    "densenet": Family(
        _of(
            "DenseNetBackbone",
            stackwise_num_repeats=[1, 1, 1],
            image_shape=(32, 32, 3),
            growth_rate=4,
        ),
        exact=False,
    ),
    "dinov2": Family(
        _of(
            "DINOV2Backbone",
            **_VISION,
            intermediate_dim=12,
            position_embedding_shape=_IMAGE,
        )
    ),
    "distil_bert": Family(_of("DistilBertBackbone", **_NO_DROPOUT)),
    "electra": Family(
        _of(
            "ElectraBackbone",
            vocab_size=IDS,
            num_layers=2,
            num_heads=2,
            hidden_dim=8,
            embedding_dim=6,
            intermediate_dim=12,
            dropout=0.0,
        )
    ),
    "efficientnet": Family(
        _of(
            "EfficientNetBackbone",
            stackwise_kernel_sizes=[3, 3],
            stackwise_num_repeats=[1, 1],
            stackwise_input_filters=[8, 8],
            stackwise_output_filters=[8, 8],
            stackwise_expansion_ratios=[1, 2],
            stackwise_squeeze_and_excite_ratios=[0.25, 0.25],
            stackwise_strides=[1, 2],
            stackwise_block_types=["v1", "v1"],
            stackwise_force_input_filters=[0, 0],
            stackwise_nores_option=[False, False],
            stackwise_width_coefficients=[1.0, 1.0],
            stackwise_depth_coefficients=[1.0, 1.0],
            dropout=0.0,
            num_features=8,
            input_shape=_IMAGE,
        ),
        exact=False,
    ),
    "f_net": Family(
        _of(
            "FNetBackbone",
            vocabulary_size=IDS,
            num_layers=2,
            hidden_dim=8,
            intermediate_dim=12,
            dropout=0.0,
        )
    ),
    "falcon": Family(
        _of(
            "FalconBackbone",
            vocabulary_size=IDS,
            num_layers=2,
            num_attention_heads=2,
            hidden_dim=8,
            intermediate_dim=12,
        )
    ),
    "gemma": Family(_of("GemmaBackbone", **_GROUPED, head_dim=4)),
    "gemma3": Family(
        _of(
            "Gemma3Backbone",
            **{**_GROUPED, "num_layers": 6},
            image_size=16,
            head_dim=4,
            use_sliding_window_attention=True,
            sliding_window_size=3,
        )
    ),
    "gpt2": Family(_of("GPT2Backbone", **_NO_DROPOUT)),
    "gpt_neo_x": Family(_of("GPTNeoXBackbone", **{**_SMALL, "hidden_dim": 16})),
    "gpt_oss": Family(_of("GptOssBackbone", **_MIXTURE, head_dim=4)),
    "llama": Family(_of("LlamaBackbone", **_GROUPED)),
    "llama3": Family(_of("Llama3Backbone", **_GROUPED)),
    "mistral": Family(_of("MistralBackbone", **_GROUPED)),
    "mit": Family(  # Its attention drops out at a rate of its own.
        _of(
            "MiTBackbone",
            layerwise_depths=[1, 1],
            num_layers=2,
            layerwise_num_heads=[1, 2],
            layerwise_sr_ratios=[2, 1],
            max_drop_path_rate=0.0,
            layerwise_patch_sizes=[7, 3],
            layerwise_strides=[4, 2],
            image_shape=(16, 16, 3),
            hidden_dims=[4, 8],
        ),
        exact=False,
    ),
    "mixtral": Family(_of("MixtralBackbone", **_MIXTURE), floatx="float32"),
    "mmdit": Family(_mmdit),
    "opt": Family(_of("OPTBackbone", **_NO_DROPOUT)),
    "phi3": Family(_of("Phi3Backbone", **_GROUPED)),
    "qwen": Family(_of("QwenBackbone", **_GROUPED)),
    "qwen3": Family(_of("Qwen3Backbone", **_GROUPED, head_dim=4)),
    "qwen_moe": Family(
        _of(
            "QwenMoeBackbone",
            **_MIXTURE,
            moe_intermediate_dim=6,
            shared_expert_intermediate_dim=6,
        ),
        floatx="float32",
    ),
    "resnet": Family(
        _of(
            "ResNetBackbone",
            input_conv_filters=[64],
            input_conv_kernel_sizes=[3],
            stackwise_num_filters=[64, 64],
            stackwise_num_blocks=[1, 1],
            stackwise_num_strides=[1, 2],
            block_type="basic_block",
            image_shape=_IMAGE,
        ),
        exact=False,
    ),
    "roberta": Family(_of("RobertaBackbone", **_NO_DROPOUT)),
    "rwkv7": Family(
        _of(
            "RWKV7Backbone",
            vocabulary_size=IDS,
            num_layers=2,
            hidden_size=8,
            head_size=4,
            intermediate_dim=12,
            gate_lora=4,
            mv_lora=4,
            aaa_lora=4,
            decay_lora=4,
        )
    ),
    "sam": Family(
        _sam,
        {
            "points": (2,),
            "labels": (2,),
            "boxes": (1,),
            "masks": (1, *_IMAGE[:2]),
        },
    ),
    "swin": Family(
        _of(
            "SwinTransformerBackbone",
            image_shape=(16, 16, 3),
            embed_dim=4,
            depths=[2, 2],
            num_heads=[1, 2],
            window_size=2,
            patch_size=2,
            drop_path=0.0,
        )
    ),
    "t5": Family(_of("T5Backbone", **_NO_DROPOUT)),
    "vgg": Family(
        _of(
            "VGGBackbone",
            stackwise_num_repeats=[1, 1],
            stackwise_num_filters=[4, 8],
            image_shape=_IMAGE,
        )
    ),
    "vit": Family(_of("ViTBackbone", **_VISION, mlp_dim=12)),
    "whisper": Family(
        _of(
            "WhisperBackbone",
            **_NO_DROPOUT,
            num_mels=5,
            max_encoder_sequence_length=12,
            max_decoder_sequence_length=LENGTH,
        ),
        {"encoder_features": (12,)},
    ),
    "xlm_roberta": Family(_of("XLMRobertaBackbone", **_NO_DROPOUT)),
    "xlnet": Family(_of("XLNetBackbone", **_NO_DROPOUT), exact=False),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A pipeline beside the plain model.

    Attributes:
        outputs: The largest difference of two outputs, of that output's largest entry.
        gradients: Likewise of two gradients of a weight.
        microbatch_gradients: Likewise where the plain model takes the mini-batch one
            microbatch after another.
        dtype: The smallest type of floats among the model's weights and outputs.
        warnings: What tfgpipe warned of.
        seconds: What making and running them took.
    """

    outputs: float
    gradients: float
    microbatch_gradients: float
    dtype: str
    warnings: tuple[str, ...]
    seconds: float


def compare(
    family: Family,
    *,
    num_stages: int = NUM_STAGES,
    num_microbatches: int = NUM_MICROBATCHES,
) -> Comparison:
    """Runs a training step of a model, plain and as a pipeline, in float64."""
    start = time.perf_counter()
    with _floats_of(family.floatx):
        keras.utils.set_random_seed(0)
        model = family.make()
    inputs = example_inputs(model, family)
    state = [variable.numpy() for variable in model.non_trainable_variables]

    def from_the_start(*arguments: Any) -> _Step:
        for variable, value in zip(model.non_trainable_variables, state, strict=True):
            variable.assign(value)
        return _step(*arguments)

    whole = from_the_start(model, model, inputs)
    split = from_the_start(model, model, inputs, num_microbatches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = tfgpipe.PipelinedLayer(
            model, num_stages=num_stages, num_microbatches=num_microbatches
        )
        received = from_the_start(layer, model, inputs)
    floats = [x.dtype for x in (*model.weights, *model.outputs) if "float" in x.dtype]
    return Comparison(
        gradients=_difference(whole.gradients, received.gradients),
        microbatch_gradients=_difference(split.gradients, received.gradients),
        outputs=_difference(whole.outputs, received.outputs),
        dtype=min(floats),  # float32 is before float64.
        warnings=tuple(str(w.message) for w in caught if "/tfgpipe/" in w.filename),
        seconds=time.perf_counter() - start,
    )


@contextlib.contextmanager
def _floats_of(dtype: str) -> Iterator[None]:
    """Makes models of a type of floats."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


@dataclasses.dataclass(frozen=True)
class _Step:
    """Outputs of a training step, and the gradients of the weights."""

    outputs: list[np.ndarray]
    gradients: list[np.ndarray]


def _step(call: Any, model: keras.Model, inputs: Any, num_splits: int = 1) -> _Step:
    """Runs a training step.

    Args:
        call: The model, or the pipeline of it.
        model: The model.
        inputs: The mini-batch.
        num_splits: Into how many parts it is split, which are run one after another.
    """
    made, losses = [], []
    with tf.GradientTape() as tape:
        for part in range(num_splits):
            rows = slice(part * BATCH // num_splits, (part + 1) * BATCH // num_splits)
            some = keras.tree.map_structure(lambda x, r=rows: x[r], inputs)
            made.append(keras.tree.flatten(call(some, training=True)))
            losses += [loss / num_splits for loss in call.losses]
        outputs = [tf.concat(parts, axis=0) for parts in zip(*made, strict=True)]
        losses += [_loss(y) for y in outputs if y.dtype.is_floating]
        total = tf.add_n([tf.cast(loss, tf.float64) for loss in losses])
    gradients = tape.gradient(total, model.trainable_variables)
    gradients = [tf.convert_to_tensor(g) for g in gradients if g is not None]
    return _Step(
        *(
            [tf.cast(x, tf.float64).numpy() for x in some]
            for some in (outputs, gradients)
        )
    )


def _loss(output: tf.Tensor) -> tf.Tensor:
    """Returns a mean of weighted squares, none of whose terms is another's."""
    weights = tf.range(1, tf.size(output) + 1) % 7 + 1
    weights = tf.cast(tf.reshape(weights, tf.shape(output)), output.dtype)
    return tf.reduce_mean(weights * output**2)


def _difference(expected: list[np.ndarray], received: list[np.ndarray]) -> float:
    """Returns the largest difference of two arrays, of the largest entry of the first.

    Arrays of which no entry is a millionth of the largest of all are left out, since
    their differences are the roundings of other ones. The gradients of the biases of
    attention's keys, for instance, are zero but for rounding.
    """
    largest = [float(np.max(np.abs(x), initial=0.0)) for x in expected]
    threshold = 1e-6 * max(largest)
    pairs = zip(expected, received, largest, strict=True)
    return max(
        float(np.max(np.abs(a - b), initial=0.0)) / most
        for a, b, most in pairs
        if most > threshold
    )


def example_inputs(model: keras.Model, family: Family) -> dict[str, Any]:
    """Returns random inputs: the last tokens of some examples are padding."""
    rng = np.random.default_rng(0)
    lengths = np.resize([LENGTH, LENGTH - 2, LENGTH - 1], BATCH)

    def array(name: str, spec: keras.KerasTensor) -> np.ndarray:
        sizes = iter(family.sizes.get(name, ()))
        shape = [next(sizes, LENGTH) if n is None else n for n in spec.shape[1:]]
        shape = [BATCH, *shape]
        if "padding_mask" in name:
            length = lengths + shape[1] - LENGTH
            mask = np.arange(shape[1]) < length[:, None]
            return mask.astype(spec.dtype)
        if name in ("segment_ids", "labels"):
            return rng.integers(0, 2, shape).astype(spec.dtype)
        if "int" in spec.dtype:
            return rng.integers(1, IDS, shape).astype(spec.dtype)
        return rng.standard_normal(shape).astype(spec.dtype)

    inputs = model.input
    if isinstance(inputs, dict):
        return {name: tf.constant(array(name, x)) for name, x in inputs.items()}
    return tf.constant(array(inputs.name, inputs))


def main() -> None:
    """Compares each family and prints the table."""
    flags = _parse()
    tfgpipe.make_logical_cpus(flags.stages)
    rows, notes = [], []
    for name in flags.families.split(",") if flags.families else FAMILIES:
        row: tables.Row = {"family": name}
        try:
            result = compare(
                FAMILIES[name],
                num_stages=flags.stages,
                num_microbatches=flags.microbatches,
            )
        except Exception as error:
            row |= dict.fromkeys(
                ("outputs", "gradients", "one by one", "type", "s"), ""
            )
            notes.append(f"{name}: {type(error).__name__}: {error}")
        else:
            row |= {
                "outputs": f"{result.outputs:.1e}",
                "gradients": f"{result.gradients:.1e}",
                "one by one": f"{result.microbatch_gradients:.1e}",
                "type": result.dtype,
                "s": f"{result.seconds:.1f}",
            }
            notes += [f"{name}: {warning}" for warning in result.warnings]
        rows.append(row)
        if flags.verbose:
            print(row, *notes, sep="\n", flush=True)
    print(tables.draw_markdown(rows), *notes, sep="\n")
    if flags.json:
        tables.write_json(flags.json, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compares pipelines of keras-hub's models with the plain ones."
    )
    parser.add_argument("--families", help="names, with commas between; all if none")
    parser.add_argument("--stages", type=int, default=NUM_STAGES)
    parser.add_argument("--microbatches", type=int, default=NUM_MICROBATCHES)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
