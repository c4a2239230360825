"""A Keras model that is trained on replicas."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class Replicated(keras.Model):
    """A model that is built on the first replica's examples.

    Under a strategy Keras builds models before they are fitted, on the mean over
    replicas, which needs equally many examples on all, and one process (keras #20585).
    """

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> Any:
        strategy = self.distribute_strategy
        # Finding shapes takes a batch, which a generator yields but once, and which is
        # one more draw of the order of a `keras.utils.PyDataset`. Without a strategy
        # Keras finds them as it trains.
        if self._distribute_strategy is None or self._is_all_built():
            return
        if iterator is not None and isinstance(strategy, tf.distribute.Strategy):
            _, _, batches = next(iter(iterator))
            data_batch = keras.tree.map_structure(
                lambda x: strategy.experimental_local_results(x)[0], next(batches)
            )
        super()._maybe_symbolic_build(data_batch=data_batch)

    @property
    def metrics_are_reduced(self) -> bool:
        """True if steps return metrics that are reduced over processes."""
        return False

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        # Keras reads the metrics again, which know this process alone.
        if self.metrics_are_reduced:
            return logs
        return super()._get_metrics_result_or_logs(logs)

    def _is_all_built(self) -> bool:
        compiled = (self._compile_loss, self._compile_metrics, self.optimizer)
        return self.built and all(x is None or x.built for x in compiled)
