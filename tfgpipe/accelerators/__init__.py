"""A training step on accelerators that are not here.

platforms        the accelerators: memory, peaks, and what their compiler is to know
steps            the graph of a training step, traced and not run
placement        where its operations run on GPUs, and what is copied for them
hlo              the HLO module of what TensorFlow has traced
compilers        a compiler in a process of its own, and what it says of a module
compile_process  that process
stage_functions  the stage functions and updates of a step, and compiled
report           all of it together: `tfgpipe.dry_run`

Nothing is run, so nothing is said of results or measured times. The compilers are
packages of the extra `tfgpipe[compilers]`.
"""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports
from tfgpipe.accelerators.compilers import Compiled as Compiled
from tfgpipe.accelerators.compilers import Compiler as Compiler
from tfgpipe.accelerators.compilers import missing as missing
from tfgpipe.accelerators.platforms import PLATFORMS as PLATFORMS
from tfgpipe.accelerators.platforms import Platform as Platform
from tfgpipe.accelerators.platforms import find as find
from tfgpipe.accelerators.platforms import roofline_seconds as roofline_seconds

if TYPE_CHECKING:
    from tfgpipe.accelerators.hlo import UnsupportedOpError as UnsupportedOpError
    from tfgpipe.accelerators.placement import HOST as HOST
    from tfgpipe.accelerators.placement import Operation as Operation
    from tfgpipe.accelerators.report import DryRun as DryRun
    from tfgpipe.accelerators.report import FunctionReport as FunctionReport
    from tfgpipe.accelerators.report import Transfer as Transfer
    from tfgpipe.accelerators.report import dry_run as dry_run
    from tfgpipe.accelerators.report import dry_runs as dry_runs
    from tfgpipe.accelerators.stage_functions import step_functions as step_functions

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    hlo="UnsupportedOpError",
    placement="HOST Operation",
    report="DryRun FunctionReport Transfer dry_run dry_runs",
    stage_functions="step_functions",
)
