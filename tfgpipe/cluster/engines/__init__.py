"""What has started the processes of a job: each finds its role, and lends its devices.

roles     the processes of a job, and which this is, by TF_CONFIG
slurm     by the variables of a Slurm job step
ray       the processes of a command in actors of Ray
workers   the worker of a process whose devices have stages
"""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.cluster.engines.ray import run_on_ray
    from tfgpipe.cluster.engines.roles import TF_CONFIG, Role, tf_config_role
    from tfgpipe.cluster.engines.slurm import slurm_role
    from tfgpipe.cluster.engines.workers import run_worker, start_worker

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    ray="run_on_ray",
    roles="TF_CONFIG Role tf_config_role",
    slurm="slurm_role",
    workers="run_worker start_worker",
)
