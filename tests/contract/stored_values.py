"""Values to store, each with every field set to something that a careless store would lose."""

from datetime import UTC, datetime, timedelta, timezone

from kit.resource_samples import BEHAVIOUR

from registry_svc.mesh.states import JoinToken, Session, Standing
from registry_svc.mesh.store import StoredPulse, StoredSession
from weft.api.common.v1 import sampling_pb2
from weft.api.registry.v1 import agent_pb2, journal_pb2, model_pb2, route_pb2, runner_pb2, settings_pb2, tags_pb2
from weft.api.registry.v1.wake_pb2 import CommandAction, HttpAction, Wake, WakeRecipe
from weft.kernel.time.timestamps import duration_of, stamp_of

NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
YESTERDAY = NOW - timedelta(days=1)
ELSEWHERE = timezone(timedelta(hours=5, minutes=30))
WORDS = "Zeile eins\n\tzwei — 日本語 🧶 'quoted' \"twice\" %s :name \\ end"
LONGEST_PROMPT = ("日本語🧶" * 16_384)[:65_536]

TAGS = tags_pb2.Tags(tier="fast", labels={"team": "a", "zone.b": "x/y=1"}, owner="key:3k9x0a7bq2mz")


def manifest(name: str, wake: Wake | None = None) -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(
        name=name,
        pool_name="pool",
        operations=[model_pb2.MODEL_OPERATION_CHAT, model_pb2.MODEL_OPERATION_EMBEDDING],
        context_tokens=2**31 - 1,
        digest="sha256:" + "0a" * 32,
        remote=True,
        wake=wake,
        skills=[model_pb2.MODEL_SKILL_TEXT, model_pb2.MODEL_SKILL_IMAGE, model_pb2.MODEL_SKILL_TOOLS],
        tags=TAGS,
        upstream="qwen-é.gguf",
        journal=journal_pb2.JOURNAL_MODE_WAIT,
    )


def publication(name: str, runner: str = "r1", wake: Wake | None = None) -> model_pb2.Model:
    kind, created = model_pb2.Model.KIND_VIRTUAL, stamp_of(YESTERDAY)
    return model_pb2.Model(manifest=manifest(name, wake), kind=kind, runner=runner, create_time=created)


def agent_manifest(name: str, target: str = "m1") -> agent_pb2.AgentManifest:
    return agent_pb2.AgentManifest(
        name=name,
        pool=target,
        description=WORDS,
        system_prompt=WORDS,
        default_params=sampling_pb2.SamplingParams(temperature=0.2),
        behaviour=BEHAVIOUR,
        tags=TAGS,
    )


def agent(name: str, runner: str = "r1", target: str = "m1") -> agent_pb2.Agent:
    kind, created = agent_pb2.Agent.KIND_VIRTUAL, stamp_of(YESTERDAY)
    return agent_pb2.Agent(manifest=agent_manifest(name, target), kind=kind, runner=runner, create_time=created)


def stored(
    session_id: str = "s1", runner: str = "r1", models: tuple[str, ...] = ("m1", "m2"), agents: tuple[str, ...] = ()
) -> StoredSession:
    return StoredSession(
        session=Session(
            id=session_id, request_id="open-1", runner=runner, incarnation="life-1", ticket_key=bytes(range(32))
        ),
        profile=runner_pb2.Runner(
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


def declared_model(name: str, runner: str = "not-there-yet") -> model_pb2.Model:
    action = HttpAction(url="https://host/wake?ü=1", method="PUT", headers={"Authorization": "Bearer ${WEFT_WAKE_X}"})
    plan = Wake(by_runner=True, by_mesh=WakeRecipe(http=action), max_wait=duration_of(12.5))
    kind, created = model_pb2.Model.KIND_PUBLIC, stamp_of(YESTERDAY)
    return model_pb2.Model(manifest=manifest(name, plan), kind=kind, declared_runner=runner, create_time=created)


def declared_agent(name: str, target: str = "m1") -> agent_pb2.Agent:
    kind, created = agent_pb2.Agent.KIND_PUBLIC, stamp_of(YESTERDAY)
    return agent_pb2.Agent(manifest=agent_manifest(name, target), kind=kind, create_time=created)


def declared_route(name: str, *candidates: str) -> route_pb2.Route:
    manifest = route_pb2.RouteManifest(
        name=name,
        description=WORDS,
        candidates=candidates or ("m1", "b.1:x_y-Z"),
        budget=duration_of(90.5),
        keep_alive=duration_of(-1.0),
        pin_primary=True,
    )
    return route_pb2.Route(manifest=manifest, create_time=stamp_of(YESTERDAY))


def mesh_settings(revision: int = 2**40) -> settings_pb2.MeshSettings:
    return settings_pb2.MeshSettings(
        allow_cloud_fallback=revision % 2 == 0, revision=revision, journal=journal_pb2.JOURNAL_MODE_KEEP
    )


def join_token(token_id: str, expires_at: datetime | None = NOW) -> JoinToken:
    return JoinToken(
        id=token_id, description=WORDS, secret_sha256="5e" * 32, created_at=YESTERDAY, expires_at=expires_at
    )


def waking(argv: tuple[str, ...] = ("wake", "--now")) -> Wake:
    return Wake(by_mesh=WakeRecipe(command=CommandAction(argv=argv)), max_wait=duration_of(90.0))
