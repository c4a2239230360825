"""Device meshes: the devices of each replica, stage and shard, and their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.devices import colocation as colocation
    from tfgpipe.devices import sharding as sharding
    from tfgpipe.devices import tpu_topology as tpu_topology
    from tfgpipe.devices.mesh import Mesh as Mesh
    from tfgpipe.devices.mesh import ShardingSpec as ShardingSpec
    from tfgpipe.devices.mesh import check_primary_devices as check_primary_devices
    from tfgpipe.devices.mesh import make_logical_cpus as make_logical_cpus
    from tfgpipe.devices.mesh import make_mesh as make_mesh
    from tfgpipe.devices.names import default_devices as default_devices
    from tfgpipe.devices.names import device_type as device_type
    from tfgpipe.devices.names import host_device as host_device
    from tfgpipe.devices.names import local_device_type as local_device_type
    from tfgpipe.devices.names import ordering_token as ordering_token
    from tfgpipe.devices.names import short_name as short_name
    from tfgpipe.devices.names import tpu_core_name as tpu_core_name

__all__, __getattr__, __dir__ = lazy_exports(__name__)
