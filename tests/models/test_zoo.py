"""Whatever a model's graph, a pipeline computes exactly what the model computes.

Every model of `zoo` is compared with its plain twin in every output and its mask, every
gradient and every state variable.
"""

from __future__ import annotations

import pytest

from tests.helpers import zoo


@pytest.mark.parametrize("case", zoo.deal()[0], ids=zoo.title)
def test_outputs_gradients_and_state_are_the_plain_models(case, floatx):
    floatx(case["dtype"])
    zoo.assert_same_step(**case)


def test_an_application(floatx):
    """MobileNet, of 86 layers; larger ones are in `nightly/test_zoo.py`."""
    floatx("float64")
    zoo.assert_application(
        "MobileNet",
        num_stages=2,
        num_microbatches=2,
        training=False,
        alpha=0.25,
    )
