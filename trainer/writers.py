"""Where measurements go: `metrics.jsonl`, TensorBoard, Weights & Biases, MLflow.

One of your own is a subclass of `Writer`, named as `training.writers=my_module.Mine`.
"""

from __future__ import annotations

import abc
import dataclasses
import errno
import functools
import importlib
import importlib.util
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfgpipe_trainer import files
from tfgpipe_trainer.checkpoint import store
from tfgpipe_trainer.hyperparams import HyperparameterError
from tfgpipe_trainer.progress import report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run, or its going on.

    Attributes:
        folder: The run's folder.
        step: The step that the run goes on from.
        text: The hyperparameters, `name = value` a line.
        name: `"metrics"` of training, `"eval"` of `--watch`.
        title: The name of the experiment.
    """

    folder: Path
    step: int
    text: str
    name: str
    title: str

    @property
    def identity(self) -> str:
        """A name of the run that is the same when it goes on, wherever that is."""
        path = self.folder / "run_id.txt"
        if not path.exists():
            store.atomic_write(path, uuid.uuid4().hex[:16])
        return f"{path.read_text('utf-8')}-{self.name}"

    @property
    def values(self) -> dict[str, str]:
        """The hyperparameters, by name."""
        lines = (line.partition(" = ") for line in self.text.splitlines())
        return {name: value for name, equals, value in lines if equals}


class Writer(abc.ABC):
    """A place for measurements, made of a `Start`.

    An error that it raises is reported, and stops nothing.
    """

    @abc.abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values measured after `step` steps; some may be NaN."""

    def close(self) -> None:  # noqa: B027
        """Ends with the run."""


def find(name: str) -> Callable[[Start], Writer]:
    """Returns the writer of a name, or a class that Python can import.

    Raises:
        HyperparameterError: If there is none, or its package is not installed.
    """
    if name in _WRITERS:
        package, make = _WRITERS[name]
        if importlib.util.find_spec(package) is None:
            raise HyperparameterError(
                f"training.writers: expected the package {package} for {name!r}; "
                f"received an environment without. Try: pip install {package}"
            )
        return make
    module, _, cls = name.rpartition(".")
    try:
        made: Callable[[Start], Writer] = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError, ValueError):
        raise HyperparameterError(
            f"training.writers: expected names among {', '.join(_WRITERS)}, or "
            f"MODULE.CLASS of a Writer; received {name!r}."
        ) from None
    return made


class Metrics:
    """Writes the measurements of a run.

    A disk that is full costs measurements, and stops nothing: it is reported once.

    Args:
        folder: The run's folder.
        step: The step that the run goes on from. What an earlier start has measured
            after it, and at the end, is dropped: it will be measured anew.
        text: The hyperparameters.
        name: The stem of the files' names.
        title: The name of the experiment.
        writers: Names of further writers: see `find`.

    Raises:
        HyperparameterError: If there is none of a name, or its package is missing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        text: str = "",
        name: str = "metrics",
        title: str = "",
        writers: Sequence[str] = ("tensorboard",),
    ) -> None:
        self._path = folder / f"{name}.jsonl"
        self._reported = False
        before = [
            record for record in read_metrics(self._path) if record["step"] <= step
        ]
        # The end of this step is drawn already, as nothing takes a point away.
        self._drawn = {record["step"] for record in before if record.get("final")}
        kept = [_to_line(record) for record in before if not record.get("final")]
        self._trying(lambda: store.atomic_write(self._path, "".join(kept)))
        start = Start(folder=folder, step=step, text=text, name=name, title=title)
        self._writers: list[Writer] = []
        if "tensorboard" in writers and not importlib.util.find_spec("tensorboard"):
            print("No TensorBoard curves: `pip install tensorboard` brings them.")
            writers = [each for each in writers if each != "tensorboard"]
        for make in map(find, writers):
            self._trying(functools.partial(self._begin, make, start))

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields the records until now."""
        return read_metrics(self._path)

    def write_validation(
        self, step: int, values: Mapping[str, float], *, final: bool = False
    ) -> None:
        """Writes what was measured on the validation split: see `write`."""
        named = {f"validation_{name}": value for name, value in values.items()}
        self.write(step, named, final=final)

    def write(
        self, step: int, values: Mapping[str, float], *, final: bool = False
    ) -> None:
        """Writes the values measured after `step` steps.

        Args:
            step: Number of steps done.
            values: The values, by name.
            final: True for the end of the run, which may be reached again.
        """
        record: dict[str, Any] = {"step": step, **values}
        if final:
            record["final"] = True
        self._trying(lambda: self._append(_to_line(record)))
        for writer in () if final and step in self._drawn else self._writers:
            self._trying(functools.partial(writer.write, step, values))

    def close(self) -> None:
        """Ends the writers."""
        for writer in self._writers:
            self._trying(writer.close)

    def _append(self, line: str) -> None:
        with self._path.open("a+b") as file:
            # A line that a full disk has torn stays alone.
            if file.tell() and self._last_byte(file) != b"\n":
                file.write(b"\n")
            file.write(line.encode())
            file.flush()
            # A checkpoint does not outlive a power cut without what came before it.
            os.fsync(file.fileno())

    def _last_byte(self, file: Any) -> bytes:
        file.seek(-1, os.SEEK_END)
        return bytes(file.read(1))

    def _begin(self, make: Callable[[Start], Writer], start: Start) -> None:
        self._writers.append(make(start))

    def _trying(self, write: Callable[[], object]) -> None:
        try:
            write()
        except HyperparameterError:
            raise
        except Exception as error:  # Packages have errors of their own.
            if not self._reported:
                reason = str(error).partition("\n")[0]
                report(
                    f"Measurements could not be written: {reason}. Training goes on."
                )
            self._reported = True


class TensorBoard(Writer):
    """The file that TensorBoard draws a run's measurements from: TFRecords of events.

    Each start of a run writes one. It begins with the step from which on what earlier
    starts have written is to be forgotten (`purge_step` of the writers of TensorFlow 1,
    which those of TensorFlow 2 lack).

    Raises:
        OSError: If it cannot be written, or tf.errors.OpError.
    """

    def __init__(self, start: Start) -> None:
        import tensorflow as tf

        folder = start.folder / "curves" / start.name
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = tf.io.TFRecordWriter(str(_newest_of(folder)))
        self._add(file_version="brain.Event:2")
        for _ in range(2):  # The first that TensorBoard comes across does nothing.
            begins = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
            self._add(session_log=begins, step=start.step + 1)
        if start.text:
            lines = start.text.splitlines()
            block = "\n".join(f"    {line}" for line in lines)
            value = tf.compat.v1.Summary.Value(
                tag="hyperparameters", tensor=tf.make_tensor_proto(block)
            )
            value.metadata.plugin_data.plugin_name = "text"
            self._add(summary=tf.compat.v1.Summary(value=[value]), step=start.step)
        self._writer.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        import tensorflow as tf

        points = [
            tf.compat.v1.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        self._add(summary=tf.compat.v1.Summary(value=points), step=step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _add(self, **event: Any) -> None:
        import tensorflow as tf

        made = tf.compat.v1.Event(wall_time=time.time(), **event)
        self._writer.write(made.SerializeToString())


def _newest_of(folder: Path) -> Path:
    """Returns a name for a file of events after those there, whose order matters."""
    there = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    after = max((int(each) + 1 for each in there if each.isdigit()), default=0)
    seconds = max(int(time.time()), after)
    return folder / f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.v2"


class WeightsAndBiases(Writer):
    """A run of Weights & Biases, written to the run's folder.

    It is sent nowhere unless `WANDB_MODE=online` is in the environment: `wandb sync`
    does so later. What a run that goes on measures again is not written again.
    """

    def __init__(self, start: Start) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tfgpipe"),
            name=start.title or start.folder.name,
            id=start.identity,
            resume="allow",
            dir=str(start.folder),
            config=start.values,
            mode=mode,
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class MlFlow(Writer):
    """A run of MLflow: in `mlflow.db` of the run's folder, or by MLFLOW_TRACKING_URI.

    What a run that goes on measures again is not written again.
    """

    def __init__(self, start: Start) -> None:
        import mlflow

        default = f"sqlite:///{start.folder.resolve()}/mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI", default)
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tfgpipe")
        found = self._client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(name)
        )
        tag = {"tfgpipe.run": start.identity}
        runs = self._client.search_runs(
            [experiment], f"tags.`tfgpipe.run` = '{start.identity}'"
        )
        run = (
            runs[0]
            if runs
            else self._client.create_run(
                experiment, run_name=start.title or start.folder.name, tags=tag
            )
        )
        self._id = run.info.run_id
        for key, value in start.values.items() if not runs else ():
            self._client.log_param(self._id, key, value)
        self._written: dict[str, int] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values that are new."""
        for name, value in values.items():
            if name not in self._written:
                history = self._client.get_metric_history(self._id, name)
                self._written[name] = max((each.step for each in history), default=-1)
            if step > self._written[name]:
                self._client.log_metric(self._id, name, value, step=step)
                self._written[name] = step

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id)


# By name: the package, and the writer.
_WRITERS: dict[str, tuple[str, Callable[[Start], Writer]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "mlflow": ("mlflow", MlFlow),
}


def _to_line(record: Mapping[str, Any]) -> str:
    """Returns a record as JSON, which has no numbers that are not finite."""
    finite = {n: v if math.isfinite(v) else None for n, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields records, without lines that were torn, or are no records.

    A number that was not finite is NaN.

    Raises:
        OSError: If it cannot be read, or is a device, which may have no end.
    """
    if path.exists():
        if not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "Not a file", str(path))
        for record in filter(_is_record, files.json_lines(path)):
            yield {n: math.nan if v is None else v for n, v in record.items()}


def _is_record(record: Any) -> bool:
    """Returns whether this is numbers by name, and a step among them."""
    return (
        isinstance(record, dict)
        and type(record.get("step")) is int
        and all(isinstance(value, int | float | None) for value in record.values())
    )
