"""The grid of devices."""

from __future__ import annotations

import pytest

import tfgpipe
from tfgpipe.devices import mesh, names


def short(grid):
    return [[names.short_name(device) for device in row] for row in grid]


def test_stages_of_a_replica_are_next_to_each_other():
    grid = mesh.make_mesh(num_stages=3, num_replicas=2).primary_devices
    assert short(grid) == [["CPU:0", "CPU:1", "CPU:2"], ["CPU:3", "CPU:4", "CPU:5"]]


def test_named_devices_are_taken_in_order_whatever_their_spelling():
    made = mesh.make_mesh(num_stages=2, devices=["cpu:3", "/device:CPU:1"])
    assert short(made.primary_devices) == [["CPU:3", "CPU:1"]]
    assert made.replica_devices(1) == ("/job:localhost/replica:0/task:0/device:CPU:1",)


def test_too_few_devices_are_counted_and_the_remedy_shown():
    with pytest.raises(ValueError, match=r"3 stages x 3 replicas need 9.*cpus\(9\)"):
        mesh.make_mesh(num_stages=3, num_replicas=3)


def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match=r"Received GPU:7; TensorFlow sees .*CPU:7"):
        mesh.make_mesh(num_stages=2, devices=["CPU:0", "GPU:7"])


def test_logical_cpus_cannot_change_once_tensorflow_runs():
    tfgpipe.make_logical_cpus(8)  # As many as there are: nothing to do.
    with pytest.raises(RuntimeError, match=r"num_devices=5 when .* started with 8"):
        tfgpipe.make_logical_cpus(5)


def test_no_logical_cpus_are_refused():
    with pytest.raises(ValueError, match=r"at least 1\. Received 0"):
        tfgpipe.make_logical_cpus(0)


def test_the_kind_of_a_device():
    assert names.device_type("/job:worker/replica:0/task:1/device:GPU:0") == "GPU"


def test_shards_of_a_stage_are_next_to_each_other():
    made = mesh.make_mesh(num_stages=2, num_replicas=2, num_shards=2)
    assert made.shape == (2, 2, 2)
    assert made.axis_names == ("replica", "stage", "shard")
    assert [short(replica) for replica in made.devices] == [
        [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]],
        [["CPU:4", "CPU:5"], ["CPU:6", "CPU:7"]],
    ]
    assert short(made.primary_devices) == [["CPU:0", "CPU:2"], ["CPU:4", "CPU:6"]]
    assert short([made.replica_devices(1, 1), made.shard_devices(1, 0)]) == [
        ["CPU:3", "CPU:7"],
        ["CPU:4", "CPU:5"],
    ]


def test_no_shards_are_refused():
    with pytest.raises(
        ValueError, match=r"`num_shards` must be an integer of at least 1"
    ):
        mesh.make_mesh(num_stages=1, num_shards=0)


def test_leads_of_the_last_stage_share_a_host():
    def device(task, index):
        return f"/job:worker/replica:0/task:{task}/device:CPU:{index}"

    apart = [(device(task, 0),) for task in (0, 1)]
    together = [(device(2, index),) for index in (0, 1)]
    mesh.check_primary_devices(mesh.Mesh(tuple(zip(apart, together, strict=True))))
    with pytest.raises(
        ValueError, match=r"one host, since .*Received .*:0/CPU.*:1/CPU"
    ):
        mesh.check_primary_devices(mesh.Mesh(tuple(zip(together, apart, strict=True))))


def on_workers(*sizes, kind="CPU"):
    """Returns the names of so many devices of each worker."""
    return [
        [f"/job:worker/replica:0/task:{task}/device:{kind}:{i}" for i in range(size)]
        for task, size in enumerate(sizes)
    ]


def test_stages_are_spread_over_workers(monkeypatch):
    """Two of three stages are on the first worker, the replicas of each on one."""
    first, second = on_workers(4, 4)
    monkeypatch.setattr(names, "visible_devices", lambda: [*first, *second])
    a, b, c, d = first
    e, f, *_ = second
    made = mesh.make_mesh(num_stages=3, num_shards=2)
    assert made.devices == (((a, b), (c, d), (e, f)),)
    made = mesh.make_mesh(num_stages=3, num_replicas=2)
    assert made.devices == (((a,), (c,), (e,)), ((b,), (d,), (f,)))
    made = mesh.make_mesh(num_stages=1, num_replicas=2, workers=range(1, 2))
    assert made.devices == (((e,),), ((f,),))


def test_workers_beyond_the_number_of_stages_are_left_over(monkeypatch):
    workers = on_workers(1, 1, 1, 1)
    monkeypatch.setattr(
        names, "visible_devices", lambda: [x for some in workers for x in some]
    )
    made = mesh.make_mesh(num_stages=2)
    assert made.devices == (((workers[0][0],), (workers[1][0],)),)


def test_devices_of_another_replicas_workers_are_refused(monkeypatch):
    (a,), (b,) = on_workers(1, 1)
    monkeypatch.setattr(mesh, "visible_devices", lambda: [a, b])
    made = mesh.make_mesh(num_stages=1, devices=[b], workers=range(1, 2))
    assert made.devices == (((b,),),)
    with pytest.raises(ValueError, match="are those of workers 1 to 1"):
        mesh.make_mesh(num_stages=1, devices=[a], workers=range(1, 2))


def test_a_worker_with_too_few_devices_is_named(monkeypatch):
    workers = on_workers(3, 3)
    monkeypatch.setattr(names, "visible_devices", lambda: [*workers[0], *workers[1]])
    words = r"over 2 workers need 4 devices on each. Received 3 on .*--devices=4"
    with pytest.raises(ValueError, match=words):
        mesh.make_mesh(num_stages=3, num_shards=2)


def test_the_first_device_of_each_worker_comes_before_the_second_of_any(monkeypatch):
    (a, b, c), (d,) = on_workers(3, 1)
    local = names.full_device_name("CPU:0")
    monkeypatch.setattr(names, "visible_devices", lambda: [local, a, b, c, d])
    assert names.default_devices() == [a, d, b, c]
    # Of a worker with GPUs these alone.
    ((gpu,),) = on_workers(1, kind="GPU")
    monkeypatch.setattr(names, "visible_devices", lambda: [local, a, gpu, b, c, d])
    assert names.default_devices() == [gpu, d]
