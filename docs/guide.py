# %% [markdown]
# # Pipelining, from the first cut to several machines
#
# A network that is too big or too slow for one accelerator is cut into stages, one a
# device, and its mini-batches are cut into microbatches that follow one another through
# the stages, as cars through an assembly line. This is GPipe ([Huang et al.
# 2019](https://arxiv.org/abs/1811.06965)); `tfgpipe` does it to Keras 3 models on
# TensorFlow.
#
# This guide goes through it from the beginning, in pictures and in numbers. Each chapter
# answers one question, and can be read by itself. What the paper claims is reproduced
# where two CPU cores can reproduce it, and bounded where they cannot; the
# [last chapter](#what-the-paper-claims-and-what-was-found-here) lists every claim.
# Whatever is exact is asserted in the code: the guide runs as a test.
#
# | letter | what it counts |
# |---|---|
# | K | stages; stage k is the k-th |
# | M | microbatches of a mini-batch; microbatch m is the m-th |
# | N | rows of a mini-batch |
# | L | layers |
#
# The source is [guide.py](guide.py), the notebook [guide.ipynb](guide.ipynb), and this
# text with its pictures [guide.md](guide.md). `make guide` runs it all anew,
# which takes two cores some four minutes.

# %% [markdown]
# ## Set-up
#
# Eight logical CPUs stand for eight accelerators. They have devices' names and weights
# of their own, and one pool of threads: what is computed on them is right, but no faster
# than the cores of this machine. One thread computes each operation, so that two stages
# share two cores as two devices would.

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
from tfgpipe._util import readable_bytes, text_table
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
# ## Cutting a model into stages
#
# *Which layers go to which device, and what has to travel between them?*
#
# A stage is a run of consecutive layers. `tfgpipe.plan` finds the best places to cut,
# before anything is on a device. Here are twelve equal layers for four devices:


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
# What `receives` counts is all that a stage is ever sent for a microbatch: the output of
# the layer before the cut, and on the way back as many bytes of gradient. Weights,
# their gradients and the optimizer's slots stay where they are. That is the paper's
# point on communication: a few tensors between neighbours, no sum over all devices.
# Beside it, what data parallelism moves for the same layers:

# %% cut-bytes
row_bytes = 256 * 4
assert [s.received_bytes for s in plan.stages] == [0] + [64 // 8 * row_bytes] * 3
boundary = 2 * 8 * sum(stage.received_bytes for stage in plan.stages)  # M each way.
weights = 4 * sum(stage.parameters for stage in plan.stages)
print(f"a step sends across the 3 cuts   {readable_bytes(boundary):>10}")
print(
    f"gradients to sum over replicas   {readable_bytes(weights):>10}, on each replica"
)

# %% [markdown]
# `PipelinedLayer` is that plan as a Keras layer, to be used like any other. After a step
# of training each device holds its stage's weights and Adam's slots for them, and
# nothing of the others':

# %% cut-table
layer = tfgpipe.PipelinedLayer(stack(), num_stages=4, num_microbatches=8)
model = keras.Sequential([keras.Input((256,)), layer])
model.compile("adam", "mse")
model.fit(x, x, batch_size=64, verbose=0)
print(tfgpipe.stage_table(model))

# %% stages-on-devices
tfgpipe.plot_mesh(device_memory(model))

# %% [markdown]
# ## Slicing a mini-batch
#
# *Why are four devices not faster than one as long as the mini-batch is whole?*
#
# Because each waits for the others. Stage 1 needs what stage 0 makes, so with M = 1 one
# device works at a time. Cut the mini-batch into microbatches, and stage 0 goes on with
# the next while stage 1 has the first. Time is across, devices are down, the numbers
# are microbatches, and hatched is idle. The work is the same in all three pictures, and
# more of it is done at a time:


# %% slicing
def sliced(M):
    # A stage takes 16 ms forward and 32 ms backward for the whole mini-batch.
    costs = tfgpipe.Costs(forward=0.016 / M, backward=0.032 / M)
    timeline = tfgpipe.simulate(schedules.gpipe(4, M), costs).timeline
    return dataclasses.replace(timeline, title=f"4 stages, M = {M}")


tfgpipe.plot_timelines([sliced(1), sliced(2), sliced(4)])

# %% [markdown]
# The result does not depend on M. Nor does M have to divide the mini-batch: rows are
# dealt out as evenly as they go, and a batch smaller than M is cut into single rows.

# %% slicing-any-size
plain = layer.unpipelined()
for rows in (64, 10, 3):
    expected, found = plain(x[:rows]), layer(x[:rows])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    print(f"{rows:2} rows in 8 microbatches: as unpipelined")

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
# A backward takes about two forwards, since it makes gradients of inputs and of weights.
# With that the same schedule is:

# %% schedule-drawn
tfgpipe.plot_schedule(schedules.gpipe(4, 8))

# %% [markdown]
# What is hatched is the *bubble*. A stage waits until the first microbatch has reached
# it, again until the first gradient comes back, and at the end for the stages before
# it. In forwards and in backwards, each device works for M slots of M + K - 1. So the
# bubble is (K - 1) / (M + K - 1) of the step, if stages are equal, whatever a backward
# takes. Simulated, it is exactly that:

# %% schedule-formula
for K in range(1, 9):
    for M in (1, 2, 3, 8, 32):
        timeline = tfgpipe.simulate(schedules.gpipe(K, M), tfgpipe.Costs()).timeline
        assert abs(timeline.bubble - (K - 1) / (M + K - 1)) < 1e-12
for K in (2, 4, 8, 16, 64):
    print(f"K = {K:2}, M = 4K: a bubble of {(K - 1) / (5 * K - 1):.1%}")

# %% [markdown]
# The paper calls the bubble negligible from M = 4K on. By the formula it is below a
# fifth there, for any K: small, not nothing. What else shrinks it is another order.
# 1F1B keeps the bubble and holds fewer microbatches at a time; zero bubble fills it with
# gradients of weights, for which nobody waits. They are the `schedule=` of a
# `PipelinedModel`, and all give the same gradients ([schedules](schedules.md)).


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
# Eight stages cannot compute at a time on two cores. But to the machine that runs a
# pipeline an accelerator is something that one waits for, and waiting needs no core. So
# here is a layer that computes little and then waits, a millisecond for each row, and
# twice that in the backward. Everything else is real: the library's engine runs its
# actions in the order of the schedule, and `TimelineCallback` reads the clock before and
# after each of them.


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
rows = []
for (K, M), step in zip(cases, steps, strict=True):
    theory, speedup = (K - 1) / (M + K - 1), K * (1 - step.bubble)
    rows.append(
        (str(K), str(M), f"{theory:.1%}", f"{step.bubble:.1%}", f"{speedup:.2f}")
    )
header = ("K", "M", "bubble in theory", "measured", "devices at work")
print(text_table(header, rows, left=()))

# %% bubble-measured
tfgpipe.plot_gpipe_bubbles((2, 4, 8), measured=steps)

# %% [markdown]
# What the dots have above their curves is what the machine takes beside the waiting: to
# hand over, to start threads, and to do the layers' small products on two cores that
# eight devices share. Where other programs have the cores as well, it is more.
#
# `devices at work` is the mean over the step, K x (1 - bubble): by how much K equal
# devices beat one. The paper's *almost linear speed-up* is this, from M = 4K on, where
# stages are equal and links are fast. That much is the schedule; how fast a real
# accelerator computes a small microbatch is not measured here.
#
# Two stages do fit two cores, without any waiting. Dense layers of 512, theory above (the
# schedule with the mean times that were measured), measurement below:

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
# Beside a model that trains on one of the two cores, `benchmarks/pipeline.py` has
# measured 1.64 times the speed for a transformer at K = 2, M = 8, where the formula
# allows 2 x 8 / 9 = 1.78 ([speed](speed.md) has what is lost, and where).

# %% [markdown]
# ## Rematerialisation, and the memory wall
#
# *What fills a device's memory, and what does recomputing save?*
#
# The backward pass needs what the forward has computed, layer by layer, so without
# further ado the activations of N rows in L layers wait in memory: O(N x L), whatever M
# is. *Rematerialisation* keeps, of each microbatch, the input of the stage alone, and
# runs the stage forward again right before its backward. The paper has the peak then at
# O(N + L/K x N/M): the N inputs at the cut, and the activations of one microbatch in
# one stage.
#
# A stack of 60 layers on four devices, 2048 rows in 8 microbatches. What `plan`
# expects, for each choice of `remat`, gradients and weights included:

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
# `"layer"` recomputes layer by layer as well, so that the recomputation itself never
# holds the activations of a whole stage. The paper's formula is the plan's, to the
# byte:

# %% memory-formula
kept = sum(plan.profile.saved_bytes[0])  # Of a layer, for a microbatch of N / M rows.
weights = 2 * 4 * (L // K) * (width * width + width)  # And as many gradients.
cut = N * width * 4  # What N rows take at a cut.
for k in range(1, K):
    assert planned["none"][k] == weights + cut + M * (L // K) * kept
    assert planned["stage"][k] == weights + cut + (L // K) * kept
whole, paper = M * L * kept, cut + (L // K) * kept
print(f"a layer keeps {readable_bytes(M * kept)} of the mini-batch")
print(f"without: N x L            {readable_bytes(whole):>10} on one device")
print(f"with: N + L/K x N/M       {readable_bytes(paper):>10} on each of {K} devices")

# %% [markdown]
# Over a step: without rematerialisation activations pile up as forwards go by.

# %% memory-kept
inputs, activations = cut / M, (L // K) * kept  # Of a microbatch, in a stage.


def over_time(title, **costs):
    costs = tfgpipe.Costs(forward=1e-3, backward=2e-3, fixed_bytes=weights, **costs)
    simulation = tfgpipe.simulate(schedules.gpipe(K, M), costs)
    timeline = dataclasses.replace(simulation.timeline, title=title)
    return tfgpipe.plot_memory(dataclasses.replace(simulation, timeline=timeline))


over_time('remat="none"', kept_bytes=inputs + activations)

# %% [markdown]
# With it only inputs do, and one microbatch's activations come and go:

# %% memory-recomputed
over_time(
    'remat="stage"', recompute=1e-3, kept_bytes=inputs, backward_bytes=activations
)

# %% [markdown]
# And measured: the most that this process has resident during a step, less what it had
# before. All stages are in one process here, so it is the sum over devices. (Linux alone
# tells. The allocator is told to give memory back at once, so that what is resident is
# what is held.)

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
rows = []
for remat in REMATS:
    numbers = [readable_bytes(each[remat]) for each in (expected, peaks)]
    rows.append((remat, *numbers, f"{peaks[remat] / peaks['none']:.2f}"))
print(text_table(("remat", "planned", "measured", "of none"), rows, left=("remat",)))
assert peaks["stage"] < peaks["none"] / 2 and peaks["layer"] < peaks["none"] / 2

# %% memory-picture
tfgpipe.plot_peaks(
    {"planned": expected, "measured": peaks},
    title="60 layers: memory of a step, by what is recomputed",
)

# %% [markdown]
# The plan leaves out what an operation needs while it runs, and what waits to be sent;
# where little is held, that is much of it.
#
# All this is what lets models grow. Of such layers, with Adam, one device of 1 GiB holds as
# many as the table says, N = 2048 and M = 8; the paper's Table 1 is the same question
# for AmoebaNet on real accelerators, where 82 million weights without GPipe became 318
# million on one and 1.8 billion on eight. The price is a second forward: a quarter of
# the speed.


# %% memory-largest
def most_layers(num_devices, remat):
    layer = 4 * (4 * width * width + 4 * width)  # Weight, gradient, two slots.
    if remat == "none":
        return num_devices * int(2**30 // (layer + M * kept))
    return num_devices * int((2**30 - cut) // (layer + kept))


print(f"one device, everything kept   {most_layers(1, 'none'):6,} layers")
for devices in (1, 2, 4, 8):
    print(
        f"{devices} x remat='stage'             {most_layers(devices, 'stage'):6,} layers"
    )

# %% [markdown]
# ## Gradients are those of the model without a pipeline
#
# *Does cutting, slicing or recomputing change what the model learns?*
#
# No. The gradient of a mini-batch is the sum of its microbatches', whatever the cut, and
# that is what is applied, once a step. In double precision, so that rounding does not
# hide mistakes, every weight's gradient for five pipelines beside that of the plain
# layers, the largest difference relative to the largest number; 26 rows, which no M
# here divides but 1:

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
# What is left is the order of additions. `tests/models/test_identity.py` does this for
# all K in 1..4 and M in {1, 2, 3, 5}, every kind of layer and each `remat`.

# %% [markdown]
# ## Layers that are not alike, and balancing
#
# *What does one slow stage cost, and who finds a better cut?*
#
# All stages go at the pace of the slowest. Here are four layers, equal in weights, of
# which the last takes three times as long as each of the others. Balanced by
# parameters, the default, there are two layers in each stage, and one stage takes twice
# as long as the other. `balance="time"` runs each layer, forward and backward, and finds
# the best cut:


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
# The pipe throttled by one stage, and mended, as measured:

# %% balance-measured
timelines = []
for title, plan in (("params", by_parameters), ("time", by_time)):
    timeline = measured(uneven(), num_microbatches=8, balance=plan.calls_per_stage)
    title = f'balance="{title}": {plan.calls_per_stage[0]} layers and {plan.calls_per_stage[1]}'
    timelines.append(dataclasses.replace(timeline, title=title))
tfgpipe.plot_timelines(timelines)

# %% [markdown]
# The paper balances by an estimate of each layer's cost and says itself that imbalance
# costs AmoebaNet its linear speed-up. Here the cut is the best one for the costs given,
# which can be parameters, FLOPs, measured time or memory, within a `memory_limit` if there is one.
# `tfgpipe.recut(model, plan.rebalance(measured).counts)` changes the partition of a model
# that trains already, which goes on as it would have, to rounding.

# %% [markdown]
# ## Batch normalisation
#
# *Which rows does a batch normalisation see?*
#
# Those of its microbatch: normalising by the whole mini-batch would have every
# microbatch wait for all others in every such layer. The paper does so in training, and
# keeps the moving averages that evaluation uses over the whole mini-batch. That is
# `batch_norm="deferred"`. With `"microbatch"`, the default, they move M times a step, as
# Keras moves them whenever a layer is called.

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
rows = []
for name, norm in averages.items():
    found = (norm.moving_mean.numpy(), norm.moving_variance.numpy())
    rows.append(
        (name, *(" ".join(f"{value:7.4f}" for value in each) for each in found))
    )
print(text_table(("layers", "moving mean", "moving variance"), rows, left=("layers",)))
for name in ("moving_mean", "moving_variance"):
    one, deferred, every = (
        getattr(averages[way], name)
        for way in ("unpipelined", "M = 4, deferred", "M = 4, microbatch")
    )
    np.testing.assert_allclose(deferred, one, rtol=1e-5)
    assert np.abs(every - one).max() > 0.01

# %% [markdown]
# A pipeline that moves averages once a microbatch says so in a warning, once.
# [batch-statistics.md](batch-statistics.md) has the whole table, with replicas.

# %% [markdown]
# ## Variable lengths
#
# *What if every batch has another length?*
#
# Nothing has to be told. Padding is masked by Keras masks, which cross from stage to
# stage with the values, and a length that was not seen before does not trace anything
# anew. Ten batches of ten lengths, the last one short of rows, through the same model
# without and with a pipeline:


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
# Ragged tensors are refused, with the way to pad them.

# %% [markdown]
# ## A U-Net
#
# *What about a model that is no chain of layers?*
#
# A U-Net goes down in size and up again, and each level going up reads what the same
# level made going down. Cut into stages, such a skip goes straight from the stage that
# makes it to the one that reads it; what lies between never sees it. `tfgpipe.pipeline`
# takes the Functional model as it is:


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
# Of what the last stage receives for a microbatch, 64 KiB are what its neighbour makes
# and 128 KiB the skip of the topmost level, from the first stage. Trained to find bright discs in noise, the pipeline's losses are those of the
# plain model:

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
# With `dtype="mixed_float16"` layers compute in half precision, and values cross cuts in
# it, in half the bytes. Weights, their gradients' sums over microbatches, and slots stay
# float32. Loss scaling is Keras' own: an overflow in one microbatch reaches the sum, so
# the whole step is left out, once, and the scale halved.

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
print(f"a microbatch sends {crossing:.0f} bytes across the cut")
assert crossing == 16 * 64 * 2 and layers[0].kernel.dtype == "float32"

before = model.get_weights()
overflowing = np.where(np.arange(64)[:, None] == 5, np.float32(1e6), x)  # One row.
model.train_on_batch(overflowing, y)
for a, b in zip(before, model.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)
print(f"after an overflow: no weight moved, scale {float(optimizer.dynamic_scale):.0f}")
assert float(optimizer.dynamic_scale) == 512

# %% [markdown]
# Links that are slower than devices can carry compressed values in any precision:
# `transfer_dtype="bfloat16"` or `"int8"` ([mixed-precision.md](mixed-precision.md)).

# %% [markdown]
# ## Training for 8 bits
#
# *How does a model get into int8 without losing what it has learned?*
#
# By training with the rounding that it will meet. `quantization.apply` wraps each layer,
# so that weights and activations are rounded to 256 levels; the ranges that these are
# spread over move once a step, by what all microbatches have seen. So M changes nothing,
# with rematerialisation or without. Handwritten digits, scikit-learn's, M = 8 beside
# M = 1:

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
# Then the file, which takes and gives 8-bit integers, beside the model it comes from, on
# images that neither has seen:

# %% int8-exported
tfgpipe.export_int8(model, folder / "digits.tflite")
compared = quantization.compare(
    model, folder / "digits.tflite", (images[test], labels[test])
)
print(compared)
assert compared.largest_difference <= 1 and compared.identical > 0.9

# %% [markdown]
# [quantization.md](quantization.md) is on the training, [int8.md](int8.md) on the file.

# %% [markdown]
# ## Checkpoint and resume
#
# *Does a saved run go on exactly, and must it go on in the same cut?*
#
# Exactly, and no. Stages are where weights are, not what they are: a checkpoint names
# layers, and fits any cut (in another cut TensorFlow may fuse other operations, so that
# the last bit can differ). A run of four stages is saved, goes on for three steps, and
# the same three steps are made by two stages that have loaded it, Adam's slots included:

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
# `model.unpipelined()` is the plain Keras model of the same weights, to be served or
# loaded without this library.
#
# Whole runs are the trainer's concern. It saves in the background, checks every byte that it
# loads, and goes on after a kill at any instant with, to the last bit, the losses that an
# undisturbed run has ([trainer.md](trainer.md)):
#
# ```bash
# python -m trainer --params=lm.Tiny --logdir=runs/tiny    # Killed? The same again.
# ```

# %% [markdown]
# ## From one machine to several
#
# *What changes with more devices than one pipeline needs, or on other hosts?*
#
# More devices: replicas. `PipelineStrategy` makes D copies of the pipeline on D x K
# devices, shares each mini-batch out among them, and sums each stage's gradients over
# its own D. The result is that of one pipeline with all rows:


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
# Other hosts lend their devices through a worker, `python -m tfgpipe.cluster worker`,
# and a program names them in place of its own. `launch` starts workers on this machine
# and then the program, which is enough to see it work: each stage is in a process of its
# own, and all that they share is the network.

# %% cluster
PROGRAM = """
import os
import keras, numpy as np, tfgpipe
from tfgpipe.mesh import short_name

def losses(**devices):
    keras.utils.set_random_seed(7)
    strategy = tfgpipe.PipelineStrategy(num_stages=2, **devices)
    with strategy.scope():
        layers = [keras.layers.Dense(16, activation="relu") for _ in range(4)]
        model = tfgpipe.PipelinedModel(layers, num_microbatches=4, schedule="1f1b")
        model.compile("adam", "mse")
    x = np.random.default_rng(8).standard_normal((32, 16), dtype="float32")
    history = model.fit(x, x, batch_size=16, epochs=2, shuffle=False, verbose=0)
    names = [short_name(device) for device in model.mesh.primary_devices[0]]
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
# The same losses, bit for bit, from two processes that talk over gRPC. A worker that
# dies is started again, and so is the program, which goes on from its checkpoint. Read
# [cluster.md](cluster.md) before opening a port: TensorFlow's runtime has no
# authentication.

# %% [markdown]
# ## What the paper claims, and what was found here
#
# | claim of [Huang et al. 2019](https://arxiv.org/abs/1811.06965) | found here |
# |---|---|
# | the bubble is (K - 1) / (M + K - 1) (2.3) | exactly, in simulation; [measured](#the-bubble-measured) for K up to 8 above it, by what the machine takes to hand over |
# | it is negligible from M = 4K on (2.3) | below a fifth for any K: 11% at K = 2, 16% at K = 4; zero bubble schedules have less |
# | peak memory of activations is O(N + L/K x N/M) with rematerialisation, O(N x L) without (2.3) | [to the byte](#rematerialisation-and-the-memory-wall) in the plan; in measured steps, asserted to be less than half |
# | gradients are consistent, whatever the number of stages (2.2) | to 1e-12 in double precision, [for every weight](#gradients-are-those-of-the-model-without-a-pipeline) |
# | communication is low: only tensors at the cuts (2.3) | [the bytes are those](#cutting-a-model-into-stages); time on slow links between accelerators was not measured |
# | almost linear speed-up where stages are equal (3) | bounded: K (1 - bubble) on [devices that wait](#the-bubble-measured); 1.64 of 1.78 on two real cores, in a benchmark. No run on several accelerators; Tables 2 and 3 [predicted](planner.md#compared-with-gpipes-tables), cell by cell |
# | batch statistics over microbatches, moving averages over mini-batches (2.2) | [`batch_norm="deferred"`](#batch-normalisation), equal to the unpipelined layer's |
# | layers of uneven cost spoil the speed-up (3) | [shown, and mended](#layers-that-are-not-alike-and-balancing) |
# | AmoebaNet-D (18, 208) has 82 million weights (Table 1) | yes: `tests/nightly/test_amoebanet.py` |
# | models of 1.8 and 83.9 billion weights train (Table 1) | not run: no such hardware. What the memory of a device allows was [computed](planner.md#compared-with-gpipes-tables), within 15% of the published |
# | 84.4% on ImageNet, translation of 103 languages (4, 5) | not run |
