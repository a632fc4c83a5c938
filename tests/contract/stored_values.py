"""Values to store, each with every field set to something that a careless store would lose."""

from datetime import UTC, datetime, timedelta, timezone

from registry_svc.mesh.domain import (
    AgentBehaviour,
    AgentManifest,
    AgentPublication,
    DeclaredAgent,
    DeclaredModel,
    DeclaredRoute,
    JoinToken,
    Manifest,
    MeshSettings,
    Publication,
    Repetition,
    RouteManifest,
    RunnerProfile,
    Session,
    Standing,
)
from registry_svc.mesh.rows import StoredPulse, StoredSession
from weft.kernel.request import Operation, Skill
from weft.wake.recipes import CommandRecipe, HttpRecipe, WakePlan

NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
YESTERDAY = NOW - timedelta(days=1)
ELSEWHERE = timezone(timedelta(hours=5, minutes=30))
WORDS = "Zeile eins\n\tzwei — 日本語 🧶 'quoted' \"twice\" %s :name \\ end"
LONGEST_PROMPT = ("日本語🧶" * 16_384)[:65_536]

BEHAVIOUR = AgentBehaviour(
    platform_prompt=True,
    tools=("files.read", "search"),
    max_tool_iterations=0,
    signals=("NEEDS_EXTERNAL_INFO", "POLICY_RISK"),
    stop_on_decision_request=False,
    repetition=Repetition.OFF,
    parse_text_tool_calls=False,
)


def manifest(name: str, wake: WakePlan | None = None) -> Manifest:
    return Manifest(
        name=name,
        pool_name="pool",
        operations=(Operation.CHAT, Operation.EMBEDDING),
        context_tokens=2**31 - 1,
        digest="sha256:" + "0a" * 32,
        remote=True,
        wake=wake,
        skills=(Skill.TEXT, Skill.IMAGE, Skill.TOOLS),
    )


def publication(name: str, runner: str = "r1", wake: WakePlan | None = None) -> Publication:
    return Publication(manifest=manifest(name, wake), runner=runner, created_at=YESTERDAY)


def agent_manifest(name: str, target: str = "m1") -> AgentManifest:
    return AgentManifest(
        name=name,
        target=target,
        targets_pool=True,
        description=WORDS,
        system_prompt=WORDS,
        default_params='{"temperature": 0.2}',
        behaviour=BEHAVIOUR,
    )


def agent(name: str, runner: str = "r1", target: str = "m1") -> AgentPublication:
    return AgentPublication(manifest=agent_manifest(name, target), runner=runner, created_at=YESTERDAY)


def stored(
    session_id: str = "s1", runner: str = "r1", models: tuple[str, ...] = ("m1", "m2"), agents: tuple[str, ...] = ()
) -> StoredSession:
    return StoredSession(
        session=Session(
            id=session_id, request_id="open-1", runner=runner, incarnation="life-1", ticket_key=bytes(range(32))
        ),
        profile=RunnerProfile(
            name=runner,
            incarnation="life-1",
            address="a:1#runner=r",
            host="hôst",
            runtime="f",
            version="1",
            dial_out=True,
        ),
        pulse=StoredPulse(runner=runner, standing=Standing.ACTIVE, last_heartbeat_at=NOW, inactive_since=None),
        publications=tuple(publication(name, runner) for name in models),
        agents=tuple(agent(name, runner) for name in agents),
    )


def declared_model(name: str, runner: str = "not-there-yet") -> DeclaredModel:
    recipe = HttpRecipe(url="https://host/wake?ü=1", method="PUT", headers={"Authorization": "Bearer ${WEFT_WAKE_X}"})
    plan = WakePlan(by_runner=True, by_mesh=recipe, max_wait_seconds=12.5)
    return DeclaredModel(manifest=manifest(name, plan), runner=runner, created_at=YESTERDAY)


def declared_agent(name: str, target: str = "m1") -> DeclaredAgent:
    return DeclaredAgent(manifest=agent_manifest(name, target), created_at=YESTERDAY)


def declared_route(name: str, *candidates: str) -> DeclaredRoute:
    manifest = RouteManifest(
        name=name,
        description=WORDS,
        candidates=candidates or ("m1", "b.1:x_y-Z"),
        budget_seconds=90.5,
        keep_alive_seconds=-1.0,
        pin_primary=True,
    )
    return DeclaredRoute(manifest=manifest, created_at=YESTERDAY)


def mesh_settings(revision: int = 2**40) -> MeshSettings:
    return MeshSettings(allow_cloud_fallback=revision % 2 == 0, revision=revision)


def join_token(token_id: str, expires_at: datetime | None = NOW) -> JoinToken:
    return JoinToken(
        id=token_id, description=WORDS, secret_sha256="5e" * 32, created_at=YESTERDAY, expires_at=expires_at
    )


def waking(argv: tuple[str, ...] = ("wake", "--now")) -> WakePlan:
    return WakePlan(by_runner=False, by_mesh=CommandRecipe(argv=argv), max_wait_seconds=90.0)
