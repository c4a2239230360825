"""Encoder-decoders: through a pipeline as without, blind to padding, true decoders."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, experiments
from tfgpipe_params.translate import task, text_pairs
from tfgpipe_params.translate.sizes import EncoderDecoder
from tfgpipe_params.translate.task import Translation
from tfgpipe_trainer.experiment import find
from tfgpipe_trainer.hyperparams import HyperparameterError, override

TARGET_LENGTH = 7


@pytest.fixture(scope="module")
def experiment() -> Translation:
    return experiments.translation()


@pytest.fixture(scope="module")
def model(experiment: Translation) -> tfgpipe.PipelinedModel:
    keras.utils.set_random_seed(0)
    return experiment.build_model()


@pytest.fixture(scope="module")
def batch(experiment: Translation) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    (batch,) = experiment.batches("validation").as_numpy_iterator()
    return batch


def test_outputs_masks_and_gradients_are_those_of_the_plain_model(
    model: tfgpipe.PipelinedModel, batch: tuple
) -> None:
    x = list(batch[0])
    expected = compare.run(model.unpipelined(), x, graph=False)
    received = compare.run(model, x)
    assert np.array_equal(expected.masks[0], batch[1] > 0)
    assert all(np.any(gradient) for gradient in _without_dead(expected).values())
    compare.assert_same(expected, received)


def _without_dead(run: compare.Run) -> dict[str, np.ndarray | None]:
    # What is added to all keys of an attention does not change it.
    return {k: v for k, v in run.weight_grads.items() if "key/bias" not in k}


def test_encoder_and_decoder_are_on_stages_of_their_own(
    model: tfgpipe.PipelinedModel,
) -> None:
    first, second = tfgpipe.stage_table(model).splitlines()[-2:]
    assert first.split()[1] == "CPU:0"
    assert second.split()[1] == "CPU:1"


def test_loss_and_accuracy_count_no_padding(
    model: tfgpipe.PipelinedModel, batch: tuple
) -> None:
    x, y = batch
    logits = model.predict_on_batch(list(x)).astype(np.float64)
    chances = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    each = np.take_along_axis(chances, y[..., None], axis=-1)[..., 0]
    found = model.test_on_batch(list(x), y, return_dict=True)
    assert 0 < (y == 0).mean() < 1
    assert found["loss"] == pytest.approx(-each[y > 0].mean(), rel=1e-5)
    right = logits.argmax(axis=-1) == y
    assert found["accuracy"] == pytest.approx(right[y > 0].mean())


def test_padding_changes_nothing(experiment: Translation) -> None:
    """Whatever vector padding has, nobody looks at it, in no block."""
    source = np.array([[70, 71, 72, 0, 0, 0]] * 2, np.int32)
    shifted = np.array([[1, 80, 81, 0, 0, 0, 0]] * 2, np.int32)
    model = override(experiment, ["model.num_decoder_layers=3"]).network()
    before = model.predict_on_batch([source, shifted])
    tables = [v for v in model.trainable_variables if v.path.endswith("embeddings")]
    assert len(tables) == 2
    for table in tables:
        changed = table.numpy()
        # A constant would be lost in the norms.
        changed[text_pairs.PADDING] += 5 * np.arange(changed.shape[1]) ** 2
        table.assign(changed)
    after = model.predict_on_batch([source, shifted])
    np.testing.assert_allclose(before[:, :3], after[:, :3], atol=1e-6)


def test_the_decoder_sees_all_of_the_source_and_none_of_what_comes(
    model: tfgpipe.PipelinedModel,
) -> None:
    source = np.array([[70, 71, 72, 73, 74, 75]], np.int32)
    shifted = np.array([[1, 80, 81, 82, 83, 84, 85]], np.int32)
    before = model.predict_on_batch([source, shifted])[0]
    later = shifted.copy()
    later[0, 4] = 90
    after = model.predict_on_batch([source, later])[0]
    np.testing.assert_allclose(before[:4], after[:4], atol=1e-6)
    assert (np.abs(before - after)[4:].max(axis=-1) > 1e-6).all()
    other = source.copy()
    other[0, 5] = 90
    after = model.predict_on_batch([other, shifted])[0]
    assert (np.abs(before - after).max(axis=-1) > 1e-6).all()


def test_a_run_goes_on_with_the_batches_it_would_have_had(
    experiment: Translation,
) -> None:
    from_zero = experiment.batches("train").take(5)
    from_three = experiment.batches("train", first_step=3).take(2)
    late = list(from_three.as_numpy_iterator())
    early = list(from_zero.as_numpy_iterator())[3:]
    for a, b in zip(keras.tree.flatten(late), keras.tree.flatten(early), strict=True):
        assert np.array_equal(a, b)


def test_a_step_predicts_at_most_the_characters_it_says(
    experiment: Translation, batch: tuple
) -> None:
    assert experiment.units_per_step == batch[1].size


def test_the_unigram_model_is_that_of_the_targets(
    experiment: Translation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The end is there twice, `a` twice and `b` once; each of 97 numbers once more, but
    # padding, which is never predicted.
    end, a, b, z = text_pairs.END, *text_pairs.encode_texts(["abz"], length=3)[0]
    trained = np.array([[a, b, end, 0, 0], [a, end, 0, 0, 0]])
    judged = np.array([[a, z, end, 0, 0]])
    rows = text_pairs.PairArrays(trained, trained, trained)
    data = tf.data.Dataset.from_tensors(((judged, judged), judged))
    monkeypatch.setattr(Translation, "_rows", lambda *_: rows)
    monkeypatch.setattr(Translation, "batches", lambda *_: data)
    total = 5 + 97
    expected = -np.log([3 / total, 1 / total, 3 / total]).mean()
    assert experiment.baselines() == {"unigram": pytest.approx(expected)}


class _Copies:
    """Writes the source, then the end; ever after nonsense."""

    def predict(self, inputs: list[np.ndarray], **_: object) -> np.ndarray:
        source, shifted = inputs
        assert (shifted[:, 0] == text_pairs.START).all()
        wanted = np.full(shifted.shape, 99)
        for row, numbers in zip(wanted, source, strict=True):
            length = np.count_nonzero(numbers)
            row[: length + 1] = [*numbers[:length], text_pairs.END]
        return np.eye(100)[wanted]


def test_greedy_decoding_stops_each_row_at_its_end() -> None:
    source = text_pairs.encode_texts(["ab", "c", "defg"], length=6)
    written = task.greedy_decode(_Copies(), source, length=5)
    assert [text_pairs.decode_text(row) for row in written] == ["ab", "c", "defg"]
    assert np.count_nonzero(written, axis=1).tolist() == [3, 2, 5]


def test_greedy_decoding_takes_the_likeliest_after_what_it_wrote(
    model: tfgpipe.PipelinedModel, batch: tuple
) -> None:
    source = batch[0][0]
    written = task.greedy_decode(model, source, length=TARGET_LENGTH)
    shifted = np.pad(written, [[0, 0], [1, 0]], constant_values=text_pairs.START)
    likeliest = model.predict_on_batch([source, shifted[:, :-1]]).argmax(axis=-1)
    counted = written > 0
    assert np.array_equal(likeliest[counted], written[counted])


@pytest.mark.parametrize("number", [1, 7])
def test_as_many_are_decoded_as_are_asked_for(number: int, tmp_path: Path) -> None:
    few = experiments.translation(f"num_decoded={number}")
    text = few.decode(_Copies(), tmp_path)  # type: ignore[arg-type]
    assert text.endswith(f"% of {number} exactly right.")
    assert len((tmp_path / "translations.tsv").read_text().splitlines()) == number + 1


def test_decoding_writes_a_table_and_tells_what_share_is_right(
    experiment: Translation, model: tfgpipe.PipelinedModel, tmp_path: Path
) -> None:
    text = experiment.decode(model, tmp_path)
    lines = (tmp_path / "translations.tsv").read_text().splitlines()
    assert lines[0] == "source\twanted\treceived"
    table = [line.split("\t") for line in lines[1:]]
    assert len(table) == 8
    assert all(wanted == source[::-1] for source, wanted, _ in table)
    right = sum(wanted == received for _, wanted, received in table)
    assert text.startswith(f"Translations:\n\n{table[0][0]} -> ")
    assert text.endswith(f"\n\n{right / 8:.1%} of 8 exactly right.")


def test_a_file_of_the_network_loads(
    model: tfgpipe.PipelinedModel, batch: tuple, tmp_path: Path
) -> None:
    plain = model.unpipelined()
    loaded = compare.reloaded(plain, tmp_path)
    x = list(batch[0])
    assert np.array_equal(plain.predict_on_batch(x), loaded.predict_on_batch(x))


@pytest.mark.parametrize("name", ["translate.Reversal", "translate.Dates"])
def test_every_task_has_a_model_of_its_lengths(name: str) -> None:
    experiment = override(find(name)(), experiments.TRANSLATION)
    (batch,) = experiment.batches("validation").as_numpy_iterator()
    assert batch[0][0].shape == (8, experiment.data.source_length)
    assert batch[1].shape == (8, experiment.data.target_length + 1)


def test_fewer_pairs_than_a_batch_are_refused() -> None:
    with pytest.raises(HyperparameterError) as error:
        experiments.translation("data.num_pairs=20").batches("validation")
    received = len(experiments.translation("data.num_pairs=20").data.read("validation"))
    assert str(error.value) == (
        "data: expected enough pairs for a batch of training.batch_size=8 for "
        f"validation, which has about a tenth or nine of them; received {received}. "
        "Give more pairs, or a smaller training.batch_size."
    )


def test_shards_are_refused() -> None:
    with pytest.raises(HyperparameterError) as error:
        experiments.translation("pipelining.num_shards=2").build_model()
    assert str(error.value) == (
        "pipelining.num_shards: expected 1, as no layer of an encoder-decoder is "
        "sharded; received 2. Try more pipelining.num_stages."
    )


def test_heads_that_do_not_share_the_width_are_refused() -> None:
    with pytest.raises(HyperparameterError) as error:
        EncoderDecoder(width=10, num_heads=4)
    assert str(error.value) == "width: expected a multiple of num_heads=4; received 10."
