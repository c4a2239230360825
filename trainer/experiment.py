"""The base class of experiments, and how they are found by name."""

from __future__ import annotations

import abc
import difflib
import importlib.util
import inspect
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.config import (
    Evaluation,
    Optimizer,
    Pipelining,
    Precision,
    Saving,
    Training,
    WarmStart,
)
from trainer.data.batches import HostShard
from trainer.hyperparams import HyperparameterError, Hyperparams, field

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    import tfgpipe
    from tfgpipe.quantization import QuantizeConfig


Split = Literal["train", "validation"]


class Experiment(Hyperparams, abc.ABC):
    """Everything that decides a run, and how its model and data are built."""

    unit: ClassVar[str] = "example"

    pipelining: Pipelining = field(
        default=Pipelining(),
        help="Parallelism: stages, microbatches, replicas, shards.",
    )
    optimizer: Optimizer = field(
        default=Optimizer(), help="Optimizer and learning rate."
    )
    training: Training = field(default=Training(), help="Length and batch size.")
    saving: Saving = field(default=Saving(), help="Checkpoints.")
    evaluation: Evaluation = field(
        default=Evaluation(), help="Evaluation on the validation split."
    )
    warm_start: WarmStart = field(
        default=WarmStart(), help="Initial weights from another run or file."
    )
    precision: Precision = field(default=Precision(), help="Numeric precision.")
    seed: int = field(default=0, at_least=0, less_than=2**32, help="Random seed.")

    @property
    def tokens_per_step(self) -> int:
        """How many `unit`s, such as tokens, a step trains on, to report their rate."""
        return self.training.batch_size

    @abc.abstractmethod
    def network(self) -> keras.Model:
        """Returns the network without its pipeline, from inputs to logits.

        Raises:
            HyperparameterError: If there is none of these sizes.
        """

    def loss(self) -> keras.losses.Loss:
        """Returns the loss of logits, in nats per `unit`."""
        import keras

        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns what is measured beside the loss."""
        return []

    def quantize_rules(self) -> Mapping[type, QuantizeConfig]:
        """Returns how layers of the experiment's own are quantized."""
        return {}

    def build_model(self) -> tfgpipe.PipelinedModel:
        """Returns the network as a pipeline, compiled.

        Raises:
            HyperparameterError: If it does not fit its pipeline, or its metrics.
        """
        import keras

        with self.precision.scope():
            network = self.network()
            if not isinstance(network, keras.Model):
                raise HyperparameterError(
                    f"{type(self).__name__}: expected `network()` to return a "
                    f"keras.Model; received {network!r}."
                )
            if not network.built:
                raise HyperparameterError(
                    f"{type(self).__name__}: expected `network()` to return a model "
                    "whose input is known; received a model that is not built. Begin a "
                    "Sequential with keras.Input(shape)."
                )
            network = self.precision.apply(network, self.quantize_rules)
            model = self.pipelining.build(network)
            metrics = self.metrics()
            model.compile(
                optimizer=self.optimizer.build(self.training.num_steps),
                loss=self.loss(),
                metrics=metrics,
            )
        self.evaluation.check(metrics)
        return model

    def examples(self, split: Split) -> Any:
        """Returns the examples of a split. An experiment defines this, or `batches`.

        Args:
            split: `"train"` or `"validation"`.

        Returns:
            One of

            - arrays, such as `(x, y)`, `[num_examples, ...]` each;
            - a sequence with `len(items)` and `items[i]`, which returns one example,
              such as `(x, y)`; `training.num_workers` processes read them ahead;
            - a `tf.data.Dataset` of single examples, which are batched here, and
              shuffled there. It is repeated as needed, and a run that goes on skips
              what it has trained on.

            Of the first two each example comes once in an epoch, in an order that
            depends on the seed and the epoch alone.

        Raises:
            HyperparameterError: If there are none.
        """
        raise HyperparameterError(
            f"{type(self).__name__}: expected a method `examples(split)` that returns "
            "what to learn from, such as (x, y); received none. See params/template.py."
        )

    def transform(self, batch: Any, step: int, rows: slice) -> Any:
        """Returns a batch of training changed, such as with augmented images.

        It is not called for a `tf.data.Dataset`, which has a `map` of its own.

        Args:
            batch: As `examples` gives it, `[num_rows, ...]` each.
            step: Its step, counted from 0: draws are to depend on it and the seed.
            rows: Which rows of the batch of all hosts these are.
        """
        del step, rows
        return batch

    def batches(
        self, split: Split, *, first_step: int = 0, shard: HostShard | None = None
    ) -> tf.data.Dataset:
        """Returns the batches of a split.

        The batch of a training step depends on the seed and on the number of the step
        alone, so that a run can be taken up at any step.

        Args:
            split: `"train"`, one batch for each step, or `"validation"`.
            first_step: The step of the first batch, counted from 0.
            shard: Which rows of a batch of training are read here. Defaults to all.
        """
        import tensorflow as tf

        from trainer.data import batches

        found, training = self.examples(split), self.training
        size, number = training.batch_size, self.evaluation.num_batches
        steps = range(first_step, training.num_steps)
        if isinstance(found, tf.data.Dataset):
            if split == "validation":
                return found.batch(size).take(number).prefetch(2)
            if first_step:
                print(
                    f"Skipping {first_step} batches of a tf.data.Dataset: exact "
                    "if it gives the same examples each time.",
                    flush=True,
                )
            return batches.batches_of_dataset(
                found, batch_size=size, steps=steps, shard=shard
            )
        examples = batches.as_examples(found)
        if split == "validation":
            return batches.validation_batches(
                examples, batch_size=size, num_batches=number
            )
        return batches.training_batches(
            examples,
            batch_size=size,
            steps=steps,
            seed=self.seed,
            shard=shard,
            num_workers=training.num_workers,
            transform=self.transform,
        )

    def check(self) -> None:
        """Looks for what would otherwise come up after the training.

        Raises:
            HyperparameterError: If there is something.
        """
        return

    def baselines(self) -> dict[str, float]:
        """Returns losses to beat on the validation split, by name."""
        return {}

    def other_units(self) -> dict[str, float]:
        """Returns units that losses are reported in as well: how many a `unit` has."""
        return {}

    def digests(self) -> dict[str, str]:
        """Returns digests of files that must not change in a run, by hyperparameter.

        Raises:
            HyperparameterError: If one cannot be read.
        """
        return {}

    def train_tokenizer(self) -> str:
        """Trains a tokenizer for the data, and says how good it is.

        Raises:
            HyperparameterError: If there is no text, or it cannot be done.
        """
        raise HyperparameterError(
            "Expected a language model for --mode=tokenizer, such as "
            f"--params=lm.Tiny; received one of {type(self).__name__}."
        )

    def decode(self, model: keras.Model, folder: Path) -> str:
        """Writes what a trained model makes of data it has not seen.

        Args:
            model: The model.
            folder: Where to write files.

        Returns:
            A text that shows some of it, or an empty one.
        """
        del model, folder  # Not every experiment has something to show.
        return ""


def experiments() -> dict[str, type[Experiment]]:
    """Returns the experiments in the folder `params`, by name, such as `"lm.Tiny"`."""
    package = importlib.import_module("params")
    return {
        f"{module.name}.{name}": cls
        for module in pkgutil.iter_modules(package.__path__)
        for name, cls in defined_in(f"params.{module.name}").items()
    }


def find(name: str) -> type[Experiment]:
    """Returns the experiment of a name.

    Args:
        name: `FILE.CLASS` of a file in `params`, or `PACKAGE.FILE.CLASS` of any that
            Python can import, the working directory included.

    Raises:
        HyperparameterError: If there is none of that name.
    """
    module = name.rpartition(".")[0]
    places = [f"params.{module}", module] if module else []
    place = next(filter(_is_there, places), None)
    if place is not None:
        found = {f"{module}.{cls}": each for cls, each in defined_in(place).items()}
    else:
        place, found = "params", experiments()
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise HyperparameterError(
        f"{name}: no such experiment. {hint}Expected one of "
        f"{', '.join(found) or 'none'}, which {place} has, or PACKAGE.FILE.CLASS of a "
        "file that Python can import."
    )


def _is_there(module: str) -> bool:
    """Returns whether there is such a module, of which only its parents are run."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def defined_in(module: str) -> dict[str, type[Experiment]]:
    """Returns the experiments that a module defines, by name. It is imported."""
    found = importlib.import_module(module)
    return {
        name: cls
        for name, cls in inspect.getmembers(found, inspect.isclass)
        if issubclass(cls, Experiment) and cls.__module__ == found.__name__
        if not name.startswith("_")
    }
