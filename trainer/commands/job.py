"""A mode that works on a model, which is built for the devices here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tensorflow as tf

import tfgpipe
from tfgpipe_trainer import batches, commands, devices
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.flags import Flags
from tfgpipe_trainer.hosts import ALONE, Hosts
from tfgpipe_trainer.preemption import Stopping
from tfgpipe_trainer.train import build


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """All that a mode is called with.

    Attributes:
        flags: The command line.
        experiment: The experiment, changed by --set.
        model: Its model, built.
        stopping: Requests to end a run.
        hosts: This host among those of a run.
    """

    flags: Flags
    experiment: Experiment
    model: tfgpipe.PipelinedModel
    stopping: Stopping
    hosts: Hosts

    @property
    def folder(self) -> Path:
        """The run's folder, the working directory without one."""
        return Path(self.flags.logdir)


def run(
    flags: Flags, experiment: Experiment, stopping: Stopping, hosts: Hosts = ALONE
) -> None:
    """Builds the model of an experiment, and does with it what flags say.

    Raises:
        HyperparameterError: If data turns out to be wrong while it is read.
        MemoryError: If there is too little memory.
    """
    command = commands.find("smoke_test" if flags.smoke_test else flags.mode)
    try:
        scope = devices.scope(
            experiment.pipelining, hosts=hosts, tpu=flags.tpu, tpu_zone=flags.tpu_zone
        )
        model = build(experiment, scope)
        stopping.take_signals()
        command(
            Job(
                flags=flags,
                experiment=experiment,
                model=model,
                stopping=stopping,
                hosts=hosts,
            )
        )
    except tf.errors.OpError as error:
        # What is raised inside a dataset comes out as an error of TensorFlow.
        found = batches.record_error(error)
        if found is not None:
            raise found from None
        is_full = isinstance(error, tf.errors.ResourceExhaustedError)
        if is_full and not store.is_disk_full(error):
            raise MemoryError(error.message) from error
        raise
