"""Whatever a model's graph, a pipeline computes exactly what the model computes.

Every model of `zoo` is compared with its plain twin in every output and its mask, every
gradient and every state variable.
"""

from __future__ import annotations

import pytest

from tests.helpers import zoo
from tests.helpers.marks import nightly

PER_LAYER, OTHERS = zoo.deal()


@pytest.mark.parametrize("case", nightly(OTHERS, gate=PER_LAYER), ids=zoo.title)
def test_outputs_gradients_and_state_are_the_plain_models(case, floatx):
    floatx(case["dtype"])
    zoo.assert_same_step(**case)


@pytest.mark.parametrize(
    ("application", "num_stages", "num_microbatches", "training", "arguments"),
    [
        ("MobileNet", 2, 2, False, {"alpha": 0.25}),
        *nightly(
            [
                ("ResNet50", 3, 3, False, {}),
                ("EfficientNetB0", 4, 3, False, {}),
                ("MobileNetV2", 4, 1, True, {}),
            ]
        ),
    ],
)
def test_applications(
    application, num_stages, num_microbatches, training, arguments, floatx
):
    floatx("float64")
    zoo.assert_application(
        application,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        training=training,
        **arguments,
    )
