# %% [markdown]
# # Pipeline parallelism, from one partition to several hosts
#
# A network that is too big or too slow for one accelerator is partitioned into stages, one
# per device, and its mini-batches are split into microbatches that follow one another
# through the stages, as cars through an assembly line. This is GPipe ([Huang et al.
# 2019](https://arxiv.org/abs/1811.06965)); `tfgpipe` does it for Keras 3 models on
# TensorFlow.
#
# This guide explains it from the beginning, in pictures and figures. Each chapter answers
# one question, and can be read on its own. The paper's claims are reproduced where two CPU
# cores can reproduce them, and bounded where they cannot; the
# [last chapter](#what-the-paper-claims-and-what-was-found-here) lists every claim.
# Everything exact is asserted in the code: the guide runs as a test.
#
# | letter | what it counts |
# |---|---|
# | K | stages; stage k is the k-th |
# | M | microbatches of a mini-batch; microbatch m is the m-th |
# | N | examples of a mini-batch |
# | L | layers |
#
# The source is [guide.py](guide.py); `make guide` runs it again, which takes about four
# minutes on two cores.

# %% [markdown]
# ## Set-up
#
# Eight logical CPUs represent eight accelerators. Each has its own device name and weights,
# but all share one pool of threads: results are right, but no faster than the cores of this
# machine. One thread computes each operation, so that two stages share two cores as two
# devices would.

# %% set-up
# %matplotlib inline
# %config InlineBackend.print_figure_kwargs = {"dpi": 110, "bbox_inches": None}
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# oneDNN's allocator would keep what is freed, and memory is measured below.
os.environ["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] = "1"
import ctypes
import dataclasses
import re
import subprocess
import sys
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
# ## Partitioning a model into stages
#
# *Which layers are on which device, and what is sent between them?*
#
# A stage consists of consecutive layers. `tfgpipe.plan` finds the best partition, before
# anything is on a device. Here are twelve equal layers for four devices:


# %% cut-plan
def stack(num_layers=12, width=256):
    return [
        keras.layers.Dense(width, activation="relu", name=f"dense_{i}")
        for i in range(num_layers)
    ]


x = random.standard_normal((64, 256), dtype="float32")
plan = tfgpipe.plan(stack(), num_stages=4, num_microbatches=8, sample=x)
print(plan)

# %% [markdown]
# `receives` counts all that is sent to a stage for a microbatch: the output of the layer
# before the stage boundary, and in the backward as many bytes of gradient. Weights, their
# gradients and the optimizer's slots are never sent. That is the paper's point on
# communication: a few tensors between neighbours, no all-reduce over all devices. For
# comparison, what data parallelism sends for the same layers:

# %% cut-bytes
row_bytes = 256 * 4
assert [s.received_bytes for s in plan.stages] == [0] + [64 // 8 * row_bytes] * 3
boundary = 2 * 8 * sum(stage.received_bytes for stage in plan.stages)  # M each way.
weights = 4 * sum(stage.parameters for stage in plan.stages)
print(f"a step sends between the stages  {boundary / 2**20:6.2f} MiB")
print(f"gradients to sum over replicas   {weights / 2**20:6.2f} MiB, on each replica")

# %% [markdown]
# `PipelinedLayer` is that plan as a Keras layer, used like any other. After a training step
# each device has the weights of its stage and Adam's slots for them, and nothing of other
# stages:

# %% cut-table
layer = tfgpipe.PipelinedLayer(stack(), num_stages=4, num_microbatches=8)
model = keras.Sequential([keras.Input((256,)), layer])
model.compile("adam", "mse")
model.fit(x, x, batch_size=64, verbose=0)
print(tfgpipe.stage_table(model))

# %% stages-on-devices
tfgpipe.plot_mesh(device_memory(model))

# %% [markdown]
# ## Splitting a mini-batch
#
# *Why are four devices no faster than one if the mini-batch is not split?*
#
# Because each waits for the others. Stage 1 needs the output of stage 0, so with M = 1 one
# device works at a time. With microbatches stage 0 continues with the next one while stage 1
# has the first. Time is horizontal, devices are vertical, the numbers are microbatches, and
# hatched is idle. The work is the same in all three pictures, and more of it is done in
# parallel:


# %% slicing
def sliced(M):
    # A stage takes 16 ms forward and 32 ms backward for the whole mini-batch.
    costs = tfgpipe.Costs(forward=0.016 / M, backward=0.032 / M)
    timeline = tfgpipe.simulate(schedules.gpipe(4, M), costs).timeline
    return dataclasses.replace(timeline, title=f"4 stages, M = {M}")


tfgpipe.plot_timelines([sliced(1), sliced(2), sliced(4)])

# %% [markdown]
# The result does not depend on M. Nor does M have to divide the mini-batch: examples are
# distributed as evenly as possible, and a batch smaller than M is split into single
# examples.

# %% slicing-any-size
plain = layer.unpipelined()
for rows in (64, 10, 3):
    expected, found = plain(x[:rows]), layer(x[:rows])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    print(f"{rows:2} examples in 8 microbatches: as unpipelined")

# %% [markdown]
# ## The schedule, and its bubble
#
# *In which order does a device work, and how long must it wait?*
#
# GPipe runs all forwards, then all backwards, last microbatch first. As text, one column
# a time slot:

# %% schedule-text
print(draw(schedules.gpipe(4, 8)))

# %% [markdown]
# A backward takes as long as about two forwards, since it computes input gradients and weight
# gradients. So the same schedule is:

# %% schedule-drawn
tfgpipe.plot_schedule(schedules.gpipe(4, 8))

# %% [markdown]
# The hatched part is the *bubble*. A stage waits until the first microbatch has reached it,
# again until the first gradient arrives, and at the end for the stages before it. In
# forwards and in backwards, each device works for M slots of M + K - 1. So the bubble is
# (K - 1) / (M + K - 1) of the step if stages are equal, however long a backward takes.
# Simulation gives exactly that:

# %% schedule-formula
for K in range(1, 9):
    for M in (1, 2, 3, 8, 32):
        timeline = tfgpipe.simulate(schedules.gpipe(K, M), tfgpipe.Costs()).timeline
        assert abs(timeline.bubble - (K - 1) / (M + K - 1)) < 1e-12
for K in (2, 4, 8, 16, 64):
    print(f"K = {K:2}, M = 4K: a bubble of {(K - 1) / (5 * K - 1):.1%}")

# %% [markdown]
# The paper calls the bubble negligible from M = 4K on. By the formula it is below a fifth
# there, for any K: small, but not zero. Other schedules do better. 1F1B has the same bubble
# and fewer microbatches in flight; zero bubble fills it with weight gradients, which no
# other stage needs. They are the `schedule=` of a `PipelinedModel`, and all give the same
# gradients ([schedules](../explanation/schedules.md)).


# %% schedules-compared
def scheduled(name):
    schedule = schedules.make(name, num_stages=4, num_microbatches=8)
    costs = tfgpipe.Costs(forward=1e-3, backward=2e-3)
    timeline = tfgpipe.simulate(schedule, costs).timeline
    return dataclasses.replace(timeline, title=name)


tfgpipe.plot_timelines([scheduled(name) for name in ("gpipe", "1f1b", "zero_bubble")])

# %% [markdown]
# ## The bubble, measured
#
# *Do real steps of this library have the bubble of the formula?*
#
# Eight stages cannot compute in parallel on two cores. But for the host an accelerator is
# something to wait for, and waiting needs no core. So here is a layer that computes little
# and then waits, a millisecond per example, and twice that in the backward. Everything else
# is real: the library executes the actions in the order of the schedule, and
# `TimelineCallback` reads the clock before and after each of them.


# %% waiting-layer
class Waiting(keras.layers.Dense):
    """A dense layer that takes a given time for each row, on no core."""

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


def measured(layers, rows=128, **arguments):
    """Trains two steps, and returns what each device did when in the second."""
    model = tfgpipe.PipelinedModel(layers, remat="none", **arguments)
    model.compile("sgd", "mse")
    timing = tfgpipe.TimelineCallback(folder / "timing", steps=(2, 2))
    x = np.ones((rows, 4), "float32")
    model.fit(x, x, batch_size=rows, epochs=2, verbose=0, callbacks=[timing])
    return timing.timeline


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
# The dots are above their curves by the time that the machine needs besides waiting: to start
# actions and threads, and for the layers' small matrix products on two cores that eight
# devices share. With other load on the cores it is more.
#
# `devices at work` is the mean over the step, K x (1 - bubble): the speed-up of K equal
# devices over one. The paper's *almost linear speed-up* is this, from M = 4K on, if stages
# are equal and links are fast. It is a property of the schedule; how fast a real accelerator
# computes a small microbatch is not measured here.
#
# Two stages do fit two cores, without any waiting. Dense layers of 512, simulated above (the
# schedule with the measured mean times), measured below:

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
# Compared with the same model on one of the two cores, `benchmarks/pipeline.py` measured 1.64
# times the speed for a transformer at K = 2, M = 8; the formula allows 2 x 8 / 9 = 1.78
# ([measured](../../benchmarks/RESULTS.md#targets)).

# %% [markdown]
# ## Rematerialisation, and the memory wall
#
# *What fills a device's memory, and what does recomputing save?*
#
# The backward pass needs the activations of the forward, layer by layer, so without
# rematerialisation those of N examples in L layers are in memory: O(N x L), whatever M is.
# *Rematerialisation* saves, for each microbatch, only the input of the stage, and runs the
# forward again right before the backward. By the paper the peak then is O(N + L/K x N/M):
# the N inputs at the stage boundary, and the activations of one microbatch in one stage.
#
# A stack of 60 layers on four devices, 2048 examples in 8 microbatches. The prediction of
# `plan` for each choice of `remat`, including gradients and weights:

# %% memory-plan
L, K, M, N, width = 60, 4, 8, 2048, 256


def deep():
    return [keras.layers.Dense(width, activation="gelu") for _ in range(L)]


x = random.standard_normal((N, width), dtype="float32")
plan = tfgpipe.plan(deep(), num_stages=K, num_microbatches=M, sample=x, num_slots=0)


def stages_with(remat):
    """Returns what each stage holds, in another way of rematerialisation."""
    settings = dataclasses.replace(plan.settings, remat=remat)
    return [
        stage.memory_bytes
        for stage in dataclasses.replace(plan, settings=settings).stages
    ]


REMATS = ("none", "stage", "layer")
planned = {remat: stages_with(remat) for remat in REMATS}
of_stages = {
    f'remat="{remat}"': {f"stage {k}": held for k, held in enumerate(planned[remat])}
    for remat in REMATS
}
tfgpipe.plot_peaks(of_stages, title="60 layers in 4 stages: planned peak memory")

# %% [markdown]
# `"layer"` also recomputes layer by layer, so that the recomputation itself never needs the
# activations of all layers of a stage. The plan agrees with the paper's formula to the
# byte:

# %% memory-formula
kept = sum(plan.profile.saved_bytes[0])  # Of a layer, for a microbatch of N / M rows.
weights = 2 * 4 * (L // K) * (width * width + width)  # And as many gradients.
boundary = N * width * 4  # What N rows take between two stages.
for k in range(1, K):
    assert planned["none"][k] == weights + boundary + M * (L // K) * kept
    assert planned["stage"][k] == weights + boundary + (L // K) * kept
none, paper = M * L * kept, boundary + (L // K) * kept
MiB = 2**20
print(f"a layer keeps {M * kept / MiB:.1f} MiB of the mini-batch")
print(f"without: N x L            {none / MiB:6.1f} MiB on one device")
print(f"with: N + L/K x N/M       {paper / MiB:6.1f} MiB on each of {K} devices")

# %% [markdown]
# Over a step: without rematerialisation activations accumulate with each forward.

# %% memory-kept
inputs, activations = boundary / M, (L // K) * kept  # Of a microbatch, in a stage.


def over_time(title, **costs):
    costs = tfgpipe.Costs(forward=1e-3, backward=2e-3, fixed_bytes=weights, **costs)
    simulation = tfgpipe.simulate(schedules.gpipe(K, M), costs)
    timeline = dataclasses.replace(simulation.timeline, title=title)
    return tfgpipe.plot_memory(dataclasses.replace(simulation, timeline=timeline))


over_time('remat="none"', kept_bytes=inputs + activations)

# %% [markdown]
# With it only inputs do, and the activations of one microbatch at a time:

# %% memory-recomputed
over_time(
    'remat="stage"', recompute=1e-3, kept_bytes=inputs, backward_bytes=activations
)

# %% [markdown]
# And measured: the peak of resident memory of this process during a step, less what was
# resident before. All stages are in one process here, so it is the sum over devices. (On
# Linux only. The allocator is set to return memory immediately, so that resident memory is
# live memory.)

# %% memory-measured
libc = ctypes.CDLL(None)
libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
libc.mallopt(-4, 2**20)  # M_MMAP_MAX


def resident(name):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", status)[1])


before = resident("VmRSS")
tensor = tf.fill((2**24,), 1.0)
held = resident("VmRSS") - before
del tensor
assert resident("VmRSS") - before < held / 2, "the allocator keeps what is freed"


def step_memory(remat):
    model = tfgpipe.PipelinedModel(
        deep(), num_stages=K, num_microbatches=M, remat=remat
    )
    model.compile("sgd", "mse")
    data = tf.constant(x)
    model.train_on_batch(data, data)  # Traces.
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = resident("VmRSS")
    model.train_on_batch(data, data)
    return resident("VmHWM") - before


peaks = {remat: step_memory(remat) for remat in REMATS}
# Weights are there before a step.
expected = {remat: sum(planned[remat]) - K * weights / 2 for remat in REMATS}
print("remat    planned   measured  of none")
for remat in REMATS:
    share = peaks[remat] / peaks["none"]
    planned_mib, measured_mib = expected[remat] / MiB, peaks[remat] / MiB
    print(f"{remat:5}  {planned_mib:5.1f} MiB  {measured_mib:5.1f} MiB  {share:7.2f}")
assert peaks["stage"] < peaks["none"] / 2 and peaks["layer"] < peaks["none"] / 2

# %% memory-picture
tfgpipe.plot_peaks(
    {"planned": expected, "measured": peaks},
    title="60 layers: memory of a step, by what is recomputed",
)

# %% [markdown]
# The plan leaves out the workspace of operations, and tensors that wait to be sent; if little
# is saved, that is much of the memory.
#
# So models can grow. The table shows how many such layers, with Adam, fit devices of 1 GiB
# for N = 2048 and M = 8; the paper's Table 1 answers the same question for AmoebaNet on real
# accelerators, where 82 million weights without GPipe became 318 million on one and 1.8
# billion on eight. The price is a second forward: a quarter of the speed.


# %% memory-largest
def most_layers(num_devices, remat):
    layer = 4 * (4 * width * width + 4 * width)  # Weight, gradient, two slots.
    if remat == "none":
        return num_devices * int(2**30 // (layer + M * kept))
    return num_devices * int((2**30 - boundary) // (layer + kept))


print(f"one device, everything kept   {most_layers(1, 'none'):6,} layers")
for devices in (1, 2, 4, 8):
    print(
        f"{devices} x remat='stage'             {most_layers(devices, 'stage'):6,} layers"
    )

# %% [markdown]
# ## Gradients are those of the model without a pipeline
#
# *Does partitioning, splitting or recomputing change what the model learns?*
#
# No. The gradient of a mini-batch is the sum of those of its microbatches, under any
# partition, and is applied once per step. Below, the gradient of every weight in five
# pipelines is compared with that of the plain layers, in double precision, so that rounding
# hides no mistakes: the largest difference relative to the largest value, for 26 examples,
# which no M here divides but 1:

# %% gradients
TOLERANCE = 1e-12
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")


def mixed_stack():
    layers = []
    for i in range(4):
        layers.append(keras.layers.Dense(16, activation="gelu", name=f"dense_{i}"))
        layers.append(keras.layers.LayerNormalization(name=f"norm_{i}"))
    return [*layers, keras.layers.Dense(3, name="last")]


x, y = random.standard_normal((26, 8)), random.standard_normal((26, 3))


def gradients(layers):
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.set_weights(weights)

    @tf.function
    def of_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        return tape.gradient(loss, model.trainable_variables)

    return [gradient.numpy() for gradient in of_step(x, y)]


plain = keras.Sequential([keras.Input((8,)), *mixed_stack()])
weights = [random.standard_normal(w.shape) for w in plain.weights]
names = ["/".join(w.path.split("/")[-2:]) for w in plain.trainable_variables]
expected = gradients(mixed_stack())
differences = {}
for K, M, remat in [
    (1, 1, "none"),
    (2, 4, "none"),
    (3, 5, "stage"),
    (4, 8, "stage"),
    (4, 8, "layer"),
]:
    found = gradients(
        [
            tfgpipe.PipelinedLayer(
                mixed_stack(), num_stages=K, num_microbatches=M, remat=remat
            )
        ]
    )
    differences[f"K={K}, M={M}, {remat}"] = {
        name: float(np.abs(a - b).max() / np.abs(b).max())
        for name, a, b in zip(names, found, expected, strict=True)
    }
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("float32")
largest = max(value for some in differences.values() for value in some.values())
assert largest < TOLERANCE
print(f"{len(names)} weights, 5 pipelines: the largest difference is {largest:.1e}")

# %% gradients-picture
tfgpipe.plot_differences(differences, tolerance=TOLERANCE)

# %% [markdown]
# The remaining differences come from the order of additions. `tests/models/test_identity.py` does this for
# all K in 1..4 and M in {1, 2, 3, 5}, every kind of layer and each `remat`.

# %% [markdown]
# ## Unequal layers, and balancing
#
# *What does one slow stage cost, and how is a better partition found?*
#
# The slowest stage determines the speed. Here are four layers with equally many weights, of
# which the last takes three times as long as each of the others. Balanced by parameters, the
# default, each stage has two layers, and one takes twice as long as the other.
# `balance="time"` measures each layer, forward and backward, and finds the best partition:


# %% balance-plans
def uneven():
    fast = [Waiting(milliseconds=0.5, name=f"fast_{i}") for i in range(3)]
    return [*fast, Waiting(milliseconds=1.5, name="slow")]


sample = np.ones((128, 4), "float32")
by_parameters, by_time = (
    tfgpipe.plan(
        uneven(),
        num_stages=2,
        num_microbatches=8,
        balance=balance,
        remat="none",
        sample=sample,
    )
    for balance in ("params", "time")
)
print(by_parameters, by_time, sep="\n\n")

# %% [markdown]
# The unbalanced and the balanced pipeline, measured:

# %% balance-measured
timelines = []
for title, plan in (("params", by_parameters), ("time", by_time)):
    timeline = measured(uneven(), num_microbatches=8, balance=plan.calls_per_stage)
    title = f'balance="{title}": {plan.calls_per_stage[0]} layers and {plan.calls_per_stage[1]}'
    timelines.append(dataclasses.replace(timeline, title=title))
tfgpipe.plot_timelines(timelines)

# %% [markdown]
# The paper balances by an estimate of each layer's cost, and says that imbalance costs
# AmoebaNet its linear speed-up. Here the partition is optimal for costs that can be
# parameters, FLOPs, measured time or memory, within a `memory_limit` if there is one.
# `tfgpipe.recut(model, plan.rebalance(measured).calls_per_stage)` changes the partition of a
# model in training, which continues as it would have, to rounding.

# %% [markdown]
# ## Batch normalisation
#
# *Which examples does batch normalisation normalise over?*
#
# Those of the microbatch: otherwise every microbatch would wait for all others in every such
# layer. The paper does the same in training, and updates the moving averages, which
# evaluation uses, by the whole mini-batch. That is `batch_norm="deferred"`. With
# `"microbatch"`, the default, they are updated M times per step, as Keras updates them
# whenever a layer is called.

# %% batch-normalisation
x = random.standard_normal((32, 4), dtype="float32") + 3


def normalised():
    keras.utils.set_random_seed(1)
    return [keras.layers.Dense(3), keras.layers.BatchNormalization(momentum=0.9)]


plain = keras.Sequential([keras.Input((4,)), *normalised()])
expected = plain(x, training=True)
averages = {"unpipelined": plain.layers[1]}
for M, batch_norm in [(4, "microbatch"), (4, "deferred"), (1, "microbatch")]:
    layer = tfgpipe.PipelinedLayer(
        normalised(), num_stages=2, num_microbatches=M, batch_norm=batch_norm
    )
    found = layer(x, training=True)
    averages[f"M = {M}, {batch_norm}"] = layer.layers[1]
    if M == 1:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
print("after one step of 32 rows")
print(f"{'layers':17}  {'moving mean':31}  moving variance")
for name, norm in averages.items():
    found = (norm.moving_mean.numpy(), norm.moving_variance.numpy())
    mean, variance = (" ".join(f"{value:7.4f}" for value in each) for each in found)
    print(f"{name:17}  {mean}  {variance}")
for name in ("moving_mean", "moving_variance"):
    one, deferred, every = (
        getattr(averages[way], name)
        for way in ("unpipelined", "M = 4, deferred", "M = 4, microbatch")
    )
    np.testing.assert_allclose(deferred, one, rtol=1e-5)
    assert np.abs(every - one).max() > 0.01

# %% [markdown]
# A pipeline that updates averages once per microbatch warns, once.
# [A table](../explanation/parallelism.md#batch-statistics) has all cases, with replicas.

# %% [markdown]
# ## Variable lengths
#
# *What if every batch has another length?*
#
# Nothing has to be configured. Padding is masked by Keras masks, which cross stage boundaries
# with the activations, and a new length does not retrace anything. Ten batches of ten
# lengths, the last one smaller, through the same model without and with a pipeline:


# %% variable-lengths
class Counted(keras.layers.Dense):
    """A dense layer that counts how often Python runs its `call`."""

    num_calls = 0

    def call(self, x):
        self.num_calls += 1
        return super().call(x)


def tokens_model():
    keras.utils.set_random_seed(2)
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(50, 16, mask_zero=True)(tokens)
    x = Counted(16, activation="relu", name="counted")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)  # Over what is not masked.
    return keras.Model(tokens, keras.layers.Dense(1)(x))


def batches():
    random = np.random.default_rng(3)
    for length in range(5, 15):
        rows = 8 if length < 14 else 5
        tokens = random.integers(1, 50, (rows, length))
        lengths = random.integers(1, length + 1, (rows, 1))
        tokens = np.where(np.arange(length) < lengths, tokens, 0)  # Zero is padding.
        yield tokens, tokens.sum(axis=1, keepdims=True) / 100


specs = (tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, 1)))
data = tf.data.Dataset.from_generator(batches, output_signature=specs)
plain, pipelined = (
    tokens_model(),
    tfgpipe.pipeline(tokens_model(), num_stages=2, num_microbatches=4, schedule="1f1b"),
)
for name, model in (("unpipelined", plain), ("pipelined", pipelined)):
    model.compile(keras.optimizers.SGD(0.1), "mse")
    inner = model.unpipelined() if name == "pipelined" else model
    counted = inner.get_layer("counted")
    counted.num_calls = 0
    history = model.fit(data, verbose=0)
    loss = history.history["loss"][0]
    print(f"{name:12} 10 lengths, loss {loss:.6f}, traces: {counted.num_calls}")
for a, b in zip(plain.get_weights(), pipelined.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

# %% [markdown]
# Ragged tensors are refused; the error says how to pad them.

# %% [markdown]
# ## A U-Net
#
# *What about a model that is no chain of layers?*
#
# A U-Net decreases in size and increases again, and each level of the second half uses the
# output of the same level of the first. In a pipeline such a skip connection goes directly
# from the stage that computes it to the stage that uses it, not through those between.
# `tfgpipe.pipeline` takes the Functional model unchanged:


# %% u-net-plan
def u_net(size=32, filters=8, depth=2):
    def twice(x, filters, where):
        for i in range(2):
            conv = keras.layers.Conv2D(
                filters, 3, padding="same", activation="relu", name=f"{where}_conv_{i}"
            )
            x = conv(x)
        return x

    keras.utils.set_random_seed(4)
    x = image = keras.Input((size, size, 1))
    skips = []
    for level in range(depth):
        x = twice(x, filters << level, f"down_{level}")
        skips.append(x)
        x = keras.layers.MaxPooling2D(name=f"down_{level}_pool")(x)
    x = twice(x, filters << depth, "bottom")
    for level in reversed(range(depth)):
        up = keras.layers.Conv2DTranspose(
            filters << level, 2, strides=2, name=f"up_{level}"
        )
        x = keras.layers.Concatenate(name=f"up_{level}_skip")([skips[level], up(x)])
        x = twice(x, filters << level, f"up_{level}")
    outputs = keras.layers.Conv2D(1, 1, name="logits")(x)
    return keras.Model(image, outputs, name="u_net")


plain = u_net()
plan = tfgpipe.plan(
    plain, num_stages=3, num_microbatches=4, balance="flops", batch_size=16
)
print(plan)

# %% [markdown]
# The last stage receives 64 KiB per microbatch from its neighbour, and 128 KiB, the skip
# connection of the topmost level, from the first stage. Trained to find bright discs in
# noise, the pipeline has the losses of the plain model:

# %% u-net-trained
pipelined = tfgpipe.pipeline(
    u_net(), num_microbatches=4, balance=plan.calls_per_stage, schedule="1f1b"
)
centres = random.uniform(8, 24, (64, 2, 1, 1))
down, across = np.mgrid[:32, :32]
disc = np.hypot(down - centres[:, 0], across - centres[:, 1]) < 6
mask = disc[..., None].astype("float32")
image = (mask + random.normal(0, 0.5, mask.shape)).astype("float32")
losses = []
for model in (plain, pipelined):
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2), loss)
    history = model.fit(image, mask, batch_size=16, epochs=3, shuffle=False, verbose=0)
    losses.append(history.history["loss"])
print("unpipelined", np.round(losses[0], 5))
print("pipelined  ", np.round(losses[1], 5))
np.testing.assert_allclose(*losses, rtol=1e-4)

# %% u-net-on-devices
tfgpipe.plot_mesh(device_memory(pipelined))

# %% [markdown]
# ## Mixed precision
#
# *What is in half precision, and what happens when it overflows?*
#
# With `dtype="mixed_float16"` layers compute in half precision, and activations cross stage
# boundaries in it, in half the bytes. Weights, gradient accumulators and slots are float32.
# Loss scaling is Keras' own: an overflow in one microbatch reaches the accumulated gradient,
# so the step is skipped, and the scale halved.

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
crossing = model.plan(batch_size=64).stages[1].received_bytes
print(f"computed in {layers[0].compute_dtype}, kept in {layers[0].kernel.dtype}")
print(f"a microbatch sends {crossing:.0f} bytes between the stages")
assert crossing == 16 * 64 * 2 and layers[0].kernel.dtype == "float32"

before = model.get_weights()
overflowing = np.where(np.arange(64)[:, None] == 5, np.float32(1e6), x)  # One row.
model.train_on_batch(overflowing, y)
for a, b in zip(before, model.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)
print(f"after an overflow: no weight moved, scale {float(optimizer.dynamic_scale):.0f}")
assert float(optimizer.dynamic_scale) == 512

# %% [markdown]
# For slow links activations can be compressed in any precision: `transfer_dtype="bfloat16"`
# or `"int8"` ([mixed-precision.md](../how-to/half-precision.md)).

# %% [markdown]
# ## Quantization-aware training
#
# *How is a model converted to int8 without losing accuracy?*
#
# By training with the rounding of int8. `quantization.apply` wraps each layer, so that
# weights and activations are rounded to 256 levels; the ranges of these levels are updated
# once per step, by all microbatches. So M changes nothing, with rematerialisation or
# without. Handwritten digits of scikit-learn, M = 8 compared with M = 1:

# %% int8-trained
images, labels = datasets.load_digits(return_X_y=True)
images = (images / 16).astype("float32")
train, test = slice(0, 1280), slice(1280, None)
scheme = quantization.default_8bit(
    activations=quantization.MovingAverageRange(decay=0.99, ramp=True)
)


def digits_model(M, remat):
    keras.utils.set_random_seed(5)
    layers = [keras.Input((64,))]
    layers += [keras.layers.Dense(48, activation="relu") for _ in range(2)]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model = tfgpipe.pipeline(
        quantization.apply(model, scheme=scheme),
        num_stages=2,
        num_microbatches=M,
        remat=remat,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


whole, model = digits_model(1, "none"), digits_model(8, "stage")
arguments = {"batch_size": 64, "shuffle": False, "verbose": 0}
losses = [
    each.fit(images[train], labels[train], **arguments).history["loss"]
    for each in (whole, model)
]
print(f"first epoch: M = 1 {losses[0][0]:.5f}, M = 8 recomputing {losses[1][0]:.5f}")
np.testing.assert_allclose(*losses, rtol=1e-4)
history = model.fit(images[train], labels[train], epochs=9, **arguments)
print(f"after 10 epochs: {history.history['loss'][-1]:.5f}")

# %% [markdown]
# Then the file, whose inputs and outputs are 8-bit integers, compared with the model on test
# images:

# %% int8-exported
tfgpipe.export_int8(model, folder / "digits.tflite")
compared = quantization.compare(
    model, folder / "digits.tflite", (images[test], labels[test])
)
print(compared)
assert compared.largest_difference <= 1 and compared.identical > 0.9

# %% [markdown]
# [quantization.md](../explanation/quantization.md) is on the training, [int8.md](../how-to/int8.md) on the file.

# %% [markdown]
# ## Checkpoint and resume
#
# *Does a saved run continue exactly, and has it to continue under the same partition?*
#
# Yes, and no. Stages are where weights are, not what they are: a checkpoint names layers, and
# loads under any partition (under another TensorFlow may fuse other operations, so that the
# last bit can differ). A run of four stages is saved and continues for three steps; then two
# stages load it, Adam's slots included, and take the same three steps:

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
        model.reset_metrics()  # By itself Keras returns the mean over steps.
        losses.append(float(model.train_on_batch(x, y)))
    return losses


four, checkpoint = adam_pipeline(4)
three_steps(four)
path = checkpoint.save(str(folder / "checkpoint"))
went_on = three_steps(four)

two, checkpoint = adam_pipeline(2)
checkpoint.restore(path).assert_existing_objects_matched()
resumed = three_steps(two)
print("K = 4 went on ", went_on)
print("K = 2 resumed ", resumed)
np.testing.assert_allclose(resumed, went_on, rtol=1e-6)
assert int(two.optimizer.iterations) == 6

# %% [markdown]
# `model.save`, `save_weights` and `ModelCheckpoint` of Keras work as well, and
# `model.unpipelined()` is the plain Keras model with the same weights, which can be served or
# loaded without this library.
#
# For whole runs there is the trainer. It saves in the background, checks every byte that it
# loads, and after a kill at any time continues with the losses of an undisturbed run, to the
# last bit ([trainer.md](../how-to/training.md)):
#
# ```bash
# python -m trainer --params=lm.Tiny --logdir=runs/tiny    # Killed? The same again.
# ```

# %% [markdown]
# ## Replicas and several hosts
#
# *What changes with more devices than one pipeline needs, or on other hosts?*
#
# With more devices: replicas. `PipelineStrategy` creates D copies of the pipeline on D x K
# devices, splits each mini-batch among them, and all-reduces the gradients of each stage
# over its D devices. The result is that of one pipeline on the whole batch:


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
# Other hosts offer their devices through a worker, `python -m tfgpipe.cluster worker`, and a
# program names these instead of its own. `launch` starts workers on this machine and then
# the program, which is enough to show it: each stage is in its own process, and they share
# only the network.

# %% cluster
PROGRAM = """
import os
import keras, numpy as np, tfgpipe

def losses(**devices):
    keras.utils.set_random_seed(7)
    strategy = tfgpipe.PipelineStrategy(num_stages=2, **devices)
    with strategy.scope():
        layers = [keras.layers.Dense(16, activation="relu") for _ in range(4)]
        model = tfgpipe.PipelinedModel(layers, num_microbatches=4, schedule="1f1b")
        model.compile("adam", "mse")
    x = np.random.default_rng(8).standard_normal((32, 16), dtype="float32")
    history = model.fit(x, x, batch_size=16, epochs=2, shuffle=False, verbose=0)
    names = [model.mesh.short_names(stage) for stage in range(2)]
    print("losses on", " and ".join(names), history.history["loss"])
    return history.history["loss"]

tfgpipe.make_logical_cpus(2)
tfgpipe.cluster.connect(os.environ["TFGPIPE_CLUSTER"])
here = losses(devices=["CPU:0", "CPU:1"])
there = losses(cluster=os.environ["TFGPIPE_CLUSTER"])
assert here == there, "bit for bit"
"""
(folder / "program.py").write_text(PROGRAM)
launch = [sys.executable, "-m", "tfgpipe.cluster", "launch", "--workers=2"]
run = subprocess.run(
    [*launch, "--start_limit=500", "--", sys.executable, str(folder / "program.py")],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
)
print(
    *(line for line in run.stdout.splitlines() if line.startswith("losses")), sep="\n"
)
assert run.returncode == 0, run.stdout

# %% [markdown]
# The same losses, bit for bit, from two processes connected by gRPC. If a worker dies, it is
# restarted, and so is the program, which resumes from its checkpoint. Read
# [cluster.md](../how-to/hosts.md) before opening a port: TensorFlow's runtime has no
# authentication.

# %% [markdown]
# ## What the paper claims, and what was found here
#
# | claim of [Huang et al. 2019](https://arxiv.org/abs/1811.06965) | found here |
# |---|---|
# | the bubble is (K - 1) / (M + K - 1) (2.3) | exactly, in simulation; [measured](#the-bubble-measured) for K up to 8 above it, by the overhead of the machine |
# | it is negligible from M = 4K on (2.3) | below a fifth for any K: 11% at K = 2, 16% at K = 4; less with zero bubble |
# | peak memory of activations is O(N + L/K x N/M) with rematerialisation, O(N x L) without (2.3) | [to the byte](#rematerialisation-and-the-memory-wall) in the plan; in measured steps, asserted to be less than half |
# | gradients are consistent, whatever the number of stages (2.2) | to 1e-12 in double precision, [for every weight](#gradients-are-those-of-the-model-without-a-pipeline) |
# | communication is low: only tensors at stage boundaries (2.3) | [the bytes are those](#partitioning-a-model-into-stages); time on slow links between accelerators was not measured |
# | almost linear speed-up where stages are equal (3) | bounded: K (1 - bubble) on [devices that wait](#the-bubble-measured); 1.64 of 1.78 on two real cores, in a benchmark. No run on several accelerators; Tables 2 and 3 [predicted](../../benchmarks/RESULTS.md#the-planner-and-gpipes-tables), cell by cell |
# | batch statistics over microbatches, moving averages over mini-batches (2.2) | [`batch_norm="deferred"`](#batch-normalisation), equal to the unpipelined layer's |
# | layers of uneven cost reduce the speed-up (3) | [shown, and balanced](#unequal-layers-and-balancing) |
# | AmoebaNet-D (18, 208) has 82 million weights (Table 1) | yes: `tests/nightly/test_amoebanet.py` |
# | models of 1.8 and 83.9 billion weights train (Table 1) | not run: no such hardware. What fits a device was [computed](../../benchmarks/RESULTS.md#the-planner-and-gpipes-tables), within 15% of the published |
# | 84.4% on ImageNet, translation of 103 languages (4, 5) | not run |
