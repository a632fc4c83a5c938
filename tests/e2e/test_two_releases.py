"""The previous release and this one in one mesh: docs/deploy.md."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from kit.previous_release import PreviousRelease, install_previous_release
from mesh_process import WEFT, eventually, run_weft, user_environment
from mixed_mesh import GATEWAYS, HEARTBEAT_SECONDS, ORDER, RUNNERS, MixedMesh, calling, running_mixed, under_load

import registry_svc.store.database
import router_svc.store.database

MIXES = {
    "runners of before": RUNNERS,
    "gateways of before": GATEWAYS,
    "all but the registry of before": ORDER[1:],
    "new runners alone": tuple(name for name in ORDER if name not in RUNNERS),
}
"""Which processes are of the previous release."""
SCHEMAS = {"registry": registry_svc.store.database.SCHEMA, "router": router_svc.store.database.SCHEMA}
MODULES = {"registry": "registry_svc.store.database", "router": "router_svc.store.database"}
NEWER = "9999"
EXIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> PreviousRelease:
    return install_previous_release(tmp_path_factory.mktemp("previous"))


def _start(mesh: MixedMesh, names: tuple[str, ...], of_before: tuple[str, ...], previous: PreviousRelease) -> None:
    for name in names:
        mesh.start(name, previous.weft if name in of_before else WEFT)


@pytest.mark.nightly("a second release")
@pytest.mark.parametrize("of_before", MIXES.values(), ids=MIXES)
async def test_mesh_of_two_releases_serves_chats_tasks_and_heartbeats(
    previous: PreviousRelease, tmp_path: Path, of_before: tuple[str, ...]
) -> None:
    with running_mixed(tmp_path) as mesh:
        await asyncio.to_thread(_start, mesh, ORDER, of_before, previous)
        async with calling(mesh) as callers:
            assert await callers.chat() == ""
            task = await callers.task()
            assert task["state"] == "completed", task
            await _beats(mesh)
            assert await callers.chat() == ""
        await _require_examined(mesh)


async def _weft(mesh: MixedMesh, *arguments: str) -> tuple[int, str, str]:
    """A command on the host of the mesh, by one of its gateways."""
    return await run_weft(*arguments, home=mesh.apart.home, url=next(iter(mesh.urls.values())))


async def _beats(mesh: MixedMesh) -> None:
    """Asserts that the registry gets heartbeats of both runners."""

    async def heartbeats() -> dict[str, str]:
        code, out, error = await _weft(mesh, "get", "runners", "-o", "json")
        assert code == 0, error
        found = json.loads(out)["items"]
        assert [each["status"]["state"] for each in found] == ["active", "active"], found
        return {each["name"]: each["status"]["lastHeartbeatAt"] for each in found}

    before = await heartbeats()

    async def all_later() -> bool:
        now = await heartbeats()
        return all(now[name] > beat for name, beat in before.items())

    await eventually(all_later, 60 * HEARTBEAT_SECONDS, "no heartbeats arrive")


async def _require_examined(mesh: MixedMesh) -> None:
    """Asserts that `weft doctor --mesh` lists the processes, and finds nothing that does not go together."""
    code, out, error = await _weft(mesh, "doctor", "--mesh", "-o", "json")
    assert code == 0, out + error
    details = [each["detail"] for each in json.loads(out)["items"]]
    for name in ("registry: ", "router", "runner/a: ", "runner/b: "):
        assert any(detail.startswith(name) for detail in details), (name, details)


@pytest.mark.nightly("a second release")
async def test_upgrade_in_the_documented_order_loses_no_request(previous: PreviousRelease, tmp_path: Path) -> None:
    with running_mixed(tmp_path) as mesh:
        await asyncio.to_thread(_start, mesh, ORDER, ORDER, previous)
        async with under_load(mesh) as callers:
            await callers.wait_served()
            earlier = await callers.task()
            for name in ORDER:
                task = asyncio.create_task(callers.task())
                await mesh.replace(name)
                await callers.wait_served()
                assert (await task)["state"] == "completed"
            assert await callers.find_task(earlier["id"]) == earlier
        assert callers.lost == []


@pytest.mark.nightly("a second release")
async def test_rollback_in_reverse_order_loses_no_request(previous: PreviousRelease, tmp_path: Path) -> None:
    """A service whose schema has changed since does not go back on this database: see the next test."""
    changed = {name for name, schema in SCHEMAS.items() if _newest(previous, name) != schema.newest}
    with running_mixed(tmp_path) as mesh:
        await asyncio.to_thread(_start, mesh, ORDER, (), previous)
        async with under_load(mesh) as callers:
            await callers.wait_served()
            for name in reversed(ORDER):
                if name not in changed:
                    await mesh.replace(name, previous.weft)
                    await callers.wait_served()
        assert callers.lost == []


def _newest(previous: PreviousRelease, service: str) -> str:
    return previous.evaluate(f"from {MODULES[service]} import SCHEMA", "SCHEMA.newest")


@pytest.mark.nightly("a second release")
@pytest.mark.parametrize("service", SCHEMAS)
def test_previous_release_rejects_a_newer_database_and_leaves_it_unchanged(
    previous: PreviousRelease, tmp_path: Path, service: str
) -> None:
    with running_mixed(tmp_path) as mesh:
        mesh.start("registry")
        if service != "registry":
            mesh.start(service)
            mesh.end(service)
        database = mesh.apart.home / "state" / f"{service}.db"
        if service == "registry":
            mesh.end(service)
        table, own = SCHEMAS[service].version_table, SCHEMAS[service].newest
        if _newest(previous, service) == own:
            _set_revision(database, table, NEWER)
        kept = _dump(database)
        refused = subprocess.run(
            [*previous.weft, "serve", service, "--home", str(mesh.apart.home), "--listen", f"unix:{tmp_path}/old.sock"],
            env=user_environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=EXIT_SECONDS,
            check=False,
        )
        assert refused.returncode not in (0, -9), refused.stderr
        assert "schema" in refused.stderr
        assert "newer" in refused.stderr
        assert str(database) in refused.stderr
        assert _dump(database) == kept
        _set_revision(database, table, own)
        mesh.start(service)


Tables = dict[str, dict[str, tuple[str, bool]]]
"""Columns by table: the type, and whether a row may be written without a value."""
_MAKE = """
import asyncio
from {module} import SCHEMA
from weft.sql.store import Store

async def make():
    store = Store("sqlite:///{path}", "{service}", schema=SCHEMA)
    await store.open()
    await store.close()

asyncio.run(make())
"""


def _tables_of(python: Path, service: str, path: Path) -> Tables:
    """Returns the tables that a release makes."""
    program = _MAKE.format(module=MODULES[service], service=service, path=path)
    subprocess.run([python, "-P", "-c", program], check=True)
    with closing(sqlite3.connect(path)) as database:
        return {
            table: {
                name: (kind, not is_required or default is not None)
                for _, name, kind, is_required, default, _ in database.execute(f"PRAGMA table_info({table})")
            }
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        }


def _narrowed(before: Tables, after: Tables) -> set[str]:
    """What a process of the release before can no longer read or write."""
    gone = {f"{table} is gone" for table in before.keys() - after.keys()}
    for table in before.keys() & after.keys():
        old, new = before[table], after[table]
        gone |= {f"{table}.{column} is gone" for column in old.keys() - new.keys()}
        for column, (kind, is_optional) in new.items():
            old_kind, was_optional = old.get(column, (kind, True))
            if kind != old_kind:
                gone.add(f"{table}.{column} is another type")
            if was_optional and not is_optional:
                gone.add(f"{table}.{column} must be written")
    return gone


@pytest.mark.parametrize("service", SCHEMAS)
def test_previous_release_reads_and_writes_the_tables_of_this_release(
    previous: PreviousRelease, service: str, tmp_path: Path
) -> None:
    """An older router goes on beside a newer one that has migrated the database of both."""
    before = _tables_of(previous.python, service, tmp_path / "before.db")
    assert _narrowed(before, _tables_of(Path(sys.executable), service, tmp_path / "after.db")) == set()


@pytest.mark.parametrize(
    ("after", "wrong"),
    [
        ({}, "t is gone"),
        ({"t": {}}, "t.a is gone"),
        ({"t": {"a": ("TEXT", False)}}, "t.a is another type"),
        ({"t": {"a": ("INTEGER", False), "b": ("TEXT", False)}}, "t.b must be written"),
    ],
)
def test_table_unusable_by_the_previous_release_is_detected(after: Tables, wrong: str) -> None:
    """The control."""
    assert _narrowed({"t": {"a": ("INTEGER", False)}}, after) == {wrong}
    assert _narrowed({"t": {"a": ("INTEGER", False)}}, {"t": {"a": ("INTEGER", False), "b": ("TEXT", True)}}) == set()


def _set_revision(database: Path, table: str, revision: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(f"UPDATE {table} SET version_num = ?", (revision,))


def _dump(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return list(connection.iterdump())
