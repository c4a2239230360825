"""The base class of experiments, and how they are found by name."""

from __future__ import annotations

import abc
import difflib
import importlib.util
import inspect
import pkgutil
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tfgpipe_trainer import hooks
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.config import (
    Evaluation,
    Optimizer,
    Pipelining,
    Precision,
    Saving,
    Training,
    WarmStart,
)
from tfgpipe_trainer.hyperparams import (
    HyperparameterError,
    Hyperparams,
    field,
    matching,
)

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    import tfgpipe
    from tfgpipe.quantization import QuantizeConfig
    from tfgpipe_trainer.evaluators import Evaluator


Split = Literal["train", "validation"]
# The package of the folder `params`.
PARAMS = "tfgpipe_params"
# Experiments that once had other names, by these.
FORMER = {
    "parallelism.Alone": "parallelism.SingleDevice",
    "parallelism.AllThree": "parallelism.DataPipelineTensor",
    "variants.OwnClass": "variants.SubclassedModel",
    "variants.OnImages": "variants.CustomImageModel",
}


class Experiment(Hyperparams, abc.ABC):
    """Everything that decides a run, and how its model and data are built."""

    unit: ClassVar[str] = "example"
    # Accelerators that it is made for; 0: CPU cores do.
    num_accelerators: ClassVar[int] = 0

    pipelining: Pipelining = field(
        default=Pipelining(),
        help="Parallelism: stages, microbatches, replicas, shards.",
    )
    optimizer: Optimizer = field(
        default=Optimizer(), help="Optimizer and learning rate."
    )
    training: Training = field(default=Training(), help="Length and batch size.")
    checkpoint: Saving = field(formerly="saving", default=Saving(), help="Checkpoints.")
    evaluation: Evaluation = field(
        default=Evaluation(), help="Evaluation on the validation split."
    )
    warm_start: WarmStart = field(
        default=WarmStart(), help="Initial weights from another run or file."
    )
    precision: Precision = field(default=Precision(), help="Numeric precision.")
    seed: int = field(default=0, at_least=0, less_than=2**32, help="Random seed.")

    @property
    def units_per_step(self) -> int:
        """Number of `unit`s, such as tokens, in a step; their rate is reported."""
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
        """Returns the metrics beside the loss."""
        return []

    def evaluators(self) -> Mapping[str, Evaluator]:
        """Returns further evaluations, by name, beside that of the validation split."""
        return {}

    def quantize_rules(self) -> Mapping[type, QuantizeConfig]:
        """Returns the quantization of the experiment's own layers, by class."""
        return {}

    def build_model(self) -> tfgpipe.PipelinedModel:
        """Returns the network as a pipeline, compiled.

        Raises:
            HyperparameterError: If it does not fit its pipeline, or its metrics.
        """
        import keras

        from tfgpipe_trainer.checkpoint import variable_names

        with self.precision.scope():
            network = hooks.call(self, "network")
            if not network.built:
                raise HyperparameterError(
                    f"{type(self).__name__}: expected `network()` to return a model "
                    "whose input is known; received a model that is not built. Begin a "
                    "Sequential with keras.Input(shape)."
                )
            freeze(network, self.training.frozen)
            network = self.precision.apply(
                network, lambda: dict(hooks.call(self, "quantize_rules"))
            )
            model = self.pipeline(network)
            loss, metrics = hooks.call(self, "loss"), hooks.call(self, "metrics")
            if "loss" in [each.name for each in keras.tree.flatten(metrics)]:
                raise HyperparameterError(
                    f"{type(self).__name__}: expected metrics of `metrics()` by names "
                    "other than 'loss', which is the loss'; received one of that name."
                )
            optimizer = self.optimizer.build(self.training.num_steps)
            optimizer.set_groups(
                variable_names.weights(model),
                learning_rates=self.optimizer.learning_rates,
                decayed=self.optimizer.decayed,
            )
            model.compile(
                optimizer=optimizer,
                loss=loss,
                metrics=metrics,
            )
        self.evaluation.check(metrics, output_names(network))
        return model

    def pipeline(self, network: keras.Model) -> tfgpipe.PipelinedModel:
        """Returns a network as a pipeline."""
        return self.pipelining.build(network)

    def for_inference(self, plain: keras.Model) -> keras.Model:
        """Returns a trained network without its pipeline as it is exported.

        Args:
            plain: The network, as `network` returns it.
        """
        return plain

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
            rows: Their rows in the batch of all hosts.
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
            shard: Rows of a training batch that are read here. Defaults to all.
        """
        import tensorflow as tf

        from tfgpipe_trainer import batches

        found, training = self.examples(split), self.training
        size, number = training.batch_size, self.evaluation.max_batches
        steps = range(first_step, training.num_steps)
        if isinstance(found, tf.data.Dataset):
            if split == "validation":
                if (
                    number is None
                    and found.cardinality() == tf.data.INFINITE_CARDINALITY
                ):
                    raise HyperparameterError(
                        "evaluation.max_batches: expected a number, as the dataset of "
                        "validation examples has no end; received None."
                    )
                batches_found = found.batch(size).prefetch(2)
                return batches_found if number is None else batches_found.take(number)
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

    def num_validation_examples(self) -> int | None:
        """Returns the number of validation examples, or None if it is not known."""
        if type(self).examples is Experiment.examples:  # It has `batches` of its own.
            return None
        import tensorflow as tf

        found = self.examples("validation")
        if isinstance(found, tf.data.Dataset):
            size = int(found.cardinality())
            return size if size >= 0 else None
        from tfgpipe_trainer import batches

        return len(batches.as_examples(found))

    def check(self) -> None:
        """Checks for errors that would otherwise come up after the training.

        Raises:
            HyperparameterError: If there is something.
        """
        return

    def baselines(self) -> dict[str, float]:
        """Returns losses to beat on the validation split, by name."""
        return {}

    def report_units(self) -> dict[str, float]:
        """Returns the number of other units in a `unit`, for losses in these units."""
        return {}

    def file_hashes(self) -> dict[str, str]:
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
            folder: The folder to write files to.

        Returns:
            A text that shows some of it, or an empty one.
        """
        del model, folder  # Not every experiment has something to show.
        return ""


def freeze(network: keras.Model, patterns: Sequence[str]) -> None:
    """Has weights of a network not be trained.

    Raises:
        HyperparameterError: If a pattern matches none, or nothing is left to train.
    """
    if not patterns:
        return
    from tfgpipe_trainer.checkpoint import variable_names

    named = variable_names.weights(network)
    for pattern in patterns:
        for name in matching("training.frozen", pattern, named):
            named[name].trainable = False
    if not network.trainable_variables:
        raise HyperparameterError(
            "training.frozen: expected some weights to be trained; received "
            f"{', '.join(patterns)}, which are all."
        )


def output_names(network: keras.Model) -> list[str]:
    """Returns the names of outputs, if several: names of metrics begin with them."""
    if len(network.outputs) < 2:
        return []
    output = network.output
    return list(output if isinstance(output, dict) else network.output_names)


def experiments() -> dict[str, type[Experiment]]:
    """Returns the experiments in the folder `params`, by name, such as `"lm.Tiny"`.

    Without those of files that cannot be imported, which `known_experiments` names.
    """
    return _in_params()[0]


def known_experiments() -> str:
    """Returns the names in `params`, and which files there cannot be imported."""
    found, broken = _in_params()
    return "; ".join([", ".join(found) or "none", *broken])


def _in_params() -> tuple[dict[str, type[Experiment]], list[str]]:
    found: dict[str, type[Experiment]] = {}
    broken = []
    for module in pkgutil.iter_modules(importlib.import_module(PARAMS).__path__):
        try:
            own = defined_in(f"{PARAMS}.{module.name}")
        except (Exception, SystemExit) as error:
            broken.append(not_imported(module.name, error))
        else:
            found |= {f"{module.name}.{name}": cls for name, cls in own.items()}
    return found, broken


def not_imported(name: str, error: BaseException) -> str:
    """Returns a line on a file of `params` whose import has failed."""
    reason = str(error).partition("\n")[0]
    return f"params/{name}.py cannot be imported: {type(error).__name__}: {reason}"


def is_in_params(name: str) -> bool:
    """Returns whether `params` has the module of an experiment's name."""
    return _is_there(f"{PARAMS}.{name.rpartition('.')[0]}")


def find(name: str) -> type[Experiment]:
    """Returns the experiment of a name.

    Args:
        name: `FILE.CLASS` of a file in `params`, or `PACKAGE.FILE.CLASS` of any that
            Python can import, the working directory included.

    Raises:
        HyperparameterError: If there is none of that name, or it is abstract.
    """
    if name in FORMER:
        raise HyperparameterError(
            f"--params: expected {FORMER[name]}; received its former name {name}."
        )
    module = name.rpartition(".")[0]
    found: dict[str, type[Experiment]] = {}
    broken: list[str] = []
    places = [each for each in (f"{PARAMS}.{module}", module) if _is_there(each)]
    for place in places:
        # That of `params` comes first, if both have one of this name.
        own = {f"{module}.{cls}": each for cls, each in defined_in(place).items()}
        found = {**own, **found}
        if name in found:
            break
    if not places:
        places = ["params"]
        found, broken = _in_params()
    if name in found:
        if inspect.isabstract(found[name]):
            missing = ", ".join(sorted(found[name].__abstractmethods__))
            raise HyperparameterError(
                f"{name}: expected an experiment; received an abstract class, which "
                f"lacks {missing}. Make a subclass with these."
            )
        hooks.refuse_former(found[name])
        return found[name]
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise HyperparameterError(
        f"{name[:80]}: no such experiment. {hint}Expected one of "
        f"{', '.join(found) or 'none'}, which {' and '.join(places)} has, or "
        "PACKAGE.FILE.CLASS of a file that Python can import."
        + "".join(f" {line}." for line in broken)
    )


def _is_there(module: str) -> bool:
    """Returns whether there is such a module, of which only its parents are run."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    for number in range(1, len(parts) + 1):
        place = ".".join(parts[:number])
        try:
            if place not in sys.modules and importlib.util.find_spec(place) is None:
                return False
        except ModuleNotFoundError as error:
            # Its parent is no package; of another name is what the parent lacks.
            if error.name != place:
                raise
            return False
    return True


def defined_in(module: str) -> dict[str, type[Experiment]]:
    """Returns the experiments that a module defines, by name. It is imported."""
    found = importlib.import_module(module)
    return {
        name: cls
        for name, cls in inspect.getmembers(found, inspect.isclass)
        if issubclass(cls, Experiment) and cls.__module__ == found.__name__
        if not name.startswith("_")
    }


def find_of_run(folder: Path, name: str, named: Sequence[str]) -> type[Experiment]:
    """Returns the experiment that a run's folder names.

    A folder may come from anywhere, and an import runs what it imports: what is not in
    `params/` the user has to name.
    """
    if name in named or is_in_params(name):
        return find(name)
    raise HyperparameterError(
        f"{folder} is the run of {name!r}, which params/ does not have. If you trust "
        f"that module, which is imported then, add --params={shlex.quote(name)}."
    )
