"""AmoebaNet-D: the size that GPipe states, and the same gradients in a pipeline."""

from __future__ import annotations

from tests.helpers import compare
from tests.helpers.zoo import floats
from tests.params.test_amoebanet import tiny
from tfgpipe_params.image.amoebanet import amoebanet_d


def test_it_has_the_82_million_weights_of_gpipe() -> None:
    """Table 1 of Huang et al. 2019. Weights do not depend on the size of images."""
    model = amoebanet_d(
        num_layers=18, num_filters=208, classes=1000, input_shape=(32, 32, 3)
    )
    trained = sum(v.value.shape.num_elements() for v in model.trainable_variables)
    assert trained == 81_505_540
    assert model.count_params() == 81_673_656
    assert round(trained / 1e6) == round(model.count_params() / 1e6) == 82


def test_three_stages_compute_what_the_plain_model_does(floatx) -> None:
    # Statistics of few rows through a hundred layers: single precision tells nothing.
    floatx("float64")
    plain, pipelined = compare.model_pair(tiny, num_stages=3, num_microbatches=1)
    x = floats(4, 32, 32, 3)
    expected = compare.run(plain, x, graph=False)
    assert all(grad is not None for grad in expected.weight_grads.values())
    compare.assert_same(expected, compare.run(pipelined, x), rtol=1e-9, atol=1e-9)
