"""Presets: what aliases and agents change in the parameters of requests."""

from typing import Any

import pytest

from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, receipt_pb2, sampling_pb2, tokenize_pb2
from weft.api.registry.v1.agent_pb2 import Agent, AgentManifest
from weft.api.registry.v1.alias_pb2 import Alias, AliasManifest
from weft.dispatch.agents import ResolvedRequest
from weft.dispatch.aliases import asked_name, resolve_names
from weft.dispatch.fleet import FleetView, expected_model
from weft.dispatch.presets import apply_preset, changed_warning, fill_defaults
from weft.dispatch.request_receipt import RequestContext
from weft.documents.kinds import DECLARED_KINDS
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_objects import add_member

Params = sampling_pb2.SamplingParams


def preset(
    *, default: dict[str, Any] | None = None, force: dict[str, Any] | None = None, remove: tuple[str, ...] = ()
) -> AliasManifest:
    manifest = AliasManifest(name="claude", pattern="claude-*", target="m", removed_params=remove)
    if default:
        manifest.default_params.CopyFrom(Params(**default))
    if force:
        manifest.forced_params.CopyFrom(Params(**force))
    return manifest


def chat(**sampling: Any) -> chat_pb2.ChatPayload:
    return chat_pb2.ChatPayload(sampling=Params(**sampling))


def told(changed: list[receipt_pb2.ChangedParameter]) -> dict[str, str]:
    return {each.name: changed_warning(each).message for each in changed}


def test_defaults_fill_what_the_caller_does_not_set_without_a_report() -> None:
    asked = chat(temperature=0, stop=["a"])
    given = preset(default={"temperature": 0.6, "top_k": 20, "stop": ["b", "c"], "logit_bias": {3: 1}})
    assert apply_preset(asked, given, "alias/claude") == []
    assert asked.sampling == Params(temperature=0, stop=["a"], top_k=20, logit_bias={3: 1})


def test_forced_parameters_replace_those_of_the_caller_and_are_reported() -> None:
    asked = chat(temperature=1, max_tokens=9, stop=["a"], logit_bias={1: 1})
    given = preset(force={"temperature": 0.2, "max_tokens": 9, "stop": ["b"], "logit_bias": {2: 2}, "seed": 7})
    changed = apply_preset(asked, given, "alias/claude")
    assert asked.sampling == Params(temperature=0.2, max_tokens=9, stop=["b"], logit_bias={2: 2}, seed=7)
    words = "was replaced by alias/claude"
    assert told(changed) == {"temperature": words, "stop": words, "logit_bias": words}


def test_removed_parameters_are_dropped_and_reported_only_if_the_caller_sets_them() -> None:
    asked = chat(top_k=40, stop=["a"])
    changed = apply_preset(asked, preset(remove=("top_k", "stop", "seed", "thinking")), "alias/claude")
    assert asked.sampling == Params()
    assert told(changed) == dict.fromkeys(("top_k", "stop"), "was removed by alias/claude")


def test_effort_and_thinking_become_fields_of_the_chat() -> None:
    asked = chat()
    apply_preset(asked, preset(default={"thinking": True}, force={"reasoning_effort": "low"}), "")
    assert (asked.thinking, asked.reasoning_effort) == (True, chat_pb2.REASONING_EFFORT_LOW)
    assert asked.sampling == Params()


def test_thinking_in_the_arguments_of_the_template_counts_as_the_caller_s() -> None:
    for given, kept in ((preset(force={"thinking": False}), False), (preset(remove=("thinking",)), None)):
        asked = chat()
        add_member(asked.extra_parameters, "chat_template_kwargs", {"enable_thinking": True, "other": 1}, "f")
        assert list(told(apply_preset(asked, given, "alias/a"))) == ["thinking"]
        assert (asked.thinking if asked.HasField("thinking") else None) == kept
        arguments = asked.extra_parameters.fields[0].value.object_value.fields
        assert [each.name for each in arguments] == ["other"]


def test_effort_of_the_caller_also_decides_whether_a_default_turns_thinking_off() -> None:
    asked = chat_pb2.ChatPayload(reasoning_effort=chat_pb2.REASONING_EFFORT_HIGH)
    fill_defaults(asked, Params(thinking=False, reasoning_effort="low"))
    assert (asked.HasField("thinking"), asked.reasoning_effort) == (False, chat_pb2.REASONING_EFFORT_HIGH)
    silent = chat_pb2.ChatPayload(thinking=False)
    fill_defaults(silent, Params(thinking=True, reasoning_effort="low"))
    assert (silent.thinking, silent.reasoning_effort) == (False, 0)


def test_text_completions_get_the_parameters_that_they_have() -> None:
    asked = completion_pb2.CompletionPayload()
    apply_preset(asked, preset(force={"temperature": 0.2, "thinking": False, "reasoning_effort": "low"}), "")
    assert asked == completion_pb2.CompletionPayload(sampling=Params(temperature=0.2))


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        (preset(force={"temperature": 3}), "alias.forced_params.temperature", "0 to 2"),
        (preset(default={"reasoning_effort": "huge"}), "alias.default_params.reasoning_effort", "minimal"),
        (preset(remove=("temprature",)), "alias.removed_params[0]", "must be one of max_tokens, temperature"),
        (preset(remove=("priority",)), "alias.removed_params[0]", "must be one of max_tokens"),
        (preset(force={"seed": 1}, remove=("seed",)), "alias.removed_params[0]", "seed has a value here"),
        (preset(force={"seed": 1}, default={"seed": 2}), "alias.default_params.seed", "also in forced_params"),
    ],
)
def test_wrong_preset_is_refused_with_its_field_and_what_is_allowed(
    given: AliasManifest, field: str, words: str
) -> None:
    with pytest.raises(FieldError) as caught:
        DECLARED_KINDS[ResourceKind.ALIAS].check(given, "alias")
    assert caught.value.field == field
    assert words in caught.value.message


def view(*aliases: AliasManifest, agent: AgentManifest | None = None) -> FleetView:
    return FleetView(
        revision=1,
        models={"m": expected_model("m", "m", "box")},
        aliases={each.name: Alias(manifest=each) for each in aliases},
        agents={} if agent is None else {agent.name: Agent(manifest=agent)},
    )


def resolved(mesh: FleetView, asked: str, payload: Any, model: str = "m", **about: Any) -> ResolvedRequest | None:
    """What becomes of a request for a name, as a gateway or, with a `task_id`, a router makes it."""
    preset = None if "task_id" in about else asked_name(mesh, asked, "t").preset
    context = RequestContext(
        request_id="r", tenant="t", model=model, asked_model=asked, operation=Operation.CHAT, traceparent="",
        preset=preset, **about,
    )  # fmt: skip
    return resolve_names(mesh, context, payload)


def test_request_for_an_alias_gets_its_preset_and_the_caller_s_payload_stays() -> None:
    payload = chat(temperature=1)
    found = resolved(view(preset(force={"temperature": 0.2})), "claude-opus", payload)
    assert found is not None
    assert (found.payload.sampling.temperature, payload.sampling.temperature) == (0.2, 1)
    assert [(each.name, each.author) for each in found.changed] == [("temperature", "alias/claude")]


def test_alias_of_an_agent_changes_the_request_before_the_agent() -> None:
    manifest = AgentManifest(name="coder", model="m", default_params=Params(temperature=0.5, top_k=3))
    manifest.forced_params.seed = 1
    alias = preset(default={"temperature": 0.2}, force={"seed": 9})
    found = resolved(view(alias, agent=manifest), "claude-x", chat(seed=5), "agent/coder")
    assert found is not None
    assert found.payload.sampling == Params(temperature=0.2, top_k=3, seed=1)
    assert [(each.name, each.author) for each in found.changed] == [("seed", "alias/claude"), ("seed", "agent/coder")]


def test_count_of_a_prompt_has_the_preset_and_embeddings_do_not_change() -> None:
    mesh = view(preset(force={"thinking": False}))
    found = resolved(mesh, "claude-x", tokenize_pb2.TokenizePayload(chat=chat()))
    assert found is not None
    assert not found.payload.chat.thinking
    assert found.payload.chat.HasField("thinking")
    embedding = embedding_pb2.EmbeddingPayload(inputs=[completion_pb2.PromptInput(text="a")])
    other = resolved(mesh, "claude-x", embedding)
    assert other is not None
    assert other.payload == embedding
    assert not other.changed


def test_summary_of_a_conversation_is_written_without_the_preset() -> None:
    mesh = view(preset(force={"max_tokens": 5}))
    summary = resolved(mesh, "claude-x", chat(), compaction=receipt_pb2.Compaction())
    assert summary is not None
    assert summary.payload == chat()
    after = resolved(mesh, "claude-x", chat(), compaction=receipt_pb2.Compaction(pass_count=1))
    assert after is not None
    assert after.payload.sampling.max_tokens == 5


def test_request_without_a_preset_stays_as_it_is() -> None:
    assert resolved(view(preset()), "claude-x", chat()) is None
    assert resolved(view(preset(force={"seed": 1})), "m", chat()) is None


def test_task_gets_the_preset_that_its_alias_has_when_it_runs() -> None:
    for mesh, seed in ((view(preset(force={"seed": 3})), 3), (view(preset(force={"seed": 4})), 4)):
        found = resolved(mesh, "claude-x", chat(), task_id="task-1")
        assert found is not None
        assert found.payload.sampling.seed == seed
    assert resolved(view(), "claude-x", chat(), task_id="task-1") is None
