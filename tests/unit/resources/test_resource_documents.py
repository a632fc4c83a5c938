"""Conversion of documents to and from messages and YAML, and fields derived from the registry's messages."""

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.resource_samples import some_agent, some_event, some_model, some_pool, some_route, some_runner

from weft.api.registry.v1 import agent_pb2, model_pb2, runner_pb2
from weft.api.registry.v1.alias_pb2 import AliasManifest
from weft.documents.codec import document_of
from weft.documents.kinds.alias import check_alias
from weft.documents.resource_kinds import ResourceKind, parse_kind
from weft.documents.resources import (
    AnyDocument,
    declared,
    declared_document,
    instance_of,
    model_document,
    new_document,
    observed_document,
    plain,
    pool_document,
    runner_document,
    to_declaration,
)
from weft.documents.yaml_documents import parse_document, read_documents, yaml_documents, yaml_text
from weft.kernel.errors.error_tree import FieldError

EVERY_KIND: list[Callable[[], AnyDocument]] = [
    lambda: model_document(some_model(), instance_of(some_model(), some_runner())),
    lambda: observed_document(ResourceKind.AGENT, some_agent()),
    lambda: runner_document(some_runner()),
    lambda: pool_document(some_pool()),
    lambda: observed_document(ResourceKind.ROUTE, some_route()),
]


@pytest.mark.parametrize("build", EVERY_KIND)
def test_resource_yaml_declares_the_registry_state(build: Callable[[], AnyDocument]) -> None:
    document = build()
    (read,) = read_documents(yaml_text(declared(document)), "x.yaml")
    assert to_declaration(read.document) == to_declaration(document)
    assert read.document.observed is None


@pytest.mark.parametrize("build", EVERY_KIND)
def test_resource_json_declares_the_same_and_its_status_is_dropped(build: Callable[[], AnyDocument]) -> None:
    document = build()
    text = json.dumps(plain(document))
    assert '"status"' in text
    (read,) = read_documents(text, "x.json")
    assert to_declaration(read.document) == to_declaration(document)


@pytest.mark.parametrize("build", EVERY_KIND)
def test_declaration_round_trips_as_a_document(build: Callable[[], AnyDocument]) -> None:
    document = build()
    back = declared_document(to_declaration(document))
    assert back is not None
    assert declared(back) == declared(document)


def test_runtime_fields_are_only_in_status() -> None:
    told = plain(model_document(some_model(), instance_of(some_model(), some_runner())))
    assert set(told) - {"status"} == {
        "kind", "name", "poolName", "runner", "operations", "contextTokens", "digest", "remote", "wake",
        "skills",
    }  # fmt: skip


def test_defaults_are_omitted_from_yaml_and_kept_in_json() -> None:
    document = parse_document({"kind": "model", "name": "m"})
    assert yaml_text(declared(document)) == "kind: model\nname: m\n"
    assert plain(document)["operations"] == ["chat", "completion"]


def test_unset_fields_are_omitted_from_json() -> None:
    assert "poolName" not in plain(parse_document({"kind": "model", "name": "m"}))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_text_round_trips_through_yaml(text: str) -> None:
    document = new_document(ResourceKind.AGENT, agent_pb2.AgentManifest(name="a", model="m", system_prompt=text))
    (read,) = yaml_documents(yaml_text(declared(document)))
    assert read is not None
    assert read.value.get("systemPrompt", "") == text


def test_long_prompt_is_a_yaml_block() -> None:
    document = parse_document({"kind": "agent", "name": "a", "model": "m", "systemPrompt": "One.\nTwo."})
    assert "systemPrompt: |-\n  One.\n  Two.\n" in yaml_text(declared(document))


def test_agent_parameters_keep_openai_api_names() -> None:
    params = plain(observed_document(ResourceKind.AGENT, some_agent()))["defaultParams"]
    assert {"max_tokens", "temperature", "top_p", "logit_bias"} <= set(params)
    assert params["top_k"] == 0, "zero is a value, not absence"


@pytest.mark.parametrize(
    ("target", "accepted"),
    [({"model": "m"}, True), ({"pool": "p"}, True), ({}, False), ({"model": "m", "pool": "p"}, False)],
)
def test_agent_pins_exactly_one_of_model_and_pool(target: dict[str, str], accepted: bool) -> None:
    value = {"kind": "agent", "name": "a", **target}
    if accepted:
        parse_document(value)
        return
    with pytest.raises(FieldError, match="exactly one of model and pool"):
        parse_document(value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../etc/passwd"),
        ("name", "a" * 129),
        ("name", "über all"),
        ("name", 7),
        ("contextTokens", -1),
        ("contextTokens", 2**31),
        ("contextTokens", float("nan")),
        ("contextTokens", True),
        ("operations[1]", ["chat", "dance"]),
        ("operations", []),
        ("digest", "sha256:zz"),
        ("remote", "yes"),
        ("wake.maxWaitSeconds", {"byRunner": True, "maxWaitSeconds": float("inf")}),
        ("wake.maxWaitSeconds", {"byRunner": True, "maxWaitSeconds": 3601}),
        ("wake.byMesh.url", {"byMesh": {"type": "http", "url": "file:///etc/passwd"}}),
        ("wake.byMesh.argv", {"byMesh": {"type": "command", "argv": []}}),
        ("wake.byMesh.macAddress", {"byMesh": {"type": "wake_on_lan", "macAddress": "nope"}}),
        ("wake.byMesh.broadcastAddress",
         {"byMesh": {"type": "wake_on_lan", "macAddress": "00:11:22:33:44:55", "broadcastAddress": "x"}}),
        ("wake.byMesh", {"byMesh": {"type": "prayer"}}),
        ("wake", {}),
        ("runnner", "r1"),
        ("pool_nam", "p"),
    ],
)  # fmt: skip
def test_invalid_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(FieldError) as refused:
        parse_document({"kind": "model", "name": "m", re.split(r"[.\[]", field)[0]: value})
    assert refused.value.field == field


def test_error_does_not_repeat_secrets() -> None:
    recipe = {"type": "http", "url": "http://user:s3cret@x", "headers": {"Authorization": "s3cret"}, "method": "STEAL"}
    with pytest.raises(FieldError) as refused:
        parse_document({"kind": "model", "name": "m", "wake": {"byMesh": recipe}})
    assert "s3cret" not in str(refused.value)


def test_repr_does_not_show_secrets() -> None:
    assert "10.0.0.1" not in repr(model_document(some_model()))
    assert "WEFT_WAKE" not in repr(model_document(some_model()))


def test_single_odd_row_does_not_break_a_list() -> None:
    agent = some_agent()
    agent.manifest.default_params.temperature = 99.0
    assert plain(observed_document(ResourceKind.AGENT, agent))["defaultParams"]["temperature"] == 99.0


def test_enum_values_of_a_newer_version_are_unknown_and_not_an_error() -> None:
    model = some_model(status=97, kind=98)
    status = plain(model_document(model))["status"]
    assert (status["state"], status["kind"]) == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("words", "list_kind"),
    [
        ("model models llm LLMS", "ModelList"),
        ("Agent agents", "AgentList"),
        ("runner runners", "RunnerList"),
        ("pool pools", "PoolList"),
        ("route routes Route ROUTES", "RouteList"),
    ],
)
def test_kinds_have_a_singular_and_a_plural(words: str, list_kind: str) -> None:
    assert {parse_kind(word).list_kind for word in words.split()} == {list_kind}


def test_unknown_kind_error_lists_the_available_ones() -> None:
    with pytest.raises(FieldError, match="models, agents, runners, pools"):
        parse_kind("gpu")


def _ready(document: AnyDocument) -> tuple[str, str]:
    (ready,) = [one for one in document.conditions if one.type == "Ready"]
    return ready.status, ready.reason


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("READY", ("True", "TakesRequests")),
        ("LOADING", ("False", "Loading")),
        ("CRASH_LOOP", ("False", "CrashLoop")),
        ("FAILED", ("False", "Failed")),
        ("DRAINING", ("False", "Draining")),
    ],
)
def test_model_readiness_follows_its_instance(phase: str, expected: tuple[str, str]) -> None:
    document = model_document(some_model(), instance_of(some_model(), some_runner(phase=phase)))
    assert _ready(document) == expected
    if expected[0] == "False":
        assert document.conditions[-1].message.endswith(": why"), "the detail is told"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (some_model(status=model_pb2.Model.STATUS_HIBERNATING), ("False", "Hibernating")),
        (some_model(status=model_pb2.Model.STATUS_INACTIVE), ("False", "RunnerGone")),
    ],
)
def test_inactive_model_is_not_ready(model: model_pb2.Model, expected: tuple[str, str]) -> None:
    assert _ready(model_document(model, instance_of(model, some_runner()))) == expected


def test_model_its_runner_cannot_serve_is_not_ready_even_without_an_instance() -> None:
    failed = some_model(status=model_pb2.Model.STATUS_FAILED)
    assert _ready(model_document(failed)) == ("False", "Failed")
    assert model_document(failed).state == "failed"
    assert _ready(model_document(failed, instance_of(failed, some_runner(phase="CRASH_LOOP")))) == (
        "False",
        "CrashLoop",
    )


@pytest.mark.parametrize("phase", ["CRASH_LOOP", "FAILED"])
def test_runner_without_a_usable_model_is_not_ready(phase: str) -> None:
    """`describe runner` said that it takes requests."""
    runner = some_runner(phase=phase)
    assert _ready(runner_document(runner)) == ("False", "NoUsableModel")
    assert runner_document(runner).conditions[-1].message == "qwen cannot be used: why"
    runner.capability.instances.add(model="other", phase=runner_pb2.InstanceState.PHASE_HIBERNATING)
    assert _ready(runner_document(runner)) == ("True", "TakesRequests")
    runner.capability.instances[1].phase = runner_pb2.InstanceState.PHASE_FAILED
    assert runner_document(runner).conditions[-1].message == "none of its 2 models can be used; qwen: why"


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        ("the server has no model llama; it has llama3.2:3b (set upstream_model)", "ModelNotListed"),
        ("no such device", "Failed"),
    ],
)
def test_model_not_listed_by_its_server_is_not_ready_with_that_reason(detail: str, reason: str) -> None:
    instance = runner_pb2.InstanceState(phase=runner_pb2.InstanceState.PHASE_FAILED, slots_total=4, detail=detail)
    document = model_document(some_model(status=model_pb2.Model.STATUS_FAILED), instance)
    assert _ready(document) == ("False", reason)
    assert detail in document.conditions[-1].message


def test_model_without_a_runner_reports_it() -> None:
    model = some_model(status=model_pb2.Model.STATUS_INACTIVE)
    model.runner = ""
    assert _ready(model_document(model)) == ("False", "NoRunner")


def test_instance_of_another_runner_is_not_used_for_the_model() -> None:
    document = model_document(some_model(), instance_of(some_model(), some_runner("r2")))
    assert document.instance is None


def test_agent_runner_and_pool_conditions_follow_their_status() -> None:
    agent = some_agent()
    assert _ready(observed_document(ResourceKind.AGENT, agent)) == ("True", "Active")
    agent.status = agent_pb2.Agent.STATUS_INACTIVE
    assert _ready(observed_document(ResourceKind.AGENT, agent)) == ("False", "TargetInactive")
    assert _ready(runner_document(some_runner())) == ("True", "TakesRequests")
    assert _ready(runner_document(some_runner(status=runner_pb2.Runner.STATUS_INACTIVE))) == ("False", "Gone")
    pool = some_pool()
    assert _ready(pool_document(pool)) == ("True", "Active")
    pool.active_count = 0
    assert _ready(pool_document(pool)) == ("False", "NoActiveMember")


def test_runner_with_clock_skew_reports_it_and_is_not_ready_beyond_the_bound() -> None:
    runner = some_runner()
    runner.capability.clock_offset.FromSeconds(-30)
    document = runner_document(runner)
    assert _ready(document) == ("True", "TakesRequests")
    assert document.conditions[-1].message == "it takes requests; its clock is 30 s behind the mesh's"
    assert plain(document)["status"]["clockOffsetSeconds"] == -30.0
    runner.capability.clock_refused = True
    refused = runner_document(runner)
    assert _ready(refused) == ("False", "ClockOff")
    assert "30 s behind the mesh's, more than is allowed" in (refused.conditions[-1].message or "")


def test_event_is_rendered_as_text() -> None:
    told = document_of(some_event())
    assert (told["resourceKind"], told["resourceName"], told["reason"]) == ("model", "qwen", "woke")
    assert told["time"] == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize(
    ("snake", "camel"),
    [
        ({"pool_name": "p", "context_tokens": 7}, {"poolName": "p", "contextTokens": 7}),
        (
            {"wake": {"by_runner": True, "max_wait_seconds": 9}},
            {"wake": {"byRunner": True, "maxWaitSeconds": 9}},
        ),
        (
            {"wake": {"by_mesh": {"type": "wake_on_lan", "mac_address": "00:11:22:33:44:55"}}},
            {"wake": {"byMesh": {"type": "wake_on_lan", "macAddress": "00:11:22:33:44:55"}}},
        ),
    ],
)
def test_names_may_use_either_spelling(snake: dict[str, object], camel: dict[str, object]) -> None:
    read, same = (parse_document({"kind": "model", "name": "m", **fields}) for fields in (snake, camel))
    assert read == same
    assert declared(read) == {"kind": "model", "name": "m", **camel}, "and they are printed in one of them"


def test_agent_parameters_may_use_either_spelling_too() -> None:
    value = {"kind": "agent", "name": "a", "model": "m", "defaultParams": {"maxTokens": 7, "top_p": 0.5}}
    assert declared(parse_document(value))["defaultParams"] == {"max_tokens": 7, "top_p": 0.5}


def test_field_in_both_spellings_is_refused() -> None:
    with pytest.raises(FieldError, match="poolName: is set twice, also as pool_name"):
        parse_document({"kind": "model", "name": "m", "pool_name": "p", "poolName": "p"})


def test_unknown_word_error_lists_the_available_ones() -> None:
    with pytest.raises(FieldError, match=r"operations\[0\]: must be one of chat, completion, embedding"):
        parse_document({"kind": "model", "name": "m", "operations": ["dance"]})
    with pytest.raises(FieldError, match="repetition: must be one of off, warn, kill"):
        parse_document({"kind": "agent", "name": "a", "model": "m", "repetition": "stop"})


@pytest.mark.parametrize(
    ("document", "same"),
    [
        (
            {"kind": "model", "name": "über/模型", "poolName": "über/all"},
            {"kind": "model", "name": "xn--ber-goa/xn--xgs754b", "poolName": "xn--ber-goa/all"},
        ),
        ({"kind": "agent", "name": "a", "model": "über/m"}, {"kind": "agent", "name": "a", "model": "xn--ber-goa/m"}),
        (
            {"kind": "route", "name": "r", "candidates": ["über/m"]},
            {"kind": "route", "name": "r", "candidates": ["xn--ber-goa/m"]},
        ),
        # The first letter is Cyrillic: no two names look alike.
        ({"kind": "model", "name": "аpple"}, {"kind": "model", "name": "xn--pple-43d"}),  # noqa: RUF001
    ],
)
def test_model_names_in_any_letters_are_declared_in_ascii(document: dict[str, object], same: dict[str, object]) -> None:
    assert to_declaration(parse_document(document)) == to_declaration(parse_document(same))


def test_alias_may_lead_to_a_model_in_any_letters() -> None:
    manifest = AliasManifest(name="a", target="über/m")
    check_alias(manifest, "alias")
    assert manifest.target == "xn--ber-goa/m"
