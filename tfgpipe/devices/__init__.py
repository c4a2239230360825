"""Device meshes: the devices of each replica, stage and shard, and their names."""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.devices import (
        colocation,
        names,
        sharding,
        small_functions,
        tpu_topology,
    )
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
        ordering_token,
        short_name,
        tpu_devices,
    )

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    submodules="colocation names sharding small_functions tpu_topology",
    mesh="Mesh ShardingSpec check_primary_devices make_logical_cpus make_mesh",
    names="default_devices device_type host_device ordering_token "
    "short_name tpu_devices",
)
