"""Distribution strategies for pipelines: placement, collectives, optimizer, ZeRO."""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.distribution.multi_worker_strategy import MultiWorkerPipelineStrategy
    from tfgpipe.distribution.optimizer import (
        place_optimizer,
        warn_of_sharded_updates,
        warn_of_stacked_updates,
    )
    from tfgpipe.distribution.pipeline_strategy import PipelineStrategy
    from tfgpipe.distribution.replicas import seed_offset
    from tfgpipe.distribution.single_replica import current_strategy
    from tfgpipe.distribution.spmd_strategy import SPMDPipelineStrategy
    from tfgpipe.distribution.stage_collectives import ReplicaGroup
    from tfgpipe.distribution.stage_strategy import StageStrategy, optimizer_slots

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    multi_worker_strategy="MultiWorkerPipelineStrategy",
    optimizer="place_optimizer warn_of_sharded_updates warn_of_stacked_updates",
    pipeline_strategy="PipelineStrategy",
    replicas="seed_offset",
    single_replica="current_strategy",
    spmd_strategy="SPMDPipelineStrategy",
    stage_collectives="ReplicaGroup",
    stage_strategy="StageStrategy optimizer_slots",
)
