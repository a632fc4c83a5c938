"""The order in which `weft models tune` tries settings, and what it says of a search."""

import sys

import pytest

from runner_svc.policy.tuning import Space
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.tune.command import outcome
from weft_extensions.tune.tuning_run import TunedModel, TuningReport
from weft_extensions.tune.tuning_search import TuningSearch

SPACE: Space = {"threads": (1, 2), "flash_attention": ("on", "off")}


def test_first_trial_has_the_present_settings() -> None:
    assert TuningSearch(SPACE, seed=1).ask() == {}


def test_every_setting_is_tried_once_until_none_is_left() -> None:
    search, tried = TuningSearch({"threads": (1, 2)}, seed=1), []
    while (settings := search.ask()) is not None:
        tried.append(settings)
        search.tell(settings, None if settings.get("threads") == 2 else 1.0)
    assert sorted(map(str, tried)) == ["{'threads': 1}", "{'threads': 2}", "{}"]


def test_same_seed_tries_the_same_settings() -> None:
    def tried(seed: int) -> list[object]:
        search, found = TuningSearch(SPACE, seed), list[object]()
        for number in range(6):
            settings = search.ask()
            assert settings is not None
            found.append(settings)
            search.tell(settings, float(number))
        return found

    assert tried(3) == tried(3)


def test_interrupted_trial_is_tried_again_next() -> None:
    search = TuningSearch(SPACE, seed=1)
    search.tell(search.ask() or {}, 1.0)
    interrupted = search.ask()
    search.retry()
    assert search.ask() == interrupted


def test_missing_optuna_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(WeftError) as refused:
        TuningSearch(SPACE, seed=1)
    assert refused.value.reason is Reason.UNSUPPORTED_OPERATION
    assert refused.value.message.endswith("pipx inject weft optuna")


def test_search_that_measured_nothing_else_calls_no_settings_the_best() -> None:
    model = TunedModel(
        name="m", runner="r", runtime="llama_server", options={}, space={}, elsewhere=frozenset(), was_loaded=True
    )
    assert outcome(TuningReport(model=model, trials=[])).startswith("no other settings were measured")
