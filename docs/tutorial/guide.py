# %% [markdown]
# # Pipeline parallelism, from one model to several hosts
#
# A model can be too big or too slow for one accelerator. *Pipeline parallelism* divides
# its layers into *stages*, one per device. It also splits each mini-batch into
# *microbatches*. While one stage computes a microbatch, the stage before it computes
# the next one.
#
# GPipe ([Huang et al. 2019](https://arxiv.org/abs/1811.06965)) introduced this method.
# `tfgpipe` implements it for Keras 3 on TensorFlow. This tutorial shows each idea with
# a model that runs on a CPU. You need to know Keras; you need not know pipelines. The
# [last chapter](#what-the-paper-claims-and-what-was-found-here) compares the paper's
# claims with what was found here.
#
# | letter | what it counts |
# |---|---|
# | K | stages; stage k is the k-th, from 0 |
# | M | microbatches of a mini-batch; microbatch m is the m-th, from 0 |
# | N | examples of a mini-batch |
# | L | layers |
#
# The source of this notebook is [guide.py](guide.py). `make guide` runs it, in about
# two minutes on two cores, and every `assert` in it must hold.

# %% [markdown]
# ## Set-up
#
# `make_logical_cpus(8)` divides the CPU into eight devices for TensorFlow. Each has its
# own name and its own variables, like eight GPUs. All eight share the cores of this
# machine, so results are correct but nothing gets faster. On a machine with GPUs leave
# the line out.

# %% set-up
# %matplotlib inline
# %config InlineBackend.print_figure_kwargs = {"dpi": 110, "bbox_inches": None}
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import dataclasses
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets

import tfgpipe
from tfgpipe import quantization, schedules
from tfgpipe.report import device_memory
from tfgpipe.schedules import draw

# One thread per operation, so that one stage leaves a core to another.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(16)
tfgpipe.make_logical_cpus(8)
tf.get_logger().setLevel("ERROR")
keras.config.disable_interactive_logging()  # No progress bars.
keras.utils.set_random_seed(0)
folder = Path(tempfile.mkdtemp())
random = np.random.default_rng(0)
print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {os.cpu_count()} cores")

# %% [markdown]
# ## A model in four stages
#
# *Which layers are on which device?*
#
# A `PipelinedModel` is a Keras model that takes a list of layers, the number of stages
# and the number of microbatches. `compile` and `fit` work as usual. Here are twelve
# equal layers on four devices:


# %% stages-trained
def stack(num_layers=12, width=256):
    return [
        keras.layers.Dense(width, activation="relu", name=f"dense_{i}")
        for i in range(num_layers)
    ]


x = random.standard_normal((64, 256), dtype="float32")
model = tfgpipe.PipelinedModel(stack(), num_stages=4, num_microbatches=8)
model.compile("adam", "mse")
model.fit(x, x, batch_size=64, verbose=0)
print(tfgpipe.stage_table(model))

# %% [markdown]
# Each device has three consecutive layers: their weights, and Adam's state for these
# weights (`slots`, two values per weight). No device has the whole model. As a picture:

# %% stages-on-devices
tfgpipe.plot_mesh(device_memory(model))

# %% [markdown]
# `remat=stage` in the table is explained in the chapter on
# [memory](#rematerialisation). Functional models become pipelines by one call
# ([below](#a-u-net)).
#
# ## What stages send
#
# *How much do the devices communicate?*
#
# `tfgpipe.plan` computes the same partition without building anything on a device. Its
# table also shows FLOPs, memory, and the bytes that a stage receives for each
# microbatch. Later chapters explain the rest:

# %% plan
plan = tfgpipe.plan(stack(), num_stages=4, num_microbatches=8, sample=x)
print(plan)

# %% [markdown]
# A stage sends its output forward to the next stage. In the backward pass it gets a
# gradient of the same size back. Weights stay where they are. Data parallelism instead
# sums the gradients of all weights over all devices, which is more for this model:

# %% plan-bytes
microbatch_bytes = 64 // 8 * 256 * 4  # 8 examples of 256 floats.
assert [stage.received_bytes for stage in plan.stages] == [0] + [microbatch_bytes] * 3
# Both ways, 8 microbatches, 3 boundaries.
pipeline_bytes = 2 * 8 * 3 * microbatch_bytes
gradient_bytes = 4 * sum(stage.parameters for stage in plan.stages)
print(f"4 stages send in a step       {pipeline_bytes / 2**20:5.2f} MiB in all")
print(f"data parallelism has to sum   {gradient_bytes / 2**20:5.2f} MiB on each device")

# %% [markdown]
# ## Microbatches
#
# *Why is a mini-batch split?*
#
# Stage 1 needs the output of stage 0. With M = 1 only one device works at any time, and
# four devices are as slow as one. With microbatches stage 0 starts the next one while
# stage 1 computes the first. `simulate` takes the times of a forward and of a backward,
# and computes when each device works. In the pictures time runs to the right, each row
# is a device, and a number is the index of a microbatch. Hatched is idle time. All
# three steps do the same work:


# %% microbatches
def step_in(M):
    # A stage takes 16 ms forward and 32 ms backward for the whole mini-batch.
    costs = tfgpipe.Costs(forward=0.016 / M, backward=0.032 / M)
    timeline = tfgpipe.simulate(schedules.gpipe(4, M), costs).timeline
    return dataclasses.replace(timeline, title=f"4 stages, M = {M}")


tfgpipe.plot_timelines([step_in(1), step_in(2), step_in(4)])

# %% [markdown]
# M does not change the result, except with [batch normalisation](#batch-normalisation)
# and dropout. M need not divide the number of examples: the sizes of microbatches then
# differ by one. A batch of fewer than M examples is split into single examples.
# `model.unpipelined()` is the plain Keras model with the same weights, for comparison:

# %% microbatches-any-size
plain = model.unpipelined()
for num_examples in (64, 10, 3):
    expected, found = plain(x[:num_examples]), model(x[:num_examples])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    print(f"{num_examples:2} examples in 8 microbatches: equal to the plain model")

# %% [markdown]
# ## Schedules and the bubble
#
# *In which order does a device work, and how long does it wait?*
#
# A *schedule* is the order of forwards (F) and backwards (B) on each device. GPipe's
# schedule runs all forwards, then all backwards, from the last microbatch to the first.
# `draw` prints a schedule with one column per time slot:

# %% schedule-text
print(draw(schedules.gpipe(4, 8)))

# %% [markdown]
# A backward computes gradients of inputs and of weights, so it takes about as long as
# two forwards:

# %% schedule-drawn
tfgpipe.plot_schedule(schedules.gpipe(4, 8))

# %% [markdown]
# The hatched share of the step is the *bubble*. A stage waits for the first microbatch,
# then for the first gradient, and at the end for the earlier stages. The forwards take
# M + K - 1 slots, of which each device works in M; the same holds for the backwards. So
# with equal stages the bubble is (K - 1) / (M + K - 1). The simulation agrees:

# %% schedule-formula
for K in range(1, 9):
    for M in (1, 2, 3, 8, 32):
        timeline = tfgpipe.simulate(schedules.gpipe(K, M), tfgpipe.Costs()).timeline
        assert abs(timeline.bubble - (K - 1) / (M + K - 1)) < 1e-12
for K in (2, 4, 8, 16, 64):
    print(f"K = {K:2}, M = 4K: a bubble of {(K - 1) / (5 * K - 1):.1%}")

# %% [markdown]
# The paper calls the bubble negligible for M >= 4K. By the formula it is then less than
# 20% for every K.
#
# Two newer schedules improve on GPipe. *1F1B* alternates forwards and backwards. Its
# bubble is the same, but a device has fewer microbatches in memory at a time. *Zero
# bubble* splits each backward. It computes the gradients of weights later, when the
# device would wait. The argument `schedule=` of `PipelinedModel` selects one; the
# gradients are the same ([more](../explanation/schedules.md)).


# %% schedules-compared
def step_of(name):
    schedule = schedules.make(name, num_stages=4, num_microbatches=8)
    costs = tfgpipe.Costs(forward=1e-3, backward=2e-3)
    timeline = tfgpipe.simulate(schedule, costs).timeline
    return dataclasses.replace(timeline, title=name)


tfgpipe.plot_timelines([step_of(name) for name in ("gpipe", "1f1b", "zero_bubble")])

# %% [markdown]
# ## The bubble, measured
#
# *Do real steps have the bubble of the formula?*
#
# Eight devices cannot compute in parallel on two cores, but they can wait in parallel.
# The layer below computes a small matrix product and then sleeps: one millisecond per
# example in the forward, two in the backward. The rest is a normal training step.
# `TimelineCallback` reads the clock before and after each forward and backward:


# %% waiting-layer
class Waiting(keras.layers.Dense):
    """A dense layer that takes a given time per example, and no core."""

    def __init__(self, units=4, milliseconds=1.0, **kwargs):
        super().__init__(units, **kwargs)
        self.milliseconds = milliseconds

    def call(self, x):
        @tf.custom_gradient
        def waited(x):
            return self.wait(x, 1), lambda dy: self.wait(dy, 2)

        return waited(super().call(x))

    def wait(self, x, times):
        def sleep(x):
            time.sleep(times * self.milliseconds * len(x) / 1000)
            return x

        y = tf.numpy_function(sleep, [x], x.dtype, stateful=False)
        return tf.ensure_shape(y, x.shape)

    def get_config(self):
        return {**super().get_config(), "milliseconds": self.milliseconds}


def measured(layers, num_examples=128, **arguments):
    """Trains two steps, and returns what each device did when in the second."""
    model = tfgpipe.PipelinedModel(layers, remat="none", **arguments)
    model.compile("sgd", "mse")
    timing = tfgpipe.TimelineCallback(folder / "timing", steps=(2, 2))
    x = np.ones((num_examples, 4), "float32")
    model.fit(x, x, batch_size=num_examples, epochs=2, verbose=0, callbacks=[timing])
    return timing.timeline


# %% [markdown]
# `measured` takes two steps and returns the timeline of the second one (`remat="none"`
# means that nothing is recomputed). `devices at work` is the mean number of devices
# that compute, K (1 - bubble). If links are fast, this is the speed-up over one device:

# %% bubble-table
cases = [(2, 1), (2, 4), (2, 8), (4, 4), (4, 16), (8, 8)]
steps = [
    measured([Waiting() for _ in range(K)], num_stages=K, num_microbatches=M)
    for K, M in cases
]
print("K   M  bubble in theory  measured  devices at work")
for (K, M), step in zip(cases, steps, strict=True):
    theory, speedup = (K - 1) / (M + K - 1), K * (1 - step.bubble)
    print(f"{K}  {M:2}  {theory:16.1%}  {step.bubble:8.1%}  {speedup:15.2f}")

# %% bubble-measured
tfgpipe.plot_gpipe_bubbles((2, 4, 8), measured=steps)

# %% [markdown]
# The dots are on their curves or slightly above, because starting operations and
# computing the products also take time. Other programs on the cores move the dots
# further up.
#
# Two stages can compute in parallel on two cores, without sleeping. Below are dense
# layers of width 512 in two stages. The upper half is simulated with the mean measured
# times, the lower half is measured:

# %% real-timeline
model = tfgpipe.PipelinedModel(
    stack(8, 512), num_stages=2, num_microbatches=8, remat="none", name="dense_512"
)
model.compile("sgd", "mse")
timing = tfgpipe.TimelineCallback(folder / "timing", steps=(3, 6))
x = random.standard_normal((1024, 512), dtype="float32")
model.fit(x, x, batch_size=1024, epochs=6, verbose=0, callbacks=[timing])
tfgpipe.plot_timelines([timing.theory, timing.timeline])

# %% [markdown]
# By the formula GPipe's schedule with K = 2 and M = 8 is at most 2 x 8 / 9 = 1.78 times
# as fast as one device. Sixteen dense layers reached 1.50 on two cores, which is 85% of
# that (`python -m benchmarks.targets`, [table](../../benchmarks/RESULTS.md#targets)).

# %% [markdown]
# ## Rematerialisation
#
# *What fills the memory of a device, and what does recomputing save?*
#
# The backward pass needs the activations of the forward pass. Without a pipeline a
# device keeps those of N examples in L layers until the backward: O(N x L).
#
# *Rematerialisation* (gradient checkpointing) keeps only the input of the stage for
# each microbatch, and repeats the forward just before the backward. By the paper a
# device then needs O(N + L/K x N/M): the inputs of N examples, and the activations of
# one microbatch in one stage. The argument `remat` selects what is recomputed:
#
# - `"none"`: nothing, all activations are kept;
# - `"stage"`, the default: a whole stage at once;
# - `"layer"`: first the stage, then each layer again, which usually needs the least
#   memory;
# - `"except_last"`: as `"stage"`, but not for a microbatch whose backward directly
#   follows its forward, as in the last stage of 1F1B.
#
# For 60 layers on four devices `plan` predicts this peak memory, with weights and
# gradients:

# %% memory-plan
L, K, M, N, width = 60, 4, 8, 2048, 256
layers = [keras.layers.Dense(width, activation="gelu") for _ in range(L)]
x = random.standard_normal((N, width), dtype="float32")
plans = {
    remat: tfgpipe.plan(
        layers, num_stages=K, num_microbatches=M, sample=x, num_slots=0, remat=remat
    )
    for remat in ("none", "stage", "layer")
}
peaks = {
    f'remat="{remat}"': {
        f"stage {k}": s.memory_bytes for k, s in enumerate(plan.stages)
    }
    for remat, plan in plans.items()
}
tfgpipe.plot_peaks(peaks, title="60 layers in 4 stages: planned peak memory")

# %% [markdown]
# The plan agrees with the paper's formula to the byte:

# %% memory-formula
saved = plans["none"].profile.layers[0].tensors.saved
activations = (L // K) * saved  # Of a microbatch.
inputs = N // M * width * 4  # Of a microbatch, into a stage.
weights = 2 * 4 * (L // K) * (width * width + width)  # And as many gradients.
for k in range(K):
    none, stage = (plans[remat].stages[k].memory_bytes for remat in ("none", "stage"))
    assert none == weights + M * inputs + M * activations
    assert stage == weights + M * inputs + activations
MiB = 2**20
print(f"1 device, none:   N x L          {K * M * activations / MiB:7.1f} MiB")
print(f"each of 4, remat: N + L/K x N/M  {(M * inputs + activations) / MiB:7.1f} MiB")

# %% [markdown]
# `"stage"` costs one more forward per microbatch, which makes a step longer by up to a
# third. [How it works](../explanation/how-it-works.md#where-memory-goes) has pictures
# of memory over a step.
#
# These are predictions. Measured, a step of a transformer with GPipe's schedule, K = 4
# and M = 16, took 1047 MiB with `"none"` and 97 MiB with `"stage"` (`python -m
# benchmarks.memory`, [table](../../benchmarks/RESULTS.md#memory-of-a-step)).
#
# So a model can grow with the number of devices. In the paper's Table 1 an AmoebaNet of
# 82 million weights fits one accelerator without GPipe. With rematerialisation 318
# million fit on one, and 1.8 billion on eight. If memory runs out, [this
# page](../how-to/memory.md) says what to change first.

# %% [markdown]
# ## Gradients
#
# *Does a pipeline change what a model learns?*
#
# No, except for layers that mix examples, such as [batch
# normalisation](#batch-normalisation). Gradients are summed over microbatches, and the
# optimizer is applied once per step. The next cell compares the gradient of every
# weight in three pipelines with that of plain layers. It uses double precision, so that
# rounding cannot hide an error, and 26 examples, which no M here divides.
# `PipelinedLayer` is a pipeline as a layer of a larger model:

# %% gradients
TOLERANCE = 1e-12
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
x, y = random.standard_normal((26, 8)), random.standard_normal((26, 3))


def blocks():
    hidden = []
    for i in range(4):
        hidden.append(keras.layers.Dense(16, activation="gelu", name=f"dense_{i}"))
        hidden.append(keras.layers.LayerNormalization(name=f"norm_{i}"))
    return [*hidden, keras.layers.Dense(3, name="last")]


def gradients(*layers):
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.set_weights(weights)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        return tape.gradient(loss, model.trainable_variables)

    return [gradient.numpy() for gradient in step(x, y)]


plain = keras.Sequential([keras.Input((8,)), *blocks()])
weights = [random.standard_normal(weight.shape) for weight in plain.weights]
names = ["/".join(w.path.split("/")[-2:]) for w in plain.trainable_variables]
expected = gradients(*blocks())
differences = {}
for K, M, remat in ((2, 4, "none"), (3, 5, "stage"), (4, 8, "layer")):
    layer = tfgpipe.PipelinedLayer(
        blocks(), num_stages=K, num_microbatches=M, remat=remat
    )
    differences[f"K={K}, M={M}, {remat}"] = {
        name: float(np.abs(a - b).max() / np.abs(b).max())
        for name, a, b in zip(names, gradients(layer), expected, strict=True)
    }
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("float32")
largest = max(max(each.values()) for each in differences.values())
assert largest < TOLERANCE
print(f"{len(names)} weights, 3 pipelines: the largest difference is {largest:.1e}")

# %% gradients-picture
tfgpipe.plot_differences(differences, tolerance=TOLERANCE)

# %% [markdown]
# The differences that remain come from the order of additions. [How it
# works](../explanation/how-it-works.md#why-the-gradients-are-the-same) explains why no
# other can occur.

# %% [markdown]
# ## Unequal layers
#
# *What does one slow stage cost?*
#
# The slowest stage determines the speed of a pipeline. Below, the last of four layers
# takes three times as long as each of the others. All have the same number of weights.
# The default, `balance="params"`, gives each stage two layers, so one stage takes twice
# as long as the other. `balance="time"` measures each layer and finds the best
# partition:


# %% balance-plans
def uneven():
    fast = [Waiting(milliseconds=0.5, name=f"fast_{i}") for i in range(3)]
    return [*fast, Waiting(milliseconds=1.5, name="slow")]


plans = {
    balance: tfgpipe.plan(
        uneven(),
        num_stages=2,
        num_microbatches=8,
        balance=balance,
        remat="none",
        sample=np.ones((128, 4), "float32"),
    )
    for balance in ("params", "time")
}
print(*plans.values(), sep="\n\n")

# %% [markdown]
# Both pipelines, measured:

# %% balance-measured
timelines = []
for balance, plan in plans.items():
    counts = plan.calls_per_stage
    timeline = measured(uneven(), num_microbatches=8, partition=counts)
    title = f'balance="{balance}": {counts[0]} layers and {counts[1]}'
    timelines.append(dataclasses.replace(timeline, title=title))
tfgpipe.plot_timelines(timelines)

# %% [markdown]
# `balance` can also be `"flops"`, `"memory"`, or a list with the number of layers of
# each stage ([settings](../how-to/settings.md#balance)).

# %% [markdown]
# ## Batch normalisation
#
# *Over which examples does batch normalisation compute its statistics?*
#
# Over those of a microbatch, as in the paper. Otherwise each such layer would have to
# wait for the whole mini-batch. So here M does change what a model learns, as with
# gradient accumulation. The moving averages for evaluation can be updated in two ways.
# With `batch_norm="deferred"` they are updated once per step, with the statistics of
# the whole mini-batch; this is the paper's rule. With `"microbatch"`, the default, they
# are updated once per microbatch:


# %% batch-normalisation
def normalised():
    keras.utils.set_random_seed(1)
    return [keras.layers.Dense(3), keras.layers.BatchNormalization(momentum=0.9)]


x = random.standard_normal((32, 4), dtype="float32") + 3
plain = keras.Sequential([keras.Input((4,)), *normalised()])
plain(x, training=True)
means = {"unpipelined": plain.layers[1].moving_mean.numpy()}
for batch_norm in ("deferred", "microbatch"):
    layer = tfgpipe.PipelinedLayer(
        normalised(), num_stages=2, num_microbatches=4, batch_norm=batch_norm
    )
    layer(x, training=True)
    means[f"M = 4, {batch_norm}"] = layer.layers[1].moving_mean.numpy()
print("moving mean after one step")
for name, mean in means.items():
    print(f"{name:17}", *(f"{value:7.4f}" for value in mean))
np.testing.assert_allclose(means["M = 4, deferred"], means["unpipelined"], rtol=1e-5)

# %% [markdown]
# [A table](../explanation/parallelism.md#batch-statistics) has all cases, with
# replicas.

# %% [markdown]
# ## A U-Net
#
# *What if the model is not a chain of layers?*
#
# In a U-Net a skip connection goes from each level of the first half to the same level
# of the second half. `tfgpipe.pipeline` takes any Functional model. A skip connection
# goes directly from the stage that computes it to the stage that needs it:


# %% u-net-plan
def conv(x, filters, name):
    layer = keras.layers.Conv2D(
        filters, 3, padding="same", activation="relu", name=name
    )
    return layer(x)


def u_net():
    keras.utils.set_random_seed(4)
    image = keras.Input((32, 32, 1), name="image")
    top = conv(image, 8, "down_0")
    middle = conv(keras.layers.MaxPooling2D(name="pool_0")(top), 16, "down_1")
    bottom = conv(keras.layers.MaxPooling2D(name="pool_1")(middle), 32, "bottom")
    x = keras.layers.UpSampling2D(name="grow_1")(bottom)
    x = conv(keras.layers.Concatenate(name="join_1")([middle, x]), 16, "up_1")
    x = keras.layers.UpSampling2D(name="grow_0")(x)
    x = conv(keras.layers.Concatenate(name="join_0")([top, x]), 8, "up_0")
    return keras.Model(image, keras.layers.Conv2D(1, 1, name="logits")(x))


plain = u_net()
plan = tfgpipe.plan(
    plain, num_stages=3, num_microbatches=4, balance="flops", batch_size=16
)
print(plan)

# %% [markdown]
# For each microbatch the last stage receives 256 KiB from the stage before it, and 128
# KiB from the first stage: the skip connection of the topmost level. The pipeline
# computes what the plain model computes:

# %% u-net-compared
pipelined = tfgpipe.pipeline(
    u_net(), num_microbatches=4, partition=plan.calls_per_stage, schedule="1f1b"
)
image = random.standard_normal((16, 32, 32, 1), dtype="float32")
np.testing.assert_allclose(pipelined(image), plain(image), rtol=1e-4, atol=1e-5)

# %% u-net-on-devices
tfgpipe.plot_mesh(device_memory(pipelined))

# %% [markdown]
# [unet.py](../../examples/unet.py) trains one. Several inputs and outputs, masks and
# batches of different lengths work the same way. [Make my model a
# pipeline](../how-to/pipeline.md) has the rules and the exceptions.

# %% [markdown]
# ## Mixed precision
#
# *What is in half precision, and what happens on overflow?*
#
# With `dtype="mixed_float16"` layers compute in half precision. Stages then send half
# as many bytes. Weights, gradient sums and optimizer state stay in float32. Keras'
# `LossScaleOptimizer` scales the loss. If one microbatch overflows, the optimizer skips
# the whole step and halves the scale:

# %% mixed-precision
layers = [*stack(5, 64), keras.layers.Dense(1, dtype="float32")]
model = tfgpipe.PipelinedModel(
    layers, num_stages=2, num_microbatches=4, schedule="1f1b", dtype="mixed_float16"
)
optimizer = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(), initial_scale=1024.0
)
model.compile(optimizer, "mse")
x = random.standard_normal((64, 64), dtype="float32")
y = x.sum(axis=1, keepdims=True)
model.train_on_batch(x, y)
sent = model.plan(batch_size=64).stages[1].received_bytes
print(
    f"layers compute in {layers[0].compute_dtype}, weights are {layers[0].kernel.dtype}"
)
print(f"a microbatch of 16 examples sends {sent:.0f} bytes between the stages")
assert sent == 16 * 64 * 2

before = model.get_weights()
x[5] = 1e6  # Overflows in float16.
model.train_on_batch(x, y)
for a, b in zip(before, model.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)
print(f"after an overflow: same weights, scale {float(optimizer.dynamic_scale):.0f}")
assert float(optimizer.dynamic_scale) == 512

# %% [markdown]
# [Mixed precision](../how-to/half-precision.md) also explains how to compress what
# stages send.

# %% [markdown]
# ## Quantization-aware training
#
# *How does a model become an int8 file without losing accuracy?*
#
# The forward pass rounds as int8 does (*fake quantization*). `quantization.apply` wraps
# each layer, so that weights and activations are rounded to 256 levels between a
# smallest and a largest value. For activations these two values are moving averages
# over steps, updated once per step from all microbatches (`ramp=True` lets them adapt
# faster at the beginning). So M changes the result only by rounding errors. Here are
# scikit-learn's handwritten digits, with M = 1 and M = 8:

# %% int8-trained
images, labels = datasets.load_digits(return_X_y=True)
images = (images / 16).astype("float32")
train, test = slice(0, 1280), slice(1280, None)
scheme = quantization.default_8bit(
    activations=quantization.MovingAverageRange(decay=0.99, ramp=True)
)


def digits_model(M):
    keras.utils.set_random_seed(5)
    layers = [keras.Input((64,))]
    layers += [keras.layers.Dense(48, activation="relu") for _ in range(2)]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model = quantization.apply(model, scheme=scheme)
    model = tfgpipe.pipeline(model, num_stages=2, num_microbatches=M)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


losses = {}
for M in (1, 8):
    model = digits_model(M)
    history = model.fit(
        images[train], labels[train], batch_size=64, epochs=10, shuffle=False, verbose=0
    )
    losses[M] = history.history["loss"]
    print(f"M = {M}: loss {losses[M][0]:.5f}, after ten epochs {losses[M][-1]:.5f}")
np.testing.assert_allclose(losses[1][0], losses[8][0], rtol=1e-4)

# %% [markdown]
# `export_int8` writes a TFLite file with 8-bit inputs and outputs. `compare` runs the
# model and the file on test images. One LSB (least significant bit) is one step of the
# 8-bit output:

# %% int8-exported
tfgpipe.export_int8(model, folder / "digits.tflite")
compared = quantization.compare(
    model, folder / "digits.tflite", (images[test], labels[test])
)
print(compared)
assert compared.largest_difference <= 1 and compared.identical > 0.9

# %% [markdown]
# [Training for 8 bits](../explanation/quantization.md) explains the training, [Export
# to int8](../how-to/int8.md) the file.

# %% [markdown]
# ## Checkpoints
#
# *Can a run continue with another number of stages?*
#
# Yes. A checkpoint has the values of layers, not of stages. Below, a run with four
# stages saves a checkpoint and takes three more steps. A model with two stages loads
# the checkpoint, with Adam's state, and takes the same three steps:

# %% checkpoint
x, y = random.standard_normal((64, 32)), random.standard_normal((64, 32))


def adam_pipeline(K):
    model = tfgpipe.PipelinedModel(stack(8, 32), num_stages=K, num_microbatches=4)
    model.build((None, 32))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def three_steps(model):
    losses = []
    for _ in range(3):
        model.reset_metrics()  # Otherwise Keras returns the mean over steps.
        losses.append(float(model.train_on_batch(x, y)))
    return losses


four, checkpoint = adam_pipeline(4)
three_steps(four)
path = checkpoint.save(str(folder / "checkpoint"))
continued = three_steps(four)

two, checkpoint = adam_pipeline(2)
checkpoint.restore(path).assert_existing_objects_matched()
resumed = three_steps(two)
print("K = 4, continued", continued)
print("K = 2, resumed  ", resumed)
np.testing.assert_allclose(resumed, continued, rtol=1e-6)
assert int(two.optimizer.iterations) == 6

# %% [markdown]
# Keras' `model.save`, `save_weights` and `ModelCheckpoint` work as well
# ([weights](../how-to/weights.md)). The trainer, a program in the checkout, does all of
# this for whole runs: after a kill, the same command continues from the last checkpoint
# ([training runs](../how-to/training.md)):
#
# ```bash
# python -m trainer --params=lm.Tiny --logdir=runs/tiny
# ```

# %% [markdown]
# ## Replicas
#
# *What if there are more devices than stages?*
#
# Then pipeline parallelism is combined with data parallelism.
# `PipelineStrategy` creates D copies of the pipeline on D x K devices. Each copy gets a
# part of the mini-batch, and the gradients of each stage are summed over its D devices.
# The result is that of one pipeline on the whole mini-batch:


# %% replicas
def replicated(D):
    keras.utils.set_random_seed(6)
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=D)
    with strategy.scope():
        model = tfgpipe.PipelinedModel(stack(4, 32), num_microbatches=4)
        model.compile("adam", "mse")
    history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    return model, history.history["loss"]


_, alone = replicated(1)
model, together = replicated(2)
print("one pipeline ", alone)
print("two replicas ", together)
np.testing.assert_allclose(together, alone, rtol=1e-5)

# %% replicas-on-devices
tfgpipe.plot_mesh(device_memory(model))

# %% [markdown]
# A single layer can also be divided among devices, which is tensor parallelism
# ([replicas, stages, shards](../explanation/parallelism.md)).

# %% [markdown]
# ## Several hosts
#
# *How do stages run on other machines?*
#
# Each machine runs a worker process:
#
# ```bash
# python -m tfgpipe.cluster worker --port=4000 --host=0.0.0.0     # on each machine
# ```
#
# Your program names the workers in the argument `cluster` of its strategy, such as
# `PipelineStrategy(num_stages=2, cluster="10.0.0.5:4000,10.0.0.6:4000")`. Nothing else
# in the program changes.
#
# [multi_host.py](../../examples/multi_host.py) does this with two workers on one machine,
# kills a process, and continues from a checkpoint. Read [several
# hosts](../how-to/hosts.md) before you open a port: TensorFlow's runtime has no
# authentication.

# %% [markdown]
# ## What the paper claims, and what was found here
#
# No GPU or TPU was available: "measured" means on two CPU cores. Numbers in parentheses
# are sections of the paper.
#
# | claim of [Huang et al. 2019](https://arxiv.org/abs/1811.06965) | found here |
# |---|---|
# | the bubble is (K - 1) / (M + K - 1) (2.3) | exact in simulation; [measured](#the-bubble-measured) slightly more, for K up to 8 |
# | it is negligible for M >= 4K (2.3) | less than 20% for every K: 11% at K = 2, 16% at K = 4; less with zero bubble |
# | peak memory of activations is O(N + L/K x N/M) with rematerialisation, O(N x L) without (2.3) | [to the byte](#rematerialisation) in the plan; [measured](../../benchmarks/RESULTS.md#memory-of-a-step) 97 instead of 1047 MiB |
# | gradients do not depend on the number of stages (2.2) | true to 1e-12 in double precision, [for every weight](#gradients) |
# | only tensors at stage boundaries are sent (2.3) | [true](#what-stages-send); time on slow links between accelerators was not measured |
# | the speed-up is almost linear if stages are equal (3) | K (1 - bubble) on [devices that sleep](#the-bubble-measured); [0.85 to 1.04 of it](../../benchmarks/RESULTS.md#targets) on two cores. The paper's Tables 2 and 3 were [predicted](../../benchmarks/RESULTS.md#the-planner-and-gpipes-tables), not run |
# | batch statistics over microbatches, moving averages over mini-batches (2.2) | [`batch_norm="deferred"`](#batch-normalisation) |
# | unequal layers reduce the speed-up (3) | [shown, and balanced](#unequal-layers) |
# | AmoebaNet-D (18, 208) has 82 million weights (Table 1) | true: `tests/params/test_amoebanet.py` |
# | models of 1.8 and 83.9 billion weights train (Table 1) | not run. Their memory was [predicted](../../benchmarks/RESULTS.md#the-planner-and-gpipes-tables), in all but one cell of the table within 15% |
# | 84.4% on ImageNet, translation of 103 languages (4, 5) | not run |
#
# ## Where to go on
#
# - [Make my model a pipeline](../how-to/pipeline.md), then [choose
#   settings](../how-to/settings.md) and [find out why it is slow](../how-to/slow.md).
# - [How it works](../explanation/how-it-works.md) follows one microbatch through a
#   step.
# - The [examples](../../examples/README.md) are scripts to copy.
