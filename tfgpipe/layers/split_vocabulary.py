"""A vocabulary whose tokens are spread over the devices of the whole pipeline.

The head of a language model, and the table of its embeddings, are as large as several
blocks: with 256,000 tokens the softmax alone costs as much as five, and on the last
stage all others wait for it. In parts, each device has some of the tokens:

    embedding      blocks                head                 loss

    device 0  E0 ─┐                                ┌─▶ H0 ─┐
    device 1  E1 ─┼─▶ stage 0 ─▶ ··· ─▶ stage 3 ───┼─▶ H1 ─┼─▶ join
    device 2  E2 ─┤   device 0          device 3   ├─▶ H2 ─┤   device 3
    device 3  E3 ─┘                                └─▶ H3 ─┘

Each part is a stage of its own, which waits for no other part. Of a position it returns
four numbers: the largest of its logits; the sum of exponentials and the logit of the
target, both less that; and 1 if the target is one of its tokens, else 0. They are
enough for the loss,

    loss = log(sum over p of sum_p exp(max_p - max)) - (target + max_p - max),

and its gradient goes back to the parts in the same way. Logits are never in one place
(Yeung et al. 2024, arXiv 2411.05288, "Balancing Pipeline Parallelism with Vocabulary
Parallelism": there a pass S is the forward of a part and a pass T its backward, with
two barriers in between, and the pipeline holds two microbatches more, as here).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfgpipe._util import argument_checks
from tfgpipe.partition import best_partition
from tfgpipe.partition import plan as make_plan
from tfgpipe.tensor_parallel import TPCrossEntropy, TPEmbedding


@keras.saving.register_keras_serializable(package="tfgpipe")
class VocabularyPart(keras.layers.Layer):
    """Some tokens of a vocabulary: their embeddings, logits, or terms of the loss.

    Args:
        first_token: The first of the tokens.
        num_tokens: Number of tokens.
        output_dim: Size of an embedding.
        embeddings_initializer: Initializer of the table.
        use_bias: True for a bias of the logits.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        Tokens `(batch, ...)`; or embeddings `(batch, ..., output_dim)`, and of the
        targets `(batch, ...)`.

    Output shape:
        Of tokens `(batch, ..., output_dim)`, zeros for those of other parts. With
        `reverse` the logits, `(batch, ..., num_tokens)`. With targets `(batch, ..., 4)`
        in single precision at least: the largest logit; the sum of exponentials and the
        target's logit, less that; 1 if the target is one of the tokens.
    """

    def __init__(
        self,
        first_token: int,
        num_tokens: int,
        output_dim: int,
        *,
        embeddings_initializer: Any = "uniform",
        use_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.first_token = argument_checks.check_count(
            "first_token", first_token, least=0
        )
        self.num_tokens = argument_checks.check_count("num_tokens", num_tokens)
        self.output_dim = argument_checks.check_count("output_dim", output_dim)
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.use_bias = use_bias

    def build(self, inputs_shape: Any = None, targets_shape: Any = None) -> None:
        """Creates the table of embeddings."""
        del inputs_shape, targets_shape
        self.embeddings = self.add_weight(
            shape=(self.num_tokens, self.output_dim),
            initializer=self.embeddings_initializer,
            name="embeddings",
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                shape=(self.num_tokens,), initializer="zeros", name="bias"
            )

    def call(
        self, inputs: Any, targets: Any = None, *, reverse: bool = False
    ) -> tf.Tensor:
        """Returns embeddings of tokens, or logits or terms of the loss of embeddings.

        Args:
            inputs: Tokens, or embeddings.
            targets: Tokens to predict from embeddings.
            reverse: True for the logits of embeddings.
        """
        if targets is not None:
            return self._terms(self._logits(inputs), targets)
        if reverse:
            return self._logits(inputs)
        return TPEmbedding.look_up(
            self.embeddings,
            keras.ops.cast(inputs, "int32"),
            start=self.first_token,
            size=self.num_tokens,
            dtype=self.compute_dtype,
        )

    def compute_output_spec(
        self, inputs: Any, targets: Any = None, *, reverse: bool = False
    ) -> keras.KerasTensor:
        """Infers the shape and dtype of embeddings, logits or terms."""
        if targets is not None:
            dtype = keras.backend.result_type(self.compute_dtype, "float32")
            return keras.KerasTensor((*targets.shape, 4), dtype)
        if reverse:
            shape = (*inputs.shape[:-1], self.num_tokens)
            return keras.KerasTensor(shape, self.compute_dtype)
        return keras.KerasTensor((*inputs.shape, self.output_dim), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "first_token": self.first_token,
            "num_tokens": self.num_tokens,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
            "use_bias": self.use_bias,
        }

    def _logits(self, x: Any) -> tf.Tensor:
        logits = keras.ops.matmul(x, keras.ops.transpose(self.embeddings))
        return logits if self.bias is None else logits + self.bias

    def _terms(self, logits: tf.Tensor, targets: Any) -> tf.Tensor:
        most = tf.stop_gradient(TPCrossEntropy.largest_logit(logits))
        total, target = TPCrossEntropy.terms(
            logits, most, targets, start=self.first_token
        )
        row = keras.ops.cast(targets, "int32") - self.first_token
        is_here = tf.cast((row >= 0) & (row < self.num_tokens), most.dtype)
        return tf.stack([most, total, target, is_here], axis=-1)


@keras.saving.register_keras_serializable(package="tfgpipe")
class JoinedCrossEntropy(keras.layers.Layer):
    """The loss of each position, of the terms that the parts of a vocabulary return.

    Args:
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        A list of terms, `(batch, ..., 4)`, one for each part.

    Output shape:
        `(batch, ...)`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)  # In the precision of the terms.

    def call(self, terms: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the losses."""
        # [P, batch, ...] each
        most, total, target, is_here = tf.unstack(tf.stack(terms), axis=-1)
        most = tf.stop_gradient(most)
        less = most - tf.reduce_max(most, axis=0)
        total = tf.reduce_sum(total * tf.exp(less), axis=0)
        target = tf.where(is_here > 0, target + less, tf.zeros((), less.dtype))
        return tf.math.log(total) - tf.reduce_sum(target, axis=0)

    def compute_output_spec(self, terms: Any) -> keras.KerasTensor:
        """Infers the shape and dtype of the losses."""
        return keras.KerasTensor(terms[0].shape[:-1], terms[0].dtype)


class SplitVocabulary:
    """A vocabulary in parts, each on a device of the pipeline.

    Its methods put layers into a Functional model: the embedding of tokens if it is to
    be spread as well, with the same weights as the head, and the head with its loss.
    Targets go into the model as an input, losses come out of it, and
    `tfgpipe.tensor_parallel.OutputLoss` averages them. What is computed is
    `keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)`.

    Args:
        input_dim: Number of tokens.
        output_dim: Size of an embedding.
        num_parts: P, the number of devices.
        embeddings_initializer: Initializer of each part of the table. A seed counts on
            from part to part.
        use_bias: True for a bias of the logits.
        dtype: Dtype or policy of the layers. Defaults to Keras' own.
        name: Name with which the names of layers begin.

    Example, in which embedding and head share their weights:

    >>> vocabulary = tfgpipe.layers.SplitVocabulary(1000, 16, num_parts=2)
    >>> tokens = keras.Input((8,), dtype="int32")
    >>> targets = keras.Input((8,), dtype="int32")
    >>> x = vocabulary.embed(tokens)
    >>> for _ in range(4):
    ...     x = keras.layers.Dense(16, "relu")(x)
    >>> model = keras.Model([tokens, targets], vocabulary.cross_entropy(x, targets))
    >>> stages = vocabulary.stages(model, devices=["CPU:0", "CPU:1"])
    >>> stages["partition"], stages["devices"][:2], stages["schedule"]
    ([1, 1, 3, 2, 1, 1, 1], ['CPU:0', 'CPU:1'], 'auto')
    >>> model = tfgpipe.pipeline(model, num_microbatches=4, **stages)
    >>> model.compile("adam", tfgpipe.tensor_parallel.OutputLoss())

    Raises:
        ValueError: If there are fewer tokens than parts, or fewer than two parts.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        num_parts: int,
        embeddings_initializer: Any = "uniform",
        use_bias: bool = False,
        dtype: Any = None,
        name: str = "vocabulary",
    ) -> None:
        argument_checks.check_count("num_parts", num_parts, least=2)
        size = argument_checks.check_count("input_dim", input_dim, least=num_parts)
        ends = [size * (p + 1) // num_parts for p in range(num_parts)]
        self.name = name
        self.parts = [
            VocabularyPart(
                start,
                end - start,
                output_dim,
                embeddings_initializer=_of_part(embeddings_initializer, p),
                use_bias=use_bias,
                dtype=dtype,
                name="_".join([name, "part", str(p)]),
            )
            for p, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]
        self._dtype = dtype

    def embed(self, tokens: Any) -> Any:
        """Returns the embeddings of tokens, `(batch, ..., output_dim)`."""
        add = keras.layers.Add(name=self._named("embeddings"), dtype=self._dtype)
        return add([part(tokens) for part in self.parts])

    def cross_entropy(self, x: Any, targets: Any) -> Any:
        """Returns the loss of each position, `(batch, ...)`.

        Args:
            x: Outputs of the last block, `(batch, ..., output_dim)`.
            targets: The tokens to predict, `(batch, ...)`.
        """
        join = JoinedCrossEntropy(name=self._named("loss"), dtype=self._dtype)
        return join([part(x, targets) for part in self.parts])

    def logits(self, x: Any) -> Any:
        """Returns all logits, `(batch, ..., input_dim)`: for models that predict."""
        return keras.ops.concatenate(
            [part(x, reverse=True) for part in self.parts], axis=-1
        )

    @property
    def table(self) -> npt.NDArray[Any]:
        """The embeddings of all tokens, `(input_dim, output_dim)`."""
        tables = [keras.ops.convert_to_numpy(x.embeddings) for x in self.parts]
        return np.concatenate(tables)

    @table.setter
    def table(self, values: npt.ArrayLike) -> None:
        values = np.asarray(values)
        for part in self.parts:
            end = part.first_token + part.num_tokens
            part.embeddings.assign(values[part.first_token : end])

    def stages(
        self,
        model: keras.Model,
        *,
        devices: Sequence[str],
        balance: Any = "flops",
        sample: Any = None,
        batch_size: int = 32,
    ) -> dict[str, Any]:
        """Returns the arguments of a pipeline whose parts are on all devices.

        Each part is a stage; so is the loss. What is between them is split into as many
        stages as there are devices, with the least bottleneck.

        Args:
            model: The Functional model.
            devices: A device for each part.
            balance: The quantity to balance, of `tfgpipe.PipelineConfig`.
            sample: A mini-batch as the model takes it, where a length is not known.
            batch_size: Size of a mini-batch, without a sample.

        Returns:
            `partition`, `devices` (of each stage) and `schedule`.

        Raises:
            ValueError: If the devices are not as many as the parts, or the model's head
                or embedding are of another vocabulary.
        """
        P = len(self.parts)
        if len(devices) != P:
            raise ValueError(
                f"Each part of a vocabulary is on a device. Received {P} parts and "
                f"{len(devices)} devices: {', '.join(devices)}. Make `num_parts` as "
                "many."
            )
        plan = make_plan(
            model,
            num_stages=1,
            num_microbatches=1,
            balance=balance,
            sample=sample,
            batch_size=batch_size,
        )
        start, end = self._span([layer.name for layer in plan.profile.layers])
        costs = plan.quantity.call_costs(plan.profile, plan.settings)[start:end]
        blocks = best_partition(costs, num_stages=P)
        return {
            "partition": [1] * start + [*blocks] + [1] * (P + 1),
            "devices": [*devices] * (2 + bool(start)) + [devices[-1]],
            "schedule": "auto",
        }

    def _named(self, what: str) -> str:
        """Returns the name of a layer."""
        return "_".join([self.name, what])

    def _span(self, names: Sequence[str]) -> tuple[int, int]:
        """Returns the first layer of a model between the parts, and the one behind.

        Raises:
            ValueError: If the parts are elsewhere, or too few layers between them.
        """
        P = len(self.parts)
        own, loss = [x.name for x in self.parts], self._named("loss")
        # The embedding is in front if the table is shared with it.
        start = P if names[:P] == own else 0
        end = len(names) - P - 1
        if names[end:] != [*own, loss] or end - start < P:
            raise ValueError(
                "A model whose vocabulary is split ends in `cross_entropy`, begins "
                "with `embed` if that is split as well, and has a layer for each "
                f"device in between. Received the layers {', '.join(names)}, and a "
                f"vocabulary '{self.name}' in {P} parts."
            )
        return start, end


def _of_part(initializer: Any, p: int) -> keras.initializers.Initializer:
    """Returns the initializer of a part, which draws other numbers than other parts."""
    whole = keras.initializers.get(initializer)
    config = whole.get_config()
    if isinstance(config.get("seed"), int):
        config["seed"] += p
    return type(whole).from_config(config)
