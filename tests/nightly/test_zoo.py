"""The models of `tests/helpers/zoo.py` and large Keras applications."""

from __future__ import annotations

import pytest

from tests.helpers import zoo
from tests.models import test_saved_models


@pytest.mark.parametrize("case", zoo.deal()[1], ids=zoo.title)
def test_outputs_gradients_and_state_are_the_plain_models(case, floatx):
    floatx(case["dtype"])
    zoo.assert_same_step(**case)


@pytest.mark.parametrize(
    ("application", "num_stages", "num_microbatches", "training"),
    [
        ("ResNet50", 3, 3, False),
        ("EfficientNetB0", 4, 3, False),
        ("MobileNetV2", 4, 1, True),
    ],
)
def test_applications(application, num_stages, num_microbatches, training, floatx):
    floatx("float64")
    zoo.assert_application(
        application,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        training=training,
    )


@pytest.mark.parametrize("name", test_saved_models.SAVED)
def test_a_keras_file_brings_the_model_back(name, tmp_path):
    test_saved_models.test_a_keras_file_brings_the_model_back(name, tmp_path)
