"""AmoebaNet-D: its cells, and their gradients in a pipeline."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.helpers import compare
from tests.helpers.zoo import floats
from tfgpipe_params.image import amoebanet
from tfgpipe_params.image.amoebanet import NORMAL, REDUCTION, amoebanet_d


def tiny() -> keras.Model:
    return amoebanet_d(num_layers=3, num_filters=16, classes=3, input_shape=(32, 32, 3))


def test_every_state_is_used_once_it_is_there() -> None:
    for kind in (NORMAL, REDUCTION):
        for number, terms in enumerate(kind.sums, start=2):
            assert all(state < number for state, _ in terms)
        read = {state for terms in kind.sums for state, _ in terms}
        assert read | set(kind.output) == set(range(7))


def test_reductions_halve_sizes_and_double_filters() -> None:
    sums = [layer for layer in tiny().layers if isinstance(layer, keras.layers.Add)]
    shapes = [layer.output.shape[1:] for layer in sums]
    assert list(dict.fromkeys(shapes)) == [
        (8, 8, 8),
        (4, 4, 16),
        (2, 2, 32),
        (1, 1, 64),
    ]
    # Two cells of the stem, three normal ones, and two reductions between them.
    assert [shapes.count(shape) for shape in dict.fromkeys(shapes)] == [5, 10, 10, 10]


@pytest.mark.parametrize(
    ("name", "values", "unit"),
    [
        ("num_layers", {"num_layers": 4, "num_filters": 16}, 3),
        ("num_filters", {"num_layers": 3, "num_filters": 24}, 16),
    ],
)
def test_other_sizes_are_refused(name: str, values: dict[str, int], unit: int) -> None:
    with pytest.raises(ValueError, match="AmoebaNet-D") as error:
        amoebanet_d(**values, classes=3, input_shape=(32, 32, 3))
    assert str(error.value) == (
        f"{name} of AmoebaNet-D: expected a multiple of {unit}; received "
        f"{values[name]}."
    )


def _cells() -> keras.Model:
    """A cell of each kind, the second of which reads what the first one read too."""
    image = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(image)
    last = amoebanet._cell(REDUCTION, x, x, 16)
    last = amoebanet._cell(NORMAL, last, x, 16)
    x = keras.layers.GlobalAveragePooling2D()(last)
    return keras.Model(image, keras.layers.Dense(3)(x))


def test_cells_in_two_stages_compute_what_the_plain_ones_do(floatx) -> None:
    floatx("float64")
    plain, pipelined = compare.model_pair(_cells, num_stages=2, num_microbatches=1)
    x = floats(4, 8, 8, 3)
    expected = compare.run(plain, x, graph=False)
    assert all(np.any(grad) for grad in expected.weight_grads.values())
    compare.assert_same(expected, compare.run(pipelined, x), rtol=1e-9, atol=1e-9)


@pytest.mark.nightly
def test_it_has_the_82_million_weights_of_gpipe() -> None:
    """Table 1 of Huang et al. 2019. Weights do not depend on the size of images."""
    model = amoebanet_d(
        num_layers=18, num_filters=208, classes=1000, input_shape=(32, 32, 3)
    )
    trained = sum(v.value.shape.num_elements() for v in model.trainable_variables)
    assert trained == 81_505_540
    assert model.count_params() == 81_673_656
    assert round(trained / 1e6) == round(model.count_params() / 1e6) == 82


@pytest.mark.nightly
def test_three_stages_compute_what_the_plain_model_does(floatx) -> None:
    # Statistics of few rows through a hundred layers: single precision tells nothing.
    floatx("float64")
    plain, pipelined = compare.model_pair(tiny, num_stages=3, num_microbatches=1)
    x = floats(4, 32, 32, 3)
    expected = compare.run(plain, x, graph=False)
    assert all(grad is not None for grad in expected.weight_grads.values())
    compare.assert_same(expected, compare.run(pipelined, x), rtol=1e-9, atol=1e-9)
