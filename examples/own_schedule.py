"""A schedule of your own: 1F1B that starts more microbatches, for slow links.

    python examples/own_schedule.py [PICTURE]

It needs no GPU, takes 10 seconds, writes PICTURE (`schedule.png`), and ends with:

    1f1b: bubble 37.9%, in flight (3, 2, 1)
    stage 0  F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5
    stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 .. B5 ..
    stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .. ..
    eager_1f1b: bubble 30.8%, in flight (5, 3, 1)
    stage 0  F0 F1 F2 F3 F4 B0 F5 B1 .. B2 .. B3 .. B4 .. B5
    stage 1  .. F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5 ..
    stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .. ..
    losses under it equal those of the plain model
"""

import sys

import keras
import numpy as np

import tfgpipe
from tfgpipe import schedules

K, M = 3, 6
tfgpipe.make_logical_cpus(K)


def eager_1f1b(num_stages: int, num_microbatches: int) -> tfgpipe.Schedule:
    """Returns 1F1B with up to 2 (K - k) - 1 microbatches in flight on stage k.

    1F1B has K - k. With more of them a stage has something to do while a result is on
    its way ("eager 1F1B", Zhuang et al. 2022).
    """
    orders = []
    for k in range(num_stages):
        order, done = [], 0
        warm_up = min(2 * (num_stages - k) - 1, num_microbatches)
        for m in range(num_microbatches):
            if m >= warm_up:
                order.append(tfgpipe.Action("backward", k, done))
                done += 1
            order.append(tfgpipe.Action("forward", k, m))
        for m in range(done, num_microbatches):
            order.append(tfgpipe.Action("backward", k, m))
        orders.append(tuple(order))
    schedule = tfgpipe.Schedule(
        num_stages, num_microbatches, tuple(orders), name="eager_1f1b"
    )
    return schedule.validate()  # All actions, once each, and none waits forever.


mine = eager_1f1b(K, M)
costs = tfgpipe.Costs(forward=1.0, backward=2.0, latency=0.5)
for schedule in (schedules.one_f_one_b(K, M), mine):
    timeline = tfgpipe.simulate(schedule, costs).timeline
    print(
        f"{schedule.name}: bubble {timeline.bubble:.1%}, in flight {schedule.in_flight}"
    )
    print(schedules.draw(schedule))
tfgpipe.plot_schedule(
    mine, costs=costs, path=sys.argv[1] if len(sys.argv) > 1 else "schedule.png"
)

# Any valid schedule trains as the plain model does.
random = np.random.default_rng(0)
x = random.standard_normal((48, 16), dtype="float32")


def train(schedule: tfgpipe.Schedule | None) -> list[float]:
    """Returns the losses under a schedule, or of the plain model."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, activation="relu") for _ in range(6)]
    if schedule is None:
        model = keras.Sequential(layers)
    else:
        model = tfgpipe.PipelinedModel(
            layers, num_stages=K, num_microbatches=M, schedule=schedule
        )
    model.compile("adam", "mse")
    history = model.fit(x, x, batch_size=24, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"]


np.testing.assert_allclose(train(mine), train(None), rtol=1e-4)
print("losses under it equal those of the plain model")
