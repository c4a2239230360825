"""From the command line to an exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import absl.flags

from tfgpipe import cluster
from tfgpipe._util import report_crash
from tfgpipe_trainer import commands, devices, hosts, hyperparams, preemption, run_dir
from tfgpipe_trainer.commands.catalog import listing, show
from tfgpipe_trainer.errors import (
    CheckpointError,
    DivergedError,
    StoppedError,
    UsageError,
)
from tfgpipe_trainer.experiment import Experiment, find, find_of_run
from tfgpipe_trainer.files import is_remote
from tfgpipe_trainer.flags import HELP, PROGRAM, Flags, define, parse, program
from tfgpipe_trainer.hosts import Hosts
from tfgpipe_trainer.hyperparams import HyperparameterError
from tfgpipe_trainer.preemption import ExitGuard, Stopping


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns the exit status: see `flags.HELP`."""
    with contextlib.ExitStack() as signals:
        return _announced(_status(argv, signals))


def run_program(argv: Sequence[str]) -> NoReturn:
    """Runs a command line and ends the process with the exit status."""
    end = ExitGuard()
    end.settle(_announced(_status(argv, end.signals)))
    sys.exit(end.status)


def command() -> NoReturn:
    """Runs `tfgpipe-train`, for which the working directory is on the path as well."""
    sys.path.insert(0, "")
    run_program(sys.argv)


def _announced(status: int) -> int:
    """Returns an exit status, after sending it to the workers of this process."""
    if cluster.Cluster.current is not None:
        cluster.Cluster.current.announce_exit(status)
    return status


def _status(argv: Sequence[str], signals: contextlib.ExitStack) -> int:
    """Runs a command line; `signals` is the context of signals in training."""
    flags = None
    try:
        flags = parse(argv)
        if flags.help:
            show(HELP.replace(PROGRAM, program()))
        elif len(argv) == 1:
            show(listing().replace(PROGRAM, program()))
        else:
            return _run(flags, signals, argv)
    except UsageError as error:
        return _failed(1, f"{error}\nTry `{program()} --help`.")
    except HyperparameterError as error:
        return _failed(2, str(error))
    except cluster.WorkerLost as error:
        cluster.end_process(error)
    except cluster.WorkerUnavailable as error:
        return _failed(cluster.EX_TEMPFAIL, str(error))
    except (cluster.ClusterError, CheckpointError) as error:
        return _failed(1, str(error))
    except KeyboardInterrupt:
        return _failed(1, "\nStopped. The same command goes on.")
    except DivergedError as error:
        return _failed(3, f"Diverged: {error}.")
    except StoppedError:
        return _failed(
            cluster.EXIT_PREEMPTED, "Stopped, with all saved: start it again."
        )
    # Whatever it is, one sentence, and the rest in a file.
    except (Exception, SystemExit) as error:
        folder = None
        if flags and flags.logdir and not is_remote(flags.logdir):
            folder = Path(flags.logdir)
        what = report_crash(error, argv=argv, folder=folder)
        if isinstance(error, MemoryError):
            what += (
                "\nThere is too little memory. Try a smaller training.batch_size, more "
                "pipelining.num_microbatches or num_stages, pipelining.remat=stage or "
                "layer, or a smaller model: see docs/how-to/memory.md."
            )
        return _failed(1, what)
    return 0


def _run(flags: Flags, signals: contextlib.ExitStack, argv: Sequence[str]) -> int:
    if flags.mode in commands.WITHOUT_MODEL:
        return commands.find(flags.mode)(flags) or 0
    role = hosts.find_role(flags.hosts, flags.host_index, engine=flags.engine)
    run_hosts = hosts.ALONE
    if flags.mode in commands.TRAINING and flags.params:
        flags, num_hosts = _fitted(flags, 1 if role is None else len(role.workers))
        if role is not None and role.index >= num_hosts:
            print(f"Host {role.index} has nothing to do.", flush=True)
            return 0
        if role is not None:
            role = role.among_first(num_hosts)
    if role is not None:
        _check_mode(len(role.workers), flags)
        pipelining = flags.experiment().pipelining
        run_hosts = hosts.of_role(role, pipelining)
        if flags.device == "cpu" and run_hosts.role is not None:
            # Of the worker as well, which has the devices.
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        if not run_hosts.is_client:
            return run_hosts.run_worker(pipelining)
    # Of several hosts each may have another working directory.
    usual = not flags.logdir and role is None and bool(flags.params)
    if usual and flags.mode in (*commands.TRAINING, *commands.OF_CHECKPOINTS):
        flags = dataclasses.replace(flags, logdir=str(Path("runs", flags.params)))
    if flags.sweep:
        return _sweep(flags, argv)
    with contextlib.ExitStack() as stack:
        if is_remote(flags.logdir):
            folder = stack.enter_context(_copy_of_run(flags, run_hosts))
            flags = dataclasses.replace(flags, logdir=str(folder))
        _run_in(flags, run_hosts, signals, shows_folder=usual)
    return 0


def _fitted(flags: Flags, number: int) -> tuple[Flags, int]:
    """Returns flags of what fits on the hosts there are, and how many take part."""
    experiment = flags.experiment()
    pipelining = experiment.pipelining
    found = hosts.fit(pipelining, number, batch_size=experiment.training.batch_size)
    sizes = {"num_replicas": found.num_replicas, "num_stages": found.num_stages}
    changed = [
        f"pipelining.{name}={value}"
        for name, value in sizes.items()
        if value != getattr(pipelining, name)
    ]
    if not changed:
        return flags, found.num_hosts
    print(
        f"{number} of {pipelining.num_hosts} hosts are here: {', '.join(changed)}.",
        flush=True,
    )
    changed.append("pipelining.layers_per_stage=None")  # It was for as many stages.
    return dataclasses.replace(flags, set=[*flags.set, *changed]), found.num_hosts


def _sweep(flags: Flags, argv: Sequence[str]) -> int:
    """Makes the runs of a sweep, each by the same command line but for its values."""
    from tfgpipe_trainer.commands import sweep

    own = ("sweep", "sweep_index", "logdir")
    values = define()
    values(argv)
    kept = [
        f"--{name}={value}"
        for name in values
        if name not in own and values[name].present
        for value in _given(values[name])
    ]
    return sweep.run(
        flags.experiment(),
        flags.sweep,
        logdir=flags.logdir,
        index=flags.sweep_index,
        arguments=kept,
    )


def _given(flag: absl.flags.Flag) -> list[Any]:
    """Returns the values of a flag, one for each time that it is given."""
    if not isinstance(flag.value, list):
        return [flag.value]
    is_multi = isinstance(flag, absl.flags.MultiFlag)
    return flag.value if is_multi else [",".join(flag.value)]


def _copy_of_run(
    flags: Flags, run_hosts: Hosts
) -> contextlib.AbstractContextManager[Path]:
    """Returns the context of a copy here of a run's folder elsewhere."""
    from tfgpipe_trainer import remote_run

    if flags.mode not in commands.TRAINING or flags.smoke_test:
        return remote_run.read(flags.logdir)
    return remote_run.trained(
        flags.logdir, host=run_hosts.index, is_chief=run_hosts.is_chief
    )


def _run_in(
    flags: Flags, run_hosts: Hosts, signals: contextlib.ExitStack, *, shows_folder: bool
) -> None:
    """Runs a mode, the run's folder being one of this machine."""
    if flags.mode in commands.OF_CHECKPOINTS:
        flags, experiment = _of_run(flags)
    else:
        experiment = flags.experiment()
    if run_hosts.count > 1:
        run_hosts.shard.rows(experiment.training.batch_size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_hosts.chief_stdout())
        stack.enter_context(run_hosts.report_exit())
        stop = Stopping(status=cluster.EXIT_PREEMPTED)
        if flags.mode in commands.TRAINING and not flags.smoke_test:
            folder = _folder_to_write(flags, experiment)
            if shows_folder:
                print(f"The run's folder is {folder}.", flush=True)
            if run_hosts.is_chief:
                stack.enter_context(run_dir.lock(folder))
            stop = signals.enter_context(
                preemption.on_signals(status=cluster.EXIT_PREEMPTED)
            )
            stack.callback(stop.settle)
            if run_dir.holds_run(folder) and not flags.allow_changes:
                run_dir.check(folder, name=flags.params, experiment=experiment)
        stack.enter_context(_workers(flags, experiment, run_hosts))
        # TensorFlow comes with these, so they wait for the line above.
        from tfgpipe_trainer.commands import job

        job.run(flags, experiment, stop, run_hosts)


def _of_run(flags: Flags) -> tuple[Flags, Experiment]:
    """Returns the experiment of a run, changed by --set, and flags that name it.

    Raises:
        UsageError: If the folder holds no run.
        HyperparameterError: If its hyperparameters cannot be read, or --params is the
            name of another experiment, which only --allow_changes permits.
    """
    folder = _folder_to_read(flags)
    name, text = run_dir.read(folder)
    if flags.params in ("", name):
        own = hyperparams.from_text(text, find_of_run(folder, name, [flags.params]))
    else:
        own = find(flags.params)()
        if not flags.allow_changes:
            run_dir.check(folder, name=flags.params, experiment=own)
    experiment = hyperparams.override(own, flags.set)
    if flags.mode == "decode" and type(experiment).decode is Experiment.decode:
        raise UsageError(
            f"Expected an experiment with a method `decode` for --mode=decode; "
            f"{type(experiment).__name__} has none."
        )
    if not flags.allow_changes:
        run_dir.check_files(folder, experiment)
    if difference := hyperparams.diff(own, experiment):
        print(f"Changed, for --mode={flags.mode} alone:\n{difference}", flush=True)
    return dataclasses.replace(flags, params=flags.params or name), experiment


def _folder_to_write(flags: Flags, experiment: Experiment) -> Path:
    """Returns the folder of a run that is to train, and makes it if need be.

    Raises:
        UsageError: If it cannot be.
        HyperparameterError: If the mode and hyperparameters contradict each other.
    """
    folder = _logdir(flags)
    if flags.mode == "train" and experiment.evaluation.patience is not None:
        raise HyperparameterError(
            "evaluation.patience: expected None, as --mode=train does not evaluate; "
            f"received {experiment.evaluation.patience}. Use --mode=train_and_eval."
        )
    with run_dir.refuse_unwritable(folder):
        run_dir.checkpoints(folder).mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    return folder


def _folder_to_read(flags: Flags) -> Path:
    """Returns the folder of a run that has been trained, or is being so.

    Raises:
        UsageError: If it is none.
    """
    folder = _logdir(flags)
    if flags.watch:
        run_dir.wait_for_run(folder)
    elif not run_dir.holds_run(folder):
        what = {"eval": "evaluate"}.get(flags.mode, flags.mode)
        raise UsageError(f"{folder} holds no checkpoint to {what}.")
    return folder


def _logdir(flags: Flags) -> Path:
    if not flags.logdir:
        raise UsageError(f"Expected --logdir=DIR, which --mode={flags.mode} needs.")
    return Path(flags.logdir)


def _check_mode(num_hosts: int, flags: Flags) -> None:
    """Refuses what several hosts do not do."""
    if flags.mode not in commands.TRAINING or flags.smoke_test:
        what = "--smoke_test" if flags.smoke_test else f"--mode={flags.mode}"
        raise UsageError(
            f"Expected one host for {what}; received {num_hosts}: multi-host runs can "
            "only train. Leave out --hosts, --cluster=slurm, or TF_CONFIG."
        )
    if flags.workers or flags.tpu:
        raise UsageError(
            "Expected one of --hosts, or TF_CONFIG, and --cluster and --tpu; received "
            "several of them."
        )


@contextlib.contextmanager
def _workers(flags: Flags, experiment: Experiment, run_hosts: Hosts) -> Iterator[None]:
    """Starts TensorFlow, and tells errors that come of lost workers from others."""
    run_hosts.start_worker(experiment.pipelining)
    connected = devices.start_tensorflow(
        experiment.pipelining,
        hosts=run_hosts,
        tpu=flags.tpu,
        workers=flags.workers or run_hosts.workers,
        # What is inspected for another device is traced on the CPU.
        device="cpu" if flags.target else flags.device,
    )
    if connected is None:
        yield
        return
    connected.exit_when_lost()
    with connected.raise_if_lost():
        yield


def _failed(status: int, message: str) -> int:
    print(message, file=sys.stderr)
    return status
