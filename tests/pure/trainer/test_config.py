"""Groups of hyperparameters refuse what is more than anybody has, at once."""

from __future__ import annotations

import pytest

from trainer.config import Evaluation, Pipelining, Precision, Training
from trainer.hyperparams import HyperparameterError, Hyperparams

COUNTS = {
    "num_replicas": Pipelining,
    "num_shards": Pipelining,
    "num_stages": Pipelining,
    "num_microbatches": Pipelining,
    "batch_size": Training,
    "num_steps": Training,
    "num_batches": Evaluation,
    "quantize_start_step": Precision,
    "freeze_ranges_step": Precision,
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_is_a_slip_of_the_hand_is_refused(name: str) -> None:
    group: type[Hyperparams] = COUNTS[name]
    for count in (2**31, 10**20, 10**400):
        with pytest.raises(
            HyperparameterError, match=rf"^{name}: expected an int.*les"
        ):
            group(**{name: count})


def test_more_devices_than_anybody_has_are_refused() -> None:
    with pytest.raises(HyperparameterError, match="at most 10000 devices in all"):
        Pipelining(num_stages=100, num_replicas=100, num_shards=2)
    Pipelining(num_stages=100, num_replicas=100)
