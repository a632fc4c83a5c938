"""Which settings of a model a search tries, which trial wins, and to whom it yields."""

from dataclasses import replace
from typing import Any

import pytest
from kit.failures import fails

from runner_svc.policy.tuning import (
    Figures,
    Trial,
    TrialEnd,
    TunedParameter,
    TuningFacts,
    agreement,
    best_of,
    end_of,
    foreign_requests,
    space_of,
)
from runner_svc.runtimes.llama_server.arguments import load_parameters
from runner_svc.runtimes.llama_server.runtime import RUNTIME, LlamaServerModel
from runner_svc.runtimes.table import built_in
from weft.kernel.models.load_parameters import check_parameters

DECLARED = (
    TunedParameter(name="threads"),
    TunedParameter(name="kind", values=("a", "b")),
    TunedParameter(name="layers", values=(0, -1), needs_accelerator=True),
    TunedParameter(name="drafts", values=(1, 2), needs="spec_type"),
    TunedParameter(name="batch", values=(1, 2), unless_embeds=True),
)
FACTS = TuningFacts(cpu_count=8, known={each.name for each in DECLARED} | {"spec_type"})
PRESENT = Trial(
    number=1,
    end=TrialEnd.MEASURED,
    figures=Figures(prompt_tokens_per_second=100.0, output_tokens_per_second=10.0),
)


def _trial(number: int, output: float, end: TrialEnd = TrialEnd.MEASURED) -> Trial:
    figures = Figures(prompt_tokens_per_second=100.0, output_tokens_per_second=output)
    return Trial(number=number, settings={"threads": number}, end=end, figures=figures)


@pytest.mark.parametrize(
    ("facts", "varied"),
    [
        ({}, {"threads", "kind", "batch"}),
        ({"has_accelerator": True}, {"threads", "kind", "batch", "layers"}),
        ({"embeds": True}, {"threads", "kind"}),
        ({"configured": {"spec_type": "ngram-mod"}}, {"threads", "kind", "batch", "drafts"}),
        ({"configured": {"spec_type": "none", "kind": "a"}}, {"threads", "batch"}),
        ({"known": {"kind"}}, {"kind"}),
        ({"cpu_count": 1}, {"kind", "batch"}),
    ],
    ids=["processors", "accelerator", "embeddings", "speculation", "fixed", "unknown to the engine", "one processor"],
)
def test_space_has_what_takes_effect_on_the_model(facts: dict[str, Any], varied: set[str]) -> None:
    assert space_of(DECLARED, replace(FACTS, **facts)).keys() == varied


def test_threads_are_numbers_of_processors_of_the_machine() -> None:
    assert space_of(DECLARED, FACTS)["threads"] == [1, 2, 4, 7, 8]


def test_configured_values_are_varied_only_when_asked_for() -> None:
    assert space_of(DECLARED, replace(FACTS, configured={"kind": "a"}), ["kind"]) == {"kind": ("a", "b")}


def test_parameters_without_effect_cannot_be_asked_for() -> None:
    with fails(None, "layers cannot be varied for this model; these can: threads, kind, batch", field="vary"):
        space_of(DECLARED, FACTS, ["layers"])


def test_search_without_any_parameter_is_refused() -> None:
    with fails(field="vary"):
        space_of(DECLARED, replace(FACTS, known={"kind"}, configured={"kind": "b"}))


def test_fastest_trial_wins() -> None:
    assert best_of([PRESENT, _trial(2, 20.0), _trial(3, 30.0), _trial(4, 25.0)]) == _trial(3, 30.0)


@pytest.mark.parametrize("end", [each for each in TrialEnd if each is not TrialEnd.MEASURED])
def test_trial_with_another_end_never_wins(end: TrialEnd) -> None:
    assert best_of([PRESENT, _trial(2, 99.0, end)]) is None


def test_difference_that_may_be_noise_does_not_win() -> None:
    assert best_of([PRESENT, _trial(2, 10.5)]) is None


def test_search_whose_present_settings_were_not_measured_has_no_winner() -> None:
    assert best_of([replace(PRESENT, end=TrialEnd.INTERRUPTED, figures=None), _trial(2, 20.0), _trial(3, 9.0)]) is None


def test_trial_with_other_answers_than_the_bound_allows_is_worse() -> None:
    figures = Figures(prompt_tokens_per_second=1.0, output_tokens_per_second=1.0, agreement=0.75)
    assert (end_of(figures, 0.75), end_of(figures, 0.76)) == (TrialEnd.MEASURED, TrialEnd.WORSE)


def test_agreement_is_the_share_of_equal_continuations() -> None:
    assert agreement(["a", "b", "c", "d"], ["a", "x", "c", "d"]) == 0.75
    assert agreement([], []) == 0.0


def test_search_yields_to_all_but_its_own_requests_and_those_of_other_machines() -> None:
    requests = [
        {"requestId": "own", "state": "running", "clientId": "weft-tune-1", "target": "here"},
        {"requestId": "ended", "state": "ended", "target": "here"},
        {"requestId": "other machine", "state": "running", "target": "there"},
        {"requestId": "queued", "state": "queued", "target": "here", "clientId": "codex"},
        {"requestId": "route", "state": "loading", "target": "route/any"},
    ]
    found = foreign_requests(requests, "weft-tune-1", {"there"})
    assert [each["requestId"] for each in found] == ["queued", "route"]


def test_tuned_parameters_of_llama_server_are_load_parameters_with_allowed_values() -> None:
    known = load_parameters(LlamaServerModel(name="m"))
    for each in RUNTIME.tuned_parameters:
        for value in each.values or (1,):
            assert check_parameters({each.name: value}, known) == {each.name: value}


def test_only_llama_server_declares_a_space() -> None:
    assert [each.name for each in built_in() if each.tuned_parameters] == ["llama_server"]


def test_configured_values_are_defaults_of_load_parameters() -> None:
    model = LlamaServerModel(name="m", threads=3, extra_arguments=("--flash-attn", "off"))
    found = {each.name: each.default for each in load_parameters(model) if each.HasField("default")}
    assert (found["threads"].integer, found["flash_attention"].word) == (3, "off")
    assert found.keys() == {"context_tokens", "slots", "threads", "flash_attention"}
