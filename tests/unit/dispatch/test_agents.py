"""What a request for an agent becomes."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from kit.messages import changed

from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, sampling_pb2
from weft.api.registry.v1 import agent_pb2
from weft.dispatch.agents import agent_name_of, members_of, require_model_name, resolve, with_agent
from weft.dispatch.fleet import FleetView, ModelView
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation

SINGLE_PARAMETERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
)


def _model(name: str, pool: str = "") -> ModelView:
    return ModelView(
        name=name,
        pool=pool or name,
        runner="r",
        operations=frozenset(Operation),
        remote=False,
        active=True,
        context_tokens=0,
        created_at_seconds=0,
    )


def _agent(name: str = "coder", target: str = "m", *, pool: bool = False, prompt: str = "Be terse.") -> agent_pb2.Agent:
    defaults = sampling_pb2.SamplingParams(temperature=0.2, stop=["END"])
    manifest = agent_pb2.AgentManifest(name=name, system_prompt=prompt, default_params=defaults)
    if pool:
        manifest.pool = target
    else:
        manifest.model = target
    return agent_pb2.Agent(manifest=manifest)


def _view(*agents: agent_pb2.Agent, models: tuple[ModelView, ...] = (_model("m"),)) -> FleetView:
    return FleetView(1, {}, {model.name: model for model in models}, {agent.manifest.name: agent for agent in agents})


def _context(model: str, operation: Operation = Operation.CHAT) -> RequestContext:
    return RequestContext(request_id="r1", tenant="t", model=model, operation=operation, traceparent="")


def _conversation(*turns: tuple[chat_pb2.Role.ValueType, str]) -> chat_pb2.ChatPayload:
    payload = chat_pb2.ChatPayload()
    for role, text in turns:
        payload.messages.add(role=role).content.add(text=text)
    return payload


def _turns(payload: chat_pb2.ChatPayload) -> list[tuple[int, str]]:
    return [(message.role, message.content[0].text) for message in payload.messages]


USER = (chat_pb2.ROLE_USER, "Hi")


def test_agent_behavior_is_sent_beside_the_payload_and_not_in_it() -> None:
    behaviour = agent_behaviour_pb2.AgentBehaviour(tools=["files.read"], platform_prompt=True)
    asking = changed(_agent(), manifest=changed(_agent().manifest, behaviour=behaviour))
    found = resolve(_view(asking), _context("agent/coder"), _conversation(USER))
    plain = resolve(_view(_agent()), _context("agent/coder"), _conversation(USER))
    assert found is not None
    assert plain is not None
    assert (found.behaviour, plain.behaviour) == (behaviour, None)
    assert found.payload == plain.payload


def test_model_request_is_unchanged() -> None:
    assert agent_name_of("coder") is None
    assert resolve(_view(_agent()), _context("coder"), _conversation(USER)) is None


def test_agent_resolves_to_its_model_with_its_prompt_first_and_its_defaults() -> None:
    found = resolve(_view(_agent()), _context("agent/coder"), _conversation((chat_pb2.ROLE_SYSTEM, "Mine."), USER))
    assert found is not None
    assert (found.context.model, found.context.agent, found.context.request_id) == ("m", "coder", "r1")
    assert _turns(found.payload) == [
        (chat_pb2.ROLE_SYSTEM, "Be terse."),
        (chat_pb2.ROLE_SYSTEM, "Mine."),
        USER,
    ]
    assert found.payload.sampling.temperature == 0.2
    assert list(found.payload.sampling.stop) == ["END"]


def test_agent_without_a_prompt_adds_no_message() -> None:
    assert _turns(with_agent(_conversation(USER), _agent(prompt="").manifest)[0]) == [USER]


def test_rest_of_the_payload_is_unchanged() -> None:
    payload = _conversation(USER)
    payload.choice_count = 2
    payload.tools.add().function.name = "weather"
    prepared, _ = with_agent(payload, _agent().manifest)
    assert (prepared.choice_count, prepared.tools) == (2, payload.tools)


_number = st.integers(min_value=0, max_value=2)
_params = st.builds(
    lambda single, stop, bias: sampling_pb2.SamplingParams(**single, stop=stop, logit_bias=bias),
    st.dictionaries(st.sampled_from(SINGLE_PARAMETERS), _number),
    st.lists(st.sampled_from(["a", "b"]), max_size=2),
    st.dictionaries(st.integers(min_value=0, max_value=3), _number, max_size=2),
)


@given(asked=_params, defaults=_params)
def test_defaults_never_override_caller_values(
    asked: sampling_pb2.SamplingParams, defaults: sampling_pb2.SamplingParams
) -> None:
    agent = changed(_agent().manifest, default_params=defaults)
    payload = chat_pb2.ChatPayload(sampling=asked)
    payload_before, defaults_before = (
        payload.SerializeToString(deterministic=True),
        defaults.SerializeToString(deterministic=True),
    )
    filled = with_agent(payload, agent)[0].sampling
    for name in SINGLE_PARAMETERS:
        source = asked if asked.HasField(name) else defaults  # type: ignore[arg-type]  # the names are fields
        assert filled.HasField(name) == source.HasField(name)  # type: ignore[arg-type]
        assert getattr(filled, name) == getattr(source, name)
    assert list(filled.stop) == list(asked.stop or defaults.stop)
    assert dict(filled.logit_bias) == dict(asked.logit_bias or defaults.logit_bias)
    assert (payload.SerializeToString(deterministic=True), defaults.SerializeToString(deterministic=True)) == (
        payload_before,
        defaults_before,
    )


def _refusal(view: FleetView, context: RequestContext) -> WeftError:
    with pytest.raises(WeftError) as caught:
        resolve(view, context, _conversation(USER))
    return caught.value


def test_unknown_agent_error_suggests_no_other_agents() -> None:
    error = _refusal(_view(_agent("b"), _agent("a")), _context("agent/x"))
    assert error.reason is Reason.MODEL_NOT_FOUND
    assert error.message == "there is no agent x; `weft get agents` (GET /api/v1/agents) lists what there is"
    assert error.metadata == {"unknown_kind": "agent", "unknown_name": "x", "field": "model"}


def test_unknown_agent_may_appear_before_the_first_snapshot() -> None:
    assert _refusal(FleetView(), _context("agent/x")).reason is Reason.SERVICE_UNAVAILABLE


@pytest.mark.parametrize(("pool", "noun"), [(False, "model"), (True, "pool")])
def test_agent_with_a_removed_target_names_it(pool: bool, noun: str) -> None:
    error = _refusal(_view(_agent(target="gone", pool=pool)), _context("agent/coder"))
    assert error.reason is Reason.MODEL_NOT_FOUND
    assert error.message == f"agent coder answers with {noun} gone, which is not known to the mesh"
    assert error.metadata == {"agent": "coder", "model": "gone", "field": "model"}


def test_agent_with_an_offline_runner_is_unavailable() -> None:
    error = _refusal(_view(changed(_agent(), inactive_time=Timestamp(seconds=1))), _context("agent/coder"))
    assert error.reason is Reason.NO_RUNNER_AVAILABLE
    assert error.traits.http_status == 503


@pytest.mark.parametrize("operation", [Operation.COMPLETION, Operation.EMBEDDING])
def test_agent_answers_chat_only(operation: Operation) -> None:
    error = _refusal(_view(_agent()), _context("agent/coder", operation))
    assert error.reason is Reason.UNSUPPORTED_OPERATION
    assert "chat only" in error.message


def _placed(view: FleetView) -> tuple[str, list[str]]:
    found = resolve(view, _context("agent/coder"), _conversation(USER))
    assert found is not None
    answering = sorted(model.name for model in members_of(view, view.agents["coder"]))
    assert sorted(model.name for model in view.pool_members(found.context.model)) == answering
    return found.context.model, answering


def test_model_target_includes_its_whole_pool() -> None:
    models = (_model("m", "p"), _model("n", "p"), _model("other"))
    assert _placed(_view(_agent(target="m"), models=models)) == ("m", ["m", "n"])
    assert _placed(_view(_agent(target="p", pool=True), models=models)) == ("p", ["m", "n"])


def test_agent_of_a_model_ignores_an_unrelated_pool_with_its_name() -> None:
    models = (_model("m", "p"), _model("stranger", "m"))
    assert _placed(_view(_agent(target="m"), models=models)) == ("p", ["m"])
    assert _placed(_view(_agent(target="m", pool=True), models=models)) == ("m", ["stranger"])


def test_model_does_not_answer_for_a_removed_pool_with_its_name() -> None:
    view = _view(_agent(target="m", pool=True), models=(_model("m", "p"),))
    assert _refusal(view, _context("agent/coder")).reason is Reason.MODEL_NOT_FOUND
    assert members_of(view, view.agents["coder"]) == []


@pytest.mark.parametrize("name", ["m", "a:1", "agent/coder", "agent", "Qwen/Qwen3-8B", "agents/x"])
def test_model_and_agent_names_are_accepted(name: str) -> None:
    assert require_model_name(name, "model") == name


@pytest.mark.parametrize(
    "name", ["", "agent/", "agent/agent/x", "agent/a/b", "a//b", "a/", "agent/../x", "/x", "agent/" + "a" * 129]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(WeftError, match="model: must be"):
        require_model_name(name, "model")
