"""Tasks of EleutherAI's lm-evaluation-harness as an evaluator.

    class Mine(lm.Tiny):
        def evaluators(self):
            return {"zero_shot": Harness(self, ["arc_easy", "lambada_openai"])}

then logs `zero_shot_arc_easy_acc` and so on. The harness loads the data of its tasks,
from the network unless a task's file names one of this machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfgpipe_trainer.evaluators import Evaluator
from tfgpipe_trainer.hyperparams import HyperparameterError

if TYPE_CHECKING:
    import keras

    from tfgpipe_params.lm.task import LanguageModel


class Harness(Evaluator):
    """Tasks of lm-evaluation-harness, scored by the model that is trained.

    Args:
        experiment: The experiment of the model: its tokenizer and context length.
        tasks: Names of tasks.
        every_steps: Steps between evaluations. Defaults to one, at the end.
        limit: Examples of each task. Defaults to all.
        num_fewshot: Examples before each question. Defaults to the task's own.
        include_path: A folder of further tasks, as YAML.
        batch_size: Windows of a batch.
    """

    def __init__(
        self,
        experiment: LanguageModel,
        tasks: Sequence[str],
        *,
        every_steps: int | None = None,
        limit: int | None = None,
        num_fewshot: int | None = None,
        include_path: str | None = None,
        batch_size: int = 16,
    ) -> None:
        self.every_steps = every_steps
        self._experiment, self._tasks = experiment, list(tasks)
        self._include_path, self._batch_size = include_path, batch_size
        self._options = {"limit": limit, "num_fewshot": num_fewshot}

    def evaluate(self, model: keras.Model) -> dict[str, float]:
        """Returns each number that a task reports, by `TASK_METRIC`.

        Raises:
            HyperparameterError: If lm-eval is not installed.
        """
        try:
            evaluator = importlib.import_module("lm_eval.evaluator")
            tasks = importlib.import_module("lm_eval.tasks")
        except ImportError as error:
            raise HyperparameterError(
                "evaluators: expected the package lm-eval for tasks of the harness; "
                f"received an environment without ({error}). Try: pip install lm-eval"
            ) from None
        found = evaluator.simple_evaluate(
            model=_adapter(self._experiment, model, self._batch_size),
            tasks=self._tasks,
            task_manager=tasks.TaskManager(include_path=self._include_path),
            bootstrap_iters=0,
            log_samples=False,
            **self._options,
        )
        return {
            f"{task}_{metric.removesuffix(',none').replace(',', '_')}": float(value)
            for task, measured in found["results"].items()
            for metric, value in measured.items()
            if isinstance(value, int | float) and "_stderr" not in metric
            if metric not in ("sample_len", "sample_count")
        }


def _adapter(experiment: LanguageModel, model: keras.Model, rows: int) -> Any:
    """Returns a model as the harness calls it, whose base class comes with it."""
    base: Any = importlib.import_module("lm_eval.api.model").TemplateLM
    cls = type("TfgpipeLM", (_OfHarness, base), {})
    return cls(experiment, model, rows)


class _OfHarness:
    """The methods that the harness asks for."""

    def __init__(
        self, experiment: LanguageModel, model: keras.Model, rows: int
    ) -> None:
        super().__init__()
        self._model = experiment.of_tokens(model)
        self._tokens = experiment.corpus.load_tokenizer()
        self._start = experiment.first_tokens
        self._length = experiment.model.context
        self._rows = rows

    @property
    def eot_token_id(self) -> int:
        """The token before a text without a context: that of a line end."""
        return self.tok_encode("\n")[0]

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        """Returns the tokens of a text."""
        return [int(i) for i in self._tokens.encode([string.encode()])[0]]

    def _logits(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns the logits after each token of texts, `[num_tokens, vocabulary]`."""
        found = []
        for first in range(0, len(texts), self._rows):
            some = texts[first : first + self._rows]
            windows = np.zeros([self._rows, self._length], np.int32)
            for window, text in zip(windows, some, strict=False):
                window[: len(self._start) + len(text)] = [*self._start, *text]
            logits = np.asarray(self._model.predict_on_batch(windows), np.float64)
            size = self._tokens.vocabulary_size
            for row, text in zip(logits, some, strict=False):
                found.append(row[len(self._start) :, :size][: len(text)])
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and if it is likeliest."""
        most = self._length - len(self._start)
        # The last token is predicted, and not read.
        read = [[*context, *after][:-1][-most:] for _, context, after in requests]
        scored = []
        for (_, _, after), logits in zip(requests, self._logits(read), strict=True):
            targets = after[-len(logits) :]
            logits = logits[len(logits) - len(targets) :]
            scale = np.logaddexp.reduce(logits, axis=1)
            said = logits[np.arange(len(targets)), targets] - scale
            greedy = bool((logits.argmax(axis=1) == targets).all())
            scored.append((float(said.sum()), greedy))
        return scored

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Returns the log-probability of each text, in windows side by side."""
        utils: Any = importlib.import_module("lm_eval.utils")
        sums = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.eot_token_id,
                max_seq_len=self._length - len(self._start),
                context_len=1,
            )
            pairs = [(None, *utils.make_disjoint_window(each)) for each in windows]
            sums.append(sum(x for x, _ in self._loglikelihood_tokens(pairs)))
        return sums

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Returns the likeliest tokens after each text, up to a text that ends it."""
        return [self._generated(*request.args) for request in requests]

    def _generated(self, context: str, options: Mapping[str, Any]) -> str:
        until = options.get("until") or []
        ends = [until] if isinstance(until, str) else list(until)
        most = self._length - len(self._start)
        tokens, made = self.tok_encode(context) or [self.eot_token_id], list[int]()
        text = ""
        for _ in range(int(options.get("max_gen_toks", 256))):
            logits = self._logits([[*tokens, *made][-most:]])[0]
            made.append(int(logits[-1].argmax()))
            text = self._tokens.decode(made).decode(errors="ignore")
            if any(end and end in text for end in ends):
                break
        cut = (text.partition(end)[0] for end in ends if end)
        return min(cut, key=len, default=text)
