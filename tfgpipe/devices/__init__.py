"""Device meshes: the devices of each replica, stage and shard, and their names."""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.devices import colocation, sharding, tpu_topology
    from tfgpipe.devices.mesh import (
        Mesh,
        ShardingSpec,
        check_primary_devices,
        make_logical_cpus,
        make_mesh,
    )
    from tfgpipe.devices.names import (
        default_devices,
        device_type,
        host_device,
        local_device_type,
        ordering_token,
        short_name,
        standing_for,
        tpu_devices,
    )
    from tfgpipe.devices.small_functions import run_on, scalars_scope

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    submodules="colocation sharding tpu_topology",
    mesh="Mesh ShardingSpec check_primary_devices make_logical_cpus make_mesh",
    names="default_devices device_type host_device local_device_type ordering_token "
    "short_name standing_for tpu_devices",
    small_functions="run_on scalars_scope",
)
