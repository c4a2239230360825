"""Language models: found by name, causal, better than bigrams, true to their words."""

from __future__ import annotations

import itertools
from pathlib import Path

import keras
import numpy as np
import pytest
import tokenizers as hugging_face

import tfgpipe
from tests.helpers import compare, experiments, tokenizer_files
from tfgpipe_params.lm import tokenizers
from tfgpipe_params.lm.corpus import START, pack
from tfgpipe_params.lm.sizes import Transformer
from tfgpipe_params.lm.task import Sampling
from tfgpipe_params.lm.transformer import Block, Positions
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.experiment import experiments as experiments_here
from tfgpipe_trainer.experiment import find
from tfgpipe_trainer.hyperparams import HyperparameterError, from_text, to_text


def test_the_named_experiments_are_all_there() -> None:
    assert list(experiments_here()) == [
        "image.AmoebaNetD",
        "image.AmoebaNetDSmall",
        "image.Digits",
        "image.DigitsQat",
        "image.ResNet50",
        "lm.Experts",
        "lm.Llama",
        "lm.Medium",
        "lm.OneBillion",
        "lm.Packed",
        "lm.Small",
        "lm.Tiny",
        "parallelism.DataParallel",
        "parallelism.DataPipelineTensor",
        "parallelism.Pipelined",
        "parallelism.PipelinedDataParallel",
        "parallelism.SingleDevice",
        "parallelism.TensorParallel",
        "parallelism.TensorParallelRing",
        "segmentation.UNet",
        "template.Mine",
        "translate.Dates",
        "translate.Files",
        "translate.Reversal",
        "variants.CustomImageModel",
        "variants.FromDataset",
        "variants.FromItems",
        "variants.SubclassedModel",
    ]


def test_an_unknown_experiment_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(HyperparameterError) as error:
        find("lm.Tyni")
    assert str(error.value) == (
        "lm.Tyni: no such experiment. Did you mean lm.Tiny? Expected one of "
        "lm.Experts, lm.Llama, lm.Medium, lm.OneBillion, lm.Packed, lm.Small, "
        "lm.Tiny, which "
        "tfgpipe_params.lm has, or PACKAGE.FILE.CLASS of a file that Python can import."
    )


def test_every_experiment_reads_back() -> None:
    for cls in experiments_here().values():
        assert from_text(to_text(cls()), cls) == cls()


@pytest.mark.parametrize(
    ("name", "num_stages", "num_weights"),
    [("Small", 4, 86e6), ("Medium", 8, 304e6), ("OneBillion", 8, 1.07e9)],
)
def test_a_large_model_has_the_weights_and_the_stages_that_it_says(
    name: str, num_stages: int, num_weights: float
) -> None:
    experiment = find(f"lm.{name}")()
    n, w, hidden = (
        getattr(experiment.model, size) for size in ("num_layers", "width", "mlp_width")
    )
    # Attention, a perceptron, two norms; embeddings and logits of bytes, positions.
    blocks = n * (4 * (w * w + w) + (2 * w * hidden + hidden + w) + 4 * w)
    ends = 2 * 256 * w + 256 + 2 * w + experiment.model.context * w
    assert blocks + ends == pytest.approx(num_weights, rel=0.005)
    assert experiment.pipelining.num_stages == num_stages


@pytest.fixture(scope="module")
def models() -> dict[str, tfgpipe.PipelinedModel]:
    """The model of `experiments.text("Tiny")` with each softmax, untrained."""
    keras.utils.set_random_seed(0)
    return {
        softmax: experiments.text("Tiny", f"model.softmax={softmax}").build_model()
        for softmax in ("tied", "untied")
    }


@pytest.fixture(scope="module")
def model(models: dict[str, tfgpipe.PipelinedModel]) -> tfgpipe.PipelinedModel:
    return models[experiments.text("Tiny").model.softmax]


@pytest.mark.parametrize("softmax", ["tied", "untied"])
def test_a_later_byte_changes_no_earlier_logit(softmax: str, models) -> None:
    model = models[softmax]
    text = np.arange(24, dtype=np.int32).reshape(2, 12)
    changed = text.copy()
    changed[:, 7] = 99
    before, after = model.predict_on_batch(text), model.predict_on_batch(changed)
    assert before.shape == (2, 12, 256)
    assert np.array_equal(before[:, :7], after[:, :7])
    assert (np.abs(before - after)[:, 7:].max(axis=(0, 2)) > 1e-6).all()


def test_a_tied_softmax_has_one_table_for_both_ends(models) -> None:
    tied, untied = models["tied"], models["untied"]
    # The untied one has a second table and a bias.
    assert untied.count_params() - tied.count_params() == 256 * 16 + 256


def test_positions_matter() -> None:
    model = experiments.text("Tiny", "model.num_layers=1").build_model()
    logits = model.predict_on_batch(np.zeros([1, 12], np.int32))[0]
    assert all(np.abs(a - b).max() > 1e-6 for a, b in itertools.pairwise(logits))


@pytest.mark.parametrize(
    "layer",
    [
        Positions(),
        Block(width=8, num_heads=2, mlp_width=16, dropout=0.1),
        Block(width=8, num_heads=2, mlp_width=16, num_experts=3, balancing=0.1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_come_back_from_their_configuration(
    layer: keras.layers.Layer, tmp_path: Path
) -> None:
    model = keras.Sequential([keras.Input((4, 8)), layer])
    loaded = compare.reloaded(model, tmp_path)
    data = np.random.default_rng(0).normal(size=[2, 4, 8]).astype("float32")
    assert np.array_equal(model.predict_on_batch(data), loaded.predict_on_batch(data))


def test_experts_and_parts_of_a_sequence_are_those_of_one_device(corpus: str) -> None:
    """Two stages of two devices each, and the plain model."""
    settings = [corpus, "model.width=8", "model.num_heads=2", "model.mlp_width=8"]
    shapes = (
        ["num_shards=2", "tp_collective=sequence"],
        ["num_shards=1", "tp_collective=gather"],
    )
    losses = []
    for shape in shapes:
        keras.utils.set_random_seed(0)
        given = [*settings, *(f"pipelining.{each}" for each in shape)]
        experiment = experiments.text("Experts", *given)
        model = experiment.build_model()
        batch = next(iter(experiment.batches("train")))
        losses.append([float(model.train_on_batch(*batch)) for _ in range(3)])
    assert np.allclose(*losses, rtol=1e-4), losses
    assert losses[0][2] < losses[0][0]


@pytest.mark.parametrize("softmax", ["tied", "untied"])
def test_a_vocabulary_in_parts_is_that_of_one_device(corpus: str, softmax) -> None:
    given = [corpus, f"model.softmax={softmax}", "model.num_layers=2"]
    plain = experiments.text("Tiny", *given, "pipelining.num_stages=1")
    split = experiments.text("Tiny", *given, "model.split_vocabulary=true")
    model, expected = split.build_model(), plain.build_model()
    weights = model.unpipelined().get_weights()
    if softmax == "tied":
        weights[:2] = [np.concatenate(weights[:2])]
    else:
        kernel, bias = (np.concatenate(weights[i::2]) for i in (-4, -3))
        weights[-4:] = [kernel.T, bias]
    expected.unpipelined().set_weights(weights)
    losses = []
    for each, experiment in ((model, split), (expected, plain)):
        batches = experiment.batches("train").as_numpy_iterator()
        losses.append([float(each.train_on_batch(*next(batches))) for _ in range(3)])
    assert np.allclose(*losses, rtol=1e-5), losses
    tokens = np.zeros((2, split.model.context), "int32")
    ours = split.for_inference(model.unpipelined()).predict_on_batch(tokens)
    theirs = expected.predict_on_batch(tokens)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    assert split.sample(model) == plain.sample(expected)


@pytest.mark.parametrize(
    "other",
    [
        "data.documents=packed",
        "precision.quantize=8bit",
        "pipelining.num_replicas=2",
        "pipelining.num_shards=2",
        "pipelining.layers_per_stage=1,4",
        "pipelining.schedule=interleaved",
        "pipelining.num_stages=1",
    ],
)
def test_a_vocabulary_in_parts_says_with_what_it_does_not_go(other: str) -> None:
    with pytest.raises(HyperparameterError, match=other.partition("=")[0]):
        experiments.text("Tiny", "model.split_vocabulary=true", other)


def test_bad_sizes_of_experts_are_named() -> None:
    with pytest.raises(HyperparameterError, match="experts_per_token: expected at mos"):
        experiments.text("Experts", "model.num_experts=2", "model.experts_per_token=3")


def test_the_bigram_model_is_judged_on_the_very_bytes_of_the_model(corpus: str) -> None:
    experiment = experiments.text("Tiny", corpus)
    batches = list(experiment.batches("validation").as_numpy_iterator())
    again = list(experiment.batches("validation").as_numpy_iterator())
    assert len(batches) == 2
    for one, other in zip(batches, again, strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])
    # After `a` each of the others is as likely; what is after them is certain.
    bigram = experiment.baselines()["bigram"]
    assert bigram == pytest.approx(0.5 * np.log(2), rel=0.3)


def test_a_step_trains_on_the_tokens_it_says(corpus: str) -> None:
    experiment = experiments.text("Tiny", corpus)
    _, targets = next(experiment.batches("train").as_numpy_iterator())
    assert experiment.units_per_step == targets.size


def test_a_sample_begins_with_its_prompt_and_repeats_with_its_seed(model) -> None:
    experiment = experiments.text(
        "Tiny", "sampling.num_bytes=20", "sampling.prompt='def f('"
    )
    (sample,) = experiment.sample(model)
    assert sample.startswith("def f(")
    assert 6 < len(sample) <= 26
    assert experiment.sample(model) == [sample]


def test_a_sample_holds_no_control_characters(model) -> None:
    # An untrained model draws any byte.
    (sample,) = experiments.text("Tiny", "sampling.num_bytes=80").sample(model)
    assert all(c.isprintable() or c in "\n\t\ufffd" for c in sample)


def test_decoding_writes_the_sample_and_shows_it(model, tmp_path: Path) -> None:
    experiment = experiments.text("Tiny", "sampling.num_bytes=5")
    (sample,) = experiment.sample(model)
    assert experiment.decode(model, tmp_path) == f"A sample:\n\n{sample}"
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8") == sample


def test_each_line_of_a_file_is_a_prompt(model, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("def \n\nclass \n", encoding="utf-8")
    experiment = experiments.text(
        "Tiny", "sampling.num_bytes=5", f"sampling.prompts={prompts}"
    )
    experiment.check()
    first, second = samples = experiment.sample(model)
    assert (first[:4], second[:6]) == ("def ", "class ")
    assert experiment.decode(model, tmp_path) == f"A sample:\n\n{first}"
    written = [tmp_path / f"sample-{n}.txt" for n in (1, 2)]
    assert [path.read_text(encoding="utf-8") for path in written] == samples


def test_prompts_that_cannot_be_read_are_refused_before_training(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, words in (("none", "No such file"), ("empty", "which has none")):
        with pytest.raises(HyperparameterError, match=rf"sampling\.prompts: .*{words}"):
            experiments.text("Tiny", f"sampling.prompts={tmp_path}/{name}").check()


# Packed documents.


@pytest.fixture
def paragraphs(tmp_path: Path) -> str:
    """A text of many short paragraphs, and of some longer than a window."""
    random = np.random.default_rng(0)
    texts = [
        random.integers(97, 123, length).astype(np.uint8).tobytes()
        for length in random.integers(1, 16, 600)
    ]
    (tmp_path / "paragraphs").write_bytes(b"\n\n".join(texts))
    return f"data.files={tmp_path}/paragraphs"


# Where the pipeline is not the question.
ALONE = ["pipelining.num_stages=1", "pipelining.num_microbatches=1"]

# Two documents, then padding; the second stands elsewhere in the second window.
WINDOWS = np.array(
    [
        [0, 97, 98, 99, 100, 0, 101, 102, 103, 104, 0, 0],
        [0, 101, 102, 103, 104, 0, 110, 111, 112, 113, 114, 0],
    ],
    np.int32,
)


@pytest.fixture(scope="module")
def packed_models() -> dict[str, tfgpipe.PipelinedModel]:
    """The model of packed documents with each softmax, untrained."""
    keras.utils.set_random_seed(0)
    return {
        softmax: experiments.text(
            "Packed", f"model.softmax={softmax}", *ALONE
        ).build_model()
        for softmax in ("tied", "untied")
    }


@pytest.mark.parametrize("softmax", ["tied", "untied"])
def test_documents_of_a_window_do_not_see_each_other(
    softmax: str, packed_models
) -> None:
    model = packed_models[softmax]
    changed = WINDOWS.copy()
    changed[0, 3] = 120
    before, after = model.predict_on_batch(WINDOWS), model.predict_on_batch(changed)
    assert np.array_equal(before[0, 5:], after[0, 5:])
    assert (np.abs(before - after)[0, 3:5].max(axis=-1) > 1e-6).all()


def test_a_document_is_read_alike_wherever_it_stands(packed_models) -> None:
    model = packed_models["tied"]
    logits = model.predict_on_batch(WINDOWS)
    np.testing.assert_allclose(logits[0, 5:10], logits[1, :5], atol=1e-6)
    # As positions count from its start; they do matter.
    (positions,) = (
        layer for layer in model.unpipelined().layers if isinstance(layer, Positions)
    )
    before = positions.vectors.numpy()
    positions.vectors.assign(before[::-1])
    turned = model.predict_on_batch(WINDOWS)
    positions.vectors.assign(before)
    assert np.abs(turned - logits).max() > 1e-3


def test_the_loss_leaves_out_starts_and_padding(paragraphs: str) -> None:
    experiment = experiments.text("Packed", paragraphs, "pipelining.num_microbatches=2")
    model = experiment.build_model()
    inputs, targets = next(experiment.batches("validation").as_numpy_iterator())
    logits = model.predict_on_batch(inputs).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    each = -np.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
    counted = targets != START
    assert 0 < counted.mean() < 1
    loss = model.test_on_batch(inputs, targets, return_dict=True)["loss"]
    assert loss == pytest.approx(each[counted].mean(), rel=1e-5)


def test_packed_documents_pass_a_pipeline_unchanged() -> None:
    # With the table of a tied softmax at both ends of the pipeline.
    stages = ["pipelining.num_stages=2", "pipelining.num_microbatches=2"]
    model = experiments.text("Packed", "model.softmax=tied", *stages).build_model()
    expected = compare.run(model.unpipelined(), WINDOWS, graph=False)
    assert all(np.any(gradient) for gradient in expected.weight_grads.values())
    compare.assert_same(expected, compare.run(model, WINDOWS))


def test_packed_batches_depend_on_seed_and_step_alone(paragraphs: str) -> None:
    experiment = experiments.text("Packed", paragraphs)
    early = list(experiment.batches("train").take(5).as_numpy_iterator())[3:]
    late = experiment.batches("train", first_step=3).take(2)
    for a, b in zip(early, late.as_numpy_iterator(), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(early[0], early[1])


def test_packed_windows_are_drawn_whole(paragraphs: str) -> None:
    experiment = experiments.text("Packed", paragraphs, "evaluation.max_batches=1")
    for split in ("train", "validation"):
        documents = experiment.data.read_documents(split)
        table = {row.tobytes() for row in pack(documents, size=13)}
        for inputs, targets in experiment.batches(split).take(3):
            windows = np.concatenate([inputs, targets[:, -1:]], axis=1)
            assert {row.tobytes() for row in windows.astype(np.uint8)} <= table
            assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_each_packed_window_comes_once_in_an_epoch(paragraphs: str) -> None:
    experiment = experiments.text("Packed", paragraphs, "training.num_steps=70")
    size = experiment.training.batch_size
    windows = experiment.data.read_tokens("train", window=13).reshape(-1, 13)
    found = [
        np.concatenate([inputs, targets[:, -1:]], axis=1)
        for inputs, targets in experiment.batches("train").as_numpy_iterator()
    ]
    line = np.concatenate(found)
    assert len(windows) < len(line)
    assert sorted(line[: len(windows)].tolist()) == sorted(windows.tolist())
    late = next(iter(experiment.batches("train", first_step=7)))
    assert np.array_equal(late[0], found[7][:, :-1])
    assert len(found[7]) == size
    shared = [HostShard(host, 2) for host in (0, 1)]
    parts = [next(iter(experiment.batches("train", shard=each)))[1] for each in shared]
    assert np.array_equal(np.concatenate(parts), found[0][:, 1:])


def test_the_start_of_a_packed_document_is_left_out_of_the_loss(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(tokenizer_files.TEXT)
    file = tokenizer_files.write(tmp_path, ".json")
    settings = [f"data.files={tmp_path}/text", f"data.tokenizer={file}"]
    experiment = experiments.text("Packed", *settings)
    start = experiment.data.load_tokenizer().start
    targets = np.array([[5, 0, start, 7]])
    logits = np.random.default_rng(0).normal(size=(1, 4, start + 1)).astype("float32")
    likely = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    each = [likely[0, place, token] for place, token in enumerate(targets[0])]
    expected = -(each[0] + each[1] + each[3]) / 3
    assert float(experiment.loss()(targets, logits)) == pytest.approx(expected, 1e-5)


def test_the_bigram_model_is_judged_on_what_counts(paragraphs: str) -> None:
    # 26 letters about as likely, and line ends.
    bigram = experiments.text("Packed", paragraphs).baselines()["bigram"]
    assert 0.6 * np.log(26) < bigram < 1.6 * np.log(26)


def test_a_file_of_a_packed_network_loads(packed_models, tmp_path: Path) -> None:
    plain = packed_models["tied"].unpipelined()
    loaded = compare.reloaded(plain, tmp_path)
    expected, received = (m.predict_on_batch(WINDOWS) for m in (plain, loaded))
    assert np.array_equal(expected, received)


class _Listens:
    """Keeps the windows that it is asked about; always says one token, by default `b`.

    Args:
        token: What it says.
        size: Of its vocabulary.
    """

    def __init__(self, token: int = ord("b"), size: int = 256) -> None:
        self.windows: list[np.ndarray] = []
        self._says = 1e3 * np.eye(size)[token]

    def predict_on_batch(self, window: np.ndarray) -> np.ndarray:
        self.windows.append(window)
        return np.broadcast_to(self._says, (*window.shape, len(self._says)))


def test_a_sample_always_begins_with_its_start() -> None:
    model = _Listens()
    sampling = Sampling(prompt="a", num_bytes=4)
    assert sampling.draw(model, ["a"], length=4, seed=0, start=b"\0") == ["abbbb"]
    windows = [window.astype(np.uint8).tobytes() for window in model.windows]
    assert windows == [b"\0a\0\0", b"\0ab\0", b"\0abb", b"\0bbb"]


# Tokens of a file.


@pytest.mark.parametrize(("suffix", "name"), [(".json", "Tiny"), (".model", "Packed")])
def test_a_model_of_tokens_trains_and_draws(
    suffix: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_bytes(tokenizer_files.TEXT)
    file = tokenizer_files.write(tmp_path, suffix)
    settings = [f"data.files={tmp_path}/text", f"data.tokenizer={file}"]
    settings.append("model.num_layers=1")
    experiment = experiments.text(name, *settings, "sampling.num_bytes=20", *ALONE)
    tokenizer = experiment.data.load_tokenizer()
    experiment.check()
    early = list(experiment.batches("train").take(4).as_numpy_iterator())
    late = experiment.batches("train", first_step=2).take(2)
    for a, b in zip(early[2:], late.as_numpy_iterator(), strict=True):
        assert np.array_equal(a, b)
    inputs, targets = early[0]
    for window in np.concatenate([inputs, targets[:, -1:]], axis=1):
        starts = np.flatnonzero(window == tokenizer.start)
        assert len(starts) >= (name == "Packed")
        for piece in np.split(window, starts):
            text = tokenizer.decode(piece[piece != tokenizer.start].tolist())
            assert text in tokenizer_files.TEXT
    model = experiment.build_model()
    size = tokenizer.vocabulary_size + (name == "Packed")
    assert model.output_shape == (None, 12, size)
    loss = model.train_on_batch(inputs, targets, return_dict=True)["loss"]
    assert loss == pytest.approx(np.log(size), rel=0.1)
    (sample,) = experiment.sample(model)
    assert sample.startswith("def ")
    assert len(sample.encode()) >= 24
    # What the table shows per byte.
    batches = list(experiment.batches("validation").as_numpy_iterator())
    rows = [row[row != tokenizer.start] for _, targets in batches for row in targets]
    num_bytes = sum(len(tokenizer.decode(row.tolist())) for row in rows)
    assert experiment.unit == "token"
    assert experiment.report_units() == {"byte": num_bytes / sum(map(len, rows))}
    assert 0 < experiment.baselines()["bigram"] < np.log(size)


def test_bytes_are_shown_per_byte_alone() -> None:
    experiment = experiments.text("Tiny")
    assert (experiment.unit, experiment.report_units()) == ("byte", {})


def test_tokens_are_drawn_until_there_are_enough_bytes(tmp_path: Path) -> None:
    tokenizer = tokenizers.load(tokenizer_files.write(tmp_path, ".json"))
    size = tokenizer.vocabulary_size
    prompt, (word, *_) = (ids.tolist() for ids in tokenizer.encode([b"x", b"return"]))
    num_bytes = len(tokenizer.decode([word]))
    assert num_bytes > 1
    model = _Listens(word, size + 1)
    sampling = Sampling(num_bytes=2 * num_bytes + 1)
    (text,) = sampling.draw(
        model, ["x"], length=8, seed=0, start=[tokenizer.start], tokenizer=tokenizer
    )
    assert text.encode() == tokenizer.decode([*prompt, word, word, word])
    assert len(model.windows) == 3
    # The start of documents, which is no text, is never drawn.
    model = _Listens(tokenizer.start, size + 1)
    sampling = Sampling(num_bytes=9)
    sampling.draw(
        model, ["x"], length=8, seed=0, start=[tokenizer.start], tokenizer=tokenizer
    )
    assert all((window[:, 1:] < size).all() for window in model.windows)


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    words = hugging_face.Tokenizer(hugging_face.models.WordLevel({"a": 0}, "a"))
    words.pre_tokenizer = hugging_face.pre_tokenizers.Whitespace()
    words.save(f"{tmp_path}/words.json")
    with pytest.raises(HyperparameterError) as error:
        experiments.text(
            "Tiny", f"data.tokenizer={tmp_path}/words.json", "sampling.prompt=' '"
        ).check()
    assert str(error.value) == (
        "sampling.prompt: expected a text of one token or more; received ' ', of which "
        "the tokenizer makes none."
    )


def test_a_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"short")
    with pytest.raises(HyperparameterError) as error:
        experiments.text("Tiny", f"data.files={tmp_path}/text").batches("validation")
    assert str(error.value) == (
        "data.files: expected more than model.context=12 bytes for validation; "
        "received 1. Give more text, or a smaller model.context."
    )


def test_heads_that_do_not_share_the_width_are_refused() -> None:
    with pytest.raises(HyperparameterError) as error:
        Transformer(width=10, num_heads=4)
    assert str(error.value) == "width: expected a multiple of num_heads=4; received 10."


def test_more_stages_than_layers_is_a_wrong_hyperparameter() -> None:
    with pytest.raises(HyperparameterError, match=r"pipelining: .*7"):
        experiments.text(
            "Tiny", "pipelining.num_stages=7", "model.num_layers=1"
        ).build_model()


def test_the_learning_rate_rises_then_falls() -> None:
    adam = experiments.text(
        "Tiny", "optimizer.learning_rate=0.5", "optimizer.warmup=0.2"
    ).optimizer
    optimizer = adam.build(num_steps=10)
    rates = []
    for step in range(11):
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    assert rates[0] == 0
    assert max(rates) == rates[2] == pytest.approx(0.5)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[10] == pytest.approx(0, abs=1e-6)
