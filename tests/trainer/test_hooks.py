"""The values that methods of an experiment return are checked, each by its row."""

from __future__ import annotations

from typing import Any

import pytest

from tfgpipe_trainer import hooks
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.hyperparams import HyperparameterError

pytestmark = pytest.mark.pure


def mine(hook: str, returned: Any) -> object:
    return type("Mine", (), {hook: lambda *_, **__: returned})()


def test_every_hook_is_a_method_of_experiments() -> None:
    assert [name for name in hooks.HOOKS if not hasattr(Experiment, name)] == []


@pytest.mark.parametrize(
    ("hook", "returned"),
    [
        ("baselines", {"bigram": 2.5, "other": 3}),
        ("report_units", {"byte": 0.5}),
        ("file_hashes", {"data.files": "ab12"}),
        ("quantize_rules", {int: object()}),
        ("baselines", {}),
    ],
)
def test_a_value_that_fits_is_returned(hook: str, returned: Any) -> None:
    assert hooks.call(mine(hook, returned), hook) is returned


@pytest.mark.parametrize(
    ("hook", "returned", "expected"),
    [
        ("baselines", None, "a dict of numbers"),
        ("baselines", {"bigram": "2.5"}, "a dict of numbers"),
        ("report_units", {"byte": 0}, "a dict of numbers above 0"),
        ("report_units", {"byte": "1"}, "a dict of numbers above 0"),
        ("file_hashes", {"data.files": 12}, "a dict of strings"),
        ("quantize_rules", [], "a dict"),
    ],
)
def test_any_other_is_refused(hook: str, returned: Any, expected: str) -> None:
    with pytest.raises(HyperparameterError) as error:
        hooks.call(mine(hook, returned), hook)
    assert str(error.value) == (
        f"Mine: expected `{hook}()` to return {expected}; received {returned!r}."
    )


@pytest.mark.parametrize(
    ("former", "name"),
    [("other_units", "report_units"), ("tokens_per_step", "units_per_step")],
)
def test_a_method_by_its_former_name_is_refused(former: str, name: str) -> None:
    with pytest.raises(HyperparameterError) as error:
        hooks.refuse_former(type("Mine", (Experiment,), {former: lambda _: {}}))
    assert str(error.value) == (
        f"Mine: expected `{name}`; received its former name `{former}`."
    )
