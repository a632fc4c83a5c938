"""From the registry's view to candidates."""

from typing import Any

import pytest
from google.protobuf import duration_pb2, timestamp_pb2
from kit.fleet import model_view, ready, runner_view
from kit.recipes import packet_recipe, wake_plan

from router_svc.fleet_view import candidate_of, view_of_runner
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.engine_load import EngineFigures
from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.api.registry.v1.agent_pb2 import Agent, AgentManifest
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import FleetView, ModelView, RunnerView
from weft.kernel.requests.capabilities import ThinkingMode
from weft.kernel.requests.request_values import Skill

MESH = wake_plan(by_runner=False, by_mesh=packet_recipe(mac_address="02:00:00:00:00:01"), max_wait_seconds=90.0)

RUNNER = wake_plan(by_runner=True, max_wait_seconds=30.0)


def the_candidate(
    *,
    phase: "InstanceState.Phase.ValueType | None" = InstanceState.PHASE_READY,
    runner: dict[str, Any] | None,
    **model: Any,
) -> Candidate:
    """The candidate of a model "m" on a runner "r" with these properties, or with none at all."""
    instances = {} if phase is None else {"m": ready("m", 4, phase=phase)}
    runners = {} if runner is None else {"r": runner_view("r", **{"instances": instances, **runner})}
    shown = model_view("m", "" if runner is None else "r", **model)
    return candidate_of(FleetView(1, runners, {"m": shown}), shown)


GONE = {"active": False}

SLEEPS = {"active": False, "hibernating": True}

INACTIVE = {"active": False}


@pytest.mark.parametrize(
    ("phase", "runner", "model", "expected"),
    [
        (InstanceState.PHASE_READY, {}, {}, Readiness.READY),
        (InstanceState.PHASE_HIBERNATING, {}, {**SLEEPS, "wake": RUNNER}, Readiness.ASLEEP),
        # The runner's report is newer than what the registry made of it, or the other way round.
        (InstanceState.PHASE_READY, {}, {**SLEEPS, "wake": RUNNER}, Readiness.READY),
        (InstanceState.PHASE_HIBERNATING, {}, {"wake": RUNNER}, Readiness.ASLEEP),
        # Unloaded by hand.
        (InstanceState.PHASE_HIBERNATING, {}, SLEEPS, Readiness.ASLEEP),
        (InstanceState.PHASE_HIBERNATING, {"draining": True}, {**SLEEPS, "wake": RUNNER}, Readiness.DOWN),
        (InstanceState.PHASE_READY, GONE, {**SLEEPS, "wake": MESH}, Readiness.ASLEEP),
        (InstanceState.PHASE_READY, GONE, {"wake": MESH}, Readiness.ASLEEP),
        (None, None, {**SLEEPS, "wake": MESH}, Readiness.ASLEEP),
        (None, {}, {**SLEEPS, "wake": MESH}, Readiness.LOADING),
        (InstanceState.PHASE_READY, GONE, {**SLEEPS, "wake": RUNNER}, Readiness.DOWN),
        (InstanceState.PHASE_READY, GONE, {**INACTIVE, "wake": MESH}, Readiness.DOWN),
        (None, None, INACTIVE, Readiness.DOWN),
        (InstanceState.PHASE_READY, {}, INACTIVE, Readiness.DOWN),
    ],
)
def test_readiness_combines_runner_and_registry_state(
    phase: "InstanceState.Phase.ValueType | None",
    runner: dict[str, Any] | None,
    model: dict[str, Any],
    expected: Readiness,
) -> None:
    assert the_candidate(phase=phase, runner=runner, **model).readiness is expected


def test_candidate_has_its_runner_limit_and_the_longest_wake_time() -> None:
    found = the_candidate(phase=InstanceState.PHASE_HIBERNATING, runner={"max_requests": 3}, **SLEEPS, wake=RUNNER)
    assert (found.runner_max_requests, found.max_wake_seconds, found.slots) == (3, 30.0, 4)


def test_model_without_a_runner_is_a_candidate_that_is_down() -> None:
    found = the_candidate(phase=None, runner=None, **INACTIVE)
    assert (found.incarnation, found.slots, found.detail) == ("", 0, "no heartbeat")


def test_candidate_has_known_load_memory_and_tool_facts() -> None:
    instance = ready("m", 4, phase=InstanceState.PHASE_HIBERNATING)
    instance.MergeFrom(
        InstanceState(
            memory=runner_pb2.InstanceMemory(estimated_bytes=6 << 30),
            usual_load=duration_pb2.Duration(seconds=47),
            pinned=True,
            context_tokens=4096,
            load_eta=duration_pb2.Duration(seconds=3),
        )
    )
    tools = frozenset({"files.read"})
    found = the_candidate(
        phase=None,
        runner={"instances": {"m": instance}, "host": "box", "tool_names": tools},
        context_tokens=1024,
        skills=frozenset({Skill.IMAGE}),
    )
    assert (found.host, found.memory_bytes, found.usual_load_seconds) == ("box", 6 << 30, 47.0)
    assert (found.pinned, found.tools, found.context_tokens) == (True, tools, 4096)
    assert (found.load_eta_seconds, found.skills) == (3.0, frozenset({Skill.IMAGE}))


def test_candidate_memory_comes_from_its_lease_if_there_is_one() -> None:
    instance = ready("m", 4)
    instance.memory.CopyFrom(runner_pb2.InstanceMemory(leased_bytes=5 << 30, estimated_bytes=6 << 30))
    assert the_candidate(phase=None, runner={"instances": {"m": instance}}).memory_bytes == 5 << 30
    assert the_candidate(runner={}, context_tokens=1024).memory_bytes == 0
    assert the_candidate(runner={}, context_tokens=1024).context_tokens == 1024


def test_runner_with_excessive_clock_skew_is_down_and_reports_the_skew() -> None:
    candidate = the_candidate(runner={"clock_refused": True, "clock_offset_seconds": -600.0})
    assert (candidate.readiness, candidate.clock_refused) == (Readiness.DOWN, True)
    assert candidate.detail.startswith("its clock is 600 s behind the mesh's, more than is allowed")
    within = the_candidate(runner={"clock_offset_seconds": 30.0})
    assert (within.readiness, within.clock_refused) == (Readiness.READY, False)


def test_candidate_may_be_tried_for_skills_not_reported_as_missing() -> None:
    instance = ready("m", 4)
    instance.abilities.skills.append(model_pb2.MODEL_SKILL_TEXT)
    instance.abilities.lacking.extend([model_pb2.MODEL_SKILL_IMAGE, model_pb2.MODEL_SKILL_AUDIO])
    instance.abilities.thinking_modes.append(model_pb2.THINKING_MODE_DEFAULT)
    found = the_candidate(phase=None, runner={"instances": {"m": instance}})
    assert found.skills == frozenset({Skill.TEXT, Skill.TOOLS}), "of tools nothing is known, so they are tried"
    assert found.thinking_modes == {ThinkingMode.DEFAULT}
    silent = the_candidate(phase=None, runner={"instances": {"m": ready("m", 4)}})
    assert (silent.skills, silent.thinking_modes) == (None, frozenset())


def _with_load(**load: Any) -> Candidate:
    instance = ready("m", 4)
    instance.engine_load.CopyFrom(runner_pb2.EngineLoad(**load))
    return the_candidate(phase=None, runner={"instances": {"m": instance}})


def test_figures_of_a_busy_engine_reach_the_candidate() -> None:
    sampled = timestamp_pb2.Timestamp(seconds=1_000)
    found = _with_load(running_count=6, waiting_count=2, other_count=3, kv_cache_share=0.5, sample_time=sampled)
    assert found.engine == EngineFigures(sampled_at=1_000.0, running=6, waiting=2, others=3, cache_share=0.5)
    assert _with_load(running_count=1, sample_time=sampled).engine == EngineFigures(sampled_at=1_000.0, running=1)


def test_figures_without_a_sample_time_are_ignored() -> None:
    assert _with_load(waiting_count=2, kv_cache_share=0.99).engine is None
    assert the_candidate(runner={}).engine is None


def model(name: str, runner: str, pool: str = "") -> ModelView:
    return model_view(name, runner, pool=pool or name)


def runner(name: str) -> RunnerView:
    return runner_view(name, incarnation=f"{name}-1")


def agent(name: str, target: str, *, targets_pool: bool = False) -> Agent:
    if targets_pool:
        return Agent(manifest=AgentManifest(name=name, pool=target))
    return Agent(manifest=AgentManifest(name=name, model=target))


def named(*views: ModelView | RunnerView | Agent) -> dict[str, object]:
    return {view.manifest.name if isinstance(view, Agent) else view.name: view for view in views}


FLEET = FleetView(
    7,
    named(runner("a"), runner("b")),  # type: ignore[arg-type]
    named(model("m1", "a", "shared"), model("m2", "b", "shared"), model("m3", "b"), model("m4", "")),  # type: ignore[arg-type]
    named(agent("here", "m1"), agent("pooled", "shared", targets_pool=True), agent("there", "m3")),  # type: ignore[arg-type]
)


def test_view_contains_only_the_runners_own_models_and_agents() -> None:
    view = view_of_runner(FLEET, "a")
    assert (view.revision, set(view.runners), set(view.models)) == (7, {"a"}, {"m1"})
    assert set(view.agents) == {"here", "pooled"}


def test_pool_contains_its_local_members() -> None:
    assert [member.name for member in view_of_runner(FLEET, "b").pool_members("shared")] == ["m2"]


def test_offline_runner_serves_no_models() -> None:
    view = view_of_runner(FLEET, "c")
    assert (view.revision, dict(view.runners), dict(view.models), dict(view.agents)) == (7, {}, {}, {})
