"""Properties: whatever the list of a followed server contains, the runner's other models are published."""

import math

from hypothesis import given
from hypothesis import strategies as st

from registry_svc.mesh.requests import valid_heartbeat, valid_opening
from registry_svc.registry_config import RegistryConfig
from runner_svc.policy.followed_models import FollowedList, is_usable
from weft.api.registry.v1 import agent_pb2, model_pb2, runner_pb2
from weft.api.registry.v1.runner_session_service_pb2 import HeartbeatRequest, OpenSessionRequest
from weft.documents.left_out import MAX_LEFT_OUT, bounded
from weft.kernel.schemas.field_rules import check_rules
from weft.kernel.values.names import CENTRAL_RUNNER, is_model_name

MOST = 8
CONFIG = RegistryConfig(database_url="sqlite://", max_models_per_session=MOST, max_agents_per_session=4)
RUNNER, AGENT, GOOD = "box", "helper", "good"
HOSTILE = st.one_of(
    st.sampled_from(
        [
            RUNNER,
            AGENT,
            GOOD,
            "auto",
            "agent/helper",
            "route/r",
            "workflow/w",
            CENTRAL_RUNNER,
            "model-0123456789abcdef01234567",
            "",
            " ",
            "bad\x00name",
            "\x1b[31mred",
            "a\nb",
            "../../etc/passwd",
            "x" * 513,
            "y" * 100_000,
            "qwen",
            "qwen.gguf",
            "/models/qwen.gguf",
            "Qwen/qwen:latest",
            "\u202eevil",
            "\u540d\u524d",
        ]
    ),
    st.text(max_size=40),
)


def _opening(names: list[str], agents: list[str], upstreams: list[str]) -> OpenSessionRequest:
    chat = [model_pb2.MODEL_OPERATION_CHAT]
    models = [model_pb2.ModelManifest(name=GOOD, operations=chat)]
    models += [
        model_pb2.ModelManifest(name=name, operations=chat, upstream=upstream)
        for name, upstream in zip(names, upstreams, strict=True)
    ]
    runner = runner_pb2.Runner(name=RUNNER, incarnation="life-1", address="unix:/r")
    published = [agent_pb2.AgentManifest(name=name, model=GOOD) for name in [AGENT, *agents]]
    return OpenSessionRequest(request_id="open-1", runner=runner, models=models, agents=published)


@given(st.lists(st.tuples(HOSTILE, HOSTILE), max_size=MOST + 4), st.lists(HOSTILE, max_size=6))
def test_every_hostile_item_is_published_or_left_out_and_the_good_one_is_published(
    items: list[tuple[str, str]], agents: list[str]
) -> None:
    request = _opening([name for name, _ in items], agents, [upstream for _, upstream in items])
    removed = valid_opening(request, CONFIG)
    check_rules(request)
    assert request.models[0].name == GOOD
    assert len(request.models) + len(request.agents) + len(removed) == len(items) + len(agents) + 2
    names = [model.name for model in request.models] + [agent.name for agent in request.agents]
    assert len(set(names)) == len(names) <= MOST + 4
    assert RUNNER not in names
    for item in bounded(removed):
        check_rules(item)
        assert item.message


@given(
    st.lists(
        st.tuples(HOSTILE, HOSTILE, st.floats(allow_nan=True), st.integers(-(2**31), 2**31 - 1), st.integers(-1, 99)),
        max_size=MOST + 4,
    ),
    st.lists(HOSTILE, max_size=40),
)
def test_hostile_report_never_refuses_a_heartbeat(
    states: list[tuple[str, str, float, int, int]], tools: list[str]
) -> None:
    report = runner_pb2.Capability(tool_names=tools)
    report.instances.add(model=GOOD, phase=runner_pb2.InstanceState.PHASE_READY, slots_total=4)
    for name, detail, progress, slots, phase in states:
        state = report.instances.add(model=name, detail=detail, load_progress=progress, slots_total=slots)
        state.phase = phase  # type: ignore[assignment]  # as it comes from the wire
        state.memory.estimate_source = detail
    report.labels[GOOD] = "x"
    report.followed_servers.add(name="server")
    report.followed_servers.add(name="not\x00one")
    beat = HeartbeatRequest(session_id="s", incarnation="i", sequence=1, capability=report)
    valid_heartbeat(beat, CONFIG)
    check_rules(beat)
    assert beat.capability.instances[0].model == GOOD
    assert beat.capability.instances[0].slots_total == 4
    assert [server.name for server in beat.capability.followed_servers] == ["server"]
    assert not any(math.isnan(state.load_progress) for state in beat.capability.instances)


@given(st.lists(HOSTILE, max_size=40), st.sets(HOSTILE, max_size=4))
def test_followed_list_yields_names_that_the_registry_takes(listed: list[str], taken: set[str]) -> None:
    followed = FollowedList(server="srv", most=MOST - 1)
    reserved = {RUNNER, AGENT, GOOD}
    followed.step(listed, reserved.__contains__)
    for _ in range(3):
        lost = followed.note_taken({model.name for model in followed.served} & taken)
        followed.step(listed, reserved.__contains__)
        if not lost:
            break
    served = followed.served
    request = _opening([model.name for model in served], [], [model.upstream for model in served])
    assert valid_opening(request, CONFIG) == []
    assert len(served) == min(MOST - 1, sum(map(is_usable, set(listed))))
    assert not {model.name for model in served} & (taken | reserved)
    assert all(is_model_name(model.name) for model in served)


def test_list_of_left_out_items_is_bounded_and_counts_the_others() -> None:
    request = _opening([f"bad {number}" for number in range(200)], [], [""] * 200)
    items = bounded(valid_opening(request, CONFIG))
    assert len(items) == MAX_LEFT_OUT
    assert items[-1].message.startswith("and 137 more")
