"""A router that serves one runner alone sees nothing of the others."""

from kit.fleet import model_view, runner_view

from router_svc.fleet_view import view_of_runner
from weft.api.registry.v1.agent_pb2 import Agent, AgentManifest
from weft.dispatch.fleet import FleetView, ModelView, RunnerView


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
