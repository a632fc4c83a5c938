"""The tables of the release before had columns: their rows become documents, and a damaged value costs only itself."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from stored_values import BEHAVIOUR, NOW, TAGS, WORDS, YESTERDAY, agent, declared_agent, declared_model, declared_route

from registry_svc.mesh.rows import StoredMesh
from registry_svc.mesh.store import SqlStore
from registry_svc.store.database import SCHEMA
from weft.api.registry.v1.model_pb2 import ModelProvider
from weft.api.registry.v1.wake_pb2 import CommandAction, Wake, WakeOnLanAction, WakeRecipe
from weft.kernel.timestamps import duration_of
from weft.sql.migrations import statements_of
from weft.wake.recipes import set_defaults

CORPUS = Path(__file__).parent.parent / "corpus" / "databases" / "0.1.0" / "registry.sql"
_AT = YESTERDAY.replace(tzinfo=None).isoformat(" ", "microseconds")
_AGENT = {
    "target": "m1",
    "targets_pool": True,
    "description": WORDS,
    "system_prompt": WORDS,
    "default_params": '{"temperature":0.2}',
    "behaviour": json.dumps(
        {
            "platform_prompt": True,
            "tools": ["files.read", "search"],
            "max_tool_iterations": 0,
            "signals": ["NEEDS_EXTERNAL_INFO", "POLICY_RISK"],
            "stop_on_decision_request": False,
            "repetition": "off",
            "parse_text_tool_calls": False,
        }
    ),
    "tags": TAGS.SerializeToString(),
    "created_at": _AT,
}
_MODEL = {
    "pool_name": "pool",
    "operations": "chat,embedding",
    "context_tokens": 2**31 - 1,
    "digest": "sha256:" + "0a" * 32,
    "remote": True,
    "wake": json.dumps(
        {
            "by_runner": True,
            "max_wait_seconds": 12.5,
            "by_mesh": {
                "http": {
                    "url": "https://host/wake?ü=1",
                    "method": "PUT",
                    "headers": {"Authorization": "Bearer ${WEFT_WAKE_X}"},
                }
            },
        }
    ),
    "skills": "text,image,tools",
    "tags": TAGS.SerializeToString(),
    "upstream": "qwen-é.gguf",
    "journal": "wait",
    "created_at": _AT,
    "runner": "not-there-yet",
    "provider": None,
}
_ROUTE = {
    "name": "q1",
    "description": WORDS,
    "candidates": "m1,b.1:x_y-Z",
    "budget_seconds": 90.5,
    "keep_alive_seconds": -1.0,
    "pin_primary": True,
    "created_at": _AT,
}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A database of the release before, without rows."""
    with closing(sqlite3.connect(tmp_path / "registry.db")) as raw:
        for statement in statements_of(SCHEMA.scripts / "0018.sql", "sqlite"):
            raw.execute(statement)
        raw.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        raw.execute("INSERT INTO alembic_version VALUES ('0018')")
        yield raw


def insert(raw: sqlite3.Connection, table: str, **values: Any) -> None:
    columns = ", ".join(values)
    raw.execute(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})", tuple(values.values()))
    raw.commit()


async def migrated(path: Path) -> StoredMesh:
    store = SqlStore(f"sqlite:///{path}/registry.db")
    await store.open()
    found = await store.load()
    await store.close()
    return found


async def test_rows_of_each_table_become_documents(database: sqlite3.Connection, tmp_path: Path) -> None:
    insert(database, "declared_models", **{**_MODEL, "name": "m1"})
    insert(database, "declared_agents", **_AGENT, name="a1")
    insert(database, "declared_routes", **_ROUTE)
    mesh = await migrated(tmp_path)
    assert mesh.documents == (declared_model("m1"), declared_agent("a1"), declared_route("q1"))


async def test_publications_stay_with_their_runners(database: sqlite3.Connection, tmp_path: Path) -> None:
    insert(database, "sessions", id="s1", request_id="open-1", ticket_key=b"k")
    insert(
        database,
        "runners",
        **dict.fromkeys(("incarnation", "address", "host", "runtime", "version"), "x"),
        name="r1",
        session_id="s1",
        standing="active",
        last_heartbeat_at=NOW.replace(tzinfo=None).isoformat(" ", "microseconds"),
    )
    insert(database, "agents", **_AGENT, name="a1", runner="r1")
    (session,) = (await migrated(tmp_path)).sessions
    assert session.agents == (agent("a1"),)


async def test_migration_from_the_previous_release_keeps_all_declarations(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "registry.db")) as raw:
        raw.executescript(CORPUS.read_text())
        tables = ("models", "agents", "routes", "aliases", "profiles", "workflows", "tenants")
        counts = [raw.execute(f"SELECT count(*) FROM declared_{table}").fetchone()[0] for table in tables]
    mesh = await migrated(tmp_path)
    assert len(mesh.documents) == sum(counts)
    assert mesh.settings is not None
    with closing(sqlite3.connect(tmp_path / "registry.db")) as raw:
        left = {name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert not left & {"models", "agents", "mesh_settings", *(f"declared_{table}" for table in tables)}


@pytest.mark.parametrize(
    ("recipe", "plan"),
    [
        ({"by_runner": True}, Wake(by_runner=True)),
        (
            {"by_mesh": {"command": {"argv": ["a", "", "日本"]}}},
            Wake(by_mesh=WakeRecipe(command=CommandAction(argv=("a", "", "日本")))),
        ),
        (
            {"by_mesh": {"wake_on_lan": {"mac_address": "aa:bb:cc:dd:ee:ff", "port": 7}}},
            Wake(by_mesh=WakeRecipe(wake_on_lan=WakeOnLanAction(mac_address="aa:bb:cc:dd:ee:ff", port=7))),
        ),
        ({"by_mesh": {"magic": {}}}, None),
    ],
)
async def test_wake_plans_survive_the_migration(
    database: sqlite3.Connection, tmp_path: Path, recipe: dict[str, Any], plan: Wake | None
) -> None:
    insert(database, "declared_models", **{**_MODEL, "name": "m1", "wake": json.dumps(recipe)})
    (model,) = (await migrated(tmp_path)).documents
    manifest: Any = model
    if plan is None:
        assert not manifest.manifest.HasField("wake")
        return
    set_defaults(plan)
    plan.max_wait.CopyFrom(duration_of(timedelta(minutes=1).total_seconds()))
    assert manifest.manifest.wake == plan


@pytest.mark.parametrize("text", ["{", "[]", "7", '{"max_wait_seconds": "x"}', '{"by_mesh": {"http": {"url": 1}}}'])
async def test_damaged_value_loses_only_its_row(database: sqlite3.Connection, tmp_path: Path, text: str) -> None:
    insert(database, "declared_models", **{**_MODEL, "name": "m1", "wake": text})
    provider = ModelProvider(url="https://h", api_key_ref="secret/k")
    insert(database, "declared_models", **{**_MODEL, "name": "m2", "provider": provider.SerializeToString()})
    insert(database, "declared_agents", **{**_AGENT, "name": "a1", "behaviour": "{", "default_params": "[1]"})
    insert(database, "declared_agents", **{**_AGENT, "name": "a2"})
    with structlog.testing.capture_logs() as logs:
        documents: Any = (await migrated(tmp_path)).documents
    assert [each.manifest.name for each in documents] == ["m1", "m2", "a1", "a2"]
    assert not documents[0].manifest.HasField("wake")
    assert documents[1].manifest.provider == provider
    assert [each.manifest.HasField("behaviour") for each in documents[2:]] == [False, True]
    assert documents[3].manifest.behaviour == BEHAVIOUR
    found = sorted((entry["name"], entry["column"]) for entry in logs if "column" in entry)
    assert found == [("a1", "behaviour"), ("a1", "default_params"), ("m1", "wake")]
