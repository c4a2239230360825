"""Distribution strategies for pipelines: placement, collectives, optimizer, ZeRO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.distribution import replica_context as replica_context
    from tfgpipe.distribution.multi_worker_strategy import (
        MultiWorkerPipelineStrategy as MultiWorkerPipelineStrategy,
    )
    from tfgpipe.distribution.optimizer import place_optimizer as place_optimizer
    from tfgpipe.distribution.optimizer import (
        warn_of_sharded_updates as warn_of_sharded_updates,
    )
    from tfgpipe.distribution.optimizer import (
        warn_of_stacked_updates as warn_of_stacked_updates,
    )
    from tfgpipe.distribution.pipeline_strategy import (
        PipelineStrategy as PipelineStrategy,
    )
    from tfgpipe.distribution.placement import Placement as Placement
    from tfgpipe.distribution.placement import choose_placement as choose_placement
    from tfgpipe.distribution.placement import optimizer_slots as optimizer_slots
    from tfgpipe.distribution.spmd_strategy import (
        SPMDPipelineStrategy as SPMDPipelineStrategy,
    )
    from tfgpipe.distribution.stage_collectives import ReplicaGroup as ReplicaGroup
    from tfgpipe.distribution.stage_strategy import StageStrategy as StageStrategy
    from tfgpipe.distribution.tpu_strategy import (
        TPUPipelineStrategy as TPUPipelineStrategy,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
