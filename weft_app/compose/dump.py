"""Dump and restore of a mesh: its databases and key files, also from SQLite to PostgreSQL and back.

While it runs it owns the databases, so no registry and no router can change them.
"""

import asyncio
import dataclasses
import json
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from registry_svc.store import database as registry_database
from registry_svc.store.owner_file import create_owner_file, read_owner_file
from router_svc.store import database as router_database
from weft import __version__
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.telemetry.log import get_logger
from weft.sql.address import DatabaseAddress, address_of
from weft.sql.connections import Tx
from weft.sql.dump import DumpFacts, DumpWriter, Progress, checked, lines_of, restore_tables, writing
from weft.sql.migrations import schema_in, tables_in
from weft.sql.owners import OwnerRole
from weft.sql.store import Store
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig

log = get_logger("weft_app.compose")

SCHEMAS = {"registry": registry_database.SCHEMA, "router": router_database.SCHEMA}
_ROLES: Mapping[str, OwnerRole] = {
    "registry": registry_database.REGISTRY_OWNER,
    "router": router_database.ROUTER_OWNER,
}
_OF_PROCESSES = frozenset({*(role.table for role in _ROLES.values()), "promises"})
"""Tables that describe the owner of a database, or belong to one file."""
_HOLDINGS: Mapping[str, Mapping[str, str]] = {
    "registry": {
        "api_keys": "API keys",
        "secrets": "secrets",
        "join_tokens": "join tokens",
        "documents WHERE kind <> 'settings'": "declarations",
        "audit_entries": "audit entries",
    },
    "router": {"tasks": "tasks", "batches": "batches", "files": "files", "responses": "stored responses"},
}
"""Tables whose rows an operator would miss, and what they are."""
MAX_FILE_BYTES = 1024**2
_FILES = (
    "edge/ca.key",
    "edge/ca.pem",
    "edge/cert.pem",
    "edge/key.pem",
    "relay/cert.pem",
    "relay/key.pem",
)
"""Files of the home's state: keys, and certificates that laptops pin."""
MOVES_NAME = "moved.json"
CHECKPOINT_SECONDS = 1.0
"""Time after a dump in which closing a SQLite file may still write to it."""


def dump_mesh(config: WeftConfig, home: WeftHome, path: Path, *, from_home: bool, show: Callable[[int], None]) -> None:
    """Writes a dump. `from_home`: of the SQLite files that the configuration no longer names.

    Raises ALREADY_EXISTS while the mesh runs, NOT_FOUND if there is nothing to dump, and CANCELLED after Ctrl-C.
    """
    found = _left_behind(config, home) if from_home else _addresses(config, home)
    found = {each: address for each, address in found.items() if address.path is None or address.path.exists()}
    if not found:
        raise WeftError(Reason.NOT_FOUND, f"there is no database to dump in {home.state}")

    async def run(progress: Progress) -> None:
        async with _owned(found) as stores:
            services = {each: await _revision(store, each) for each, store in stores.items()}
            with writing(path) as file:
                writer = DumpWriter(file, services, {each: address.location for each, address in found.items()})
                for name, place in _state_files(config, home).items():
                    if (content := read_owner_file(place, name, max_bytes=MAX_FILE_BYTES)) is not None:
                        writer.write({"file": name, "data": content})
                for each, store in stores.items():
                    await store.read(
                        lambda tx, each=each: writer.write_tables(tx, SCHEMAS[each], _OF_PROCESSES, progress)  # type: ignore[misc]
                    )
                    await store.close()
                writer.end()

    _until_interrupted(run, show)


def restore_mesh(
    config: WeftConfig, home: WeftHome, path: Path, *, replace: bool, show: Callable[[int], None]
) -> DumpFacts:
    """Restores a checked dump into empty databases; `replace`: into any. Nothing is written if it fails.

    Raises ALREADY_EXISTS while the mesh runs, or if the databases or key files have other content, INVALID_ARGUMENT for
    a damaged dump, and CANCELLED after Ctrl-C.
    """
    facts = checked(path, SCHEMAS)
    addresses = {each: address for each, address in _addresses(config, home).items() if each in facts.services}

    async def run(progress: Progress) -> None:
        async with _owned(addresses) as stores:
            if not replace:
                for each, store in stores.items():
                    _require_empty(each, store, await store.read(partial(_holdings, service=each)))
            with _restored_files(config, home, path, replace=replace):

                def work(tx: Tx, service: str, progress: Progress) -> None:
                    restore_tables(tx, SCHEMAS[service], facts.services[service], lines_of(path), progress)

                # The last one, which is smaller, is tried before anything is committed.
                *others, last = reversed(stores)
                if others:
                    with suppress(_TriedError):
                        await stores[last].run(lambda tx: _tried(partial(work, tx, last, progress)))
                for each in others:
                    await stores[each].run(partial(work, service=each, progress=progress))
                await stores[last].run(partial(work, service=last, progress=show if others else progress))
        if "router" in addresses and addresses["router"].path is not None:
            home.promises.unlink(missing_ok=True)

    _until_interrupted(run, show)
    _note_moves(config, home, facts)
    return facts


def left_behind(config: WeftConfig, home: WeftHome) -> list[str]:
    """Returns a warning for each SQLite file of the home with content that the mesh does not use, and was not moved."""
    moved = _moves(home)
    said = []
    for service, address in _left_behind(config, home).items():
        path = address.path
        if path is not None and _changed_at(path) > moved.get(str(path), 0.0) and (found := _held_by(service, path)):
            said.append(
                f"{path} has {', '.join(found)} that are not used, because {service}.database_url leads to "
                f"{_addresses(config, home)[service].location}; to move them, stop the mesh, and run: weft mesh dump "
                "--from-home moved.dump && weft mesh restore moved.dump"
            )
    return said


def warn_left_behind(config: WeftConfig, home: WeftHome) -> None:
    """Logs the warnings of `left_behind`."""
    for said in left_behind(config, home):
        log.warning(said)


def _addresses(config: WeftConfig, home: WeftHome) -> dict[str, DatabaseAddress]:
    return {
        "registry": address_of(config.registry.database_url or home.state / "registry.db"),
        "router": address_of(config.router.database_url or home.state / "router.db"),
    }


def _left_behind(config: WeftConfig, home: WeftHome) -> dict[str, DatabaseAddress]:
    """Returns the SQLite files of the home that the configuration does not name."""
    files = {each: address_of(home.state / f"{each}.db") for each in _ROLES}
    used = {address.path.resolve() for address in _addresses(config, home).values() if address.path is not None}
    return {
        each: address
        for each, address in files.items()
        if address.path is not None and address.path.exists() and address.path.resolve() not in used
    }


def _state_files(config: WeftConfig, home: WeftHome) -> dict[str, Path]:
    """Returns the key files by their names in a dump."""
    return {
        "key-pepper": config.registry.keys.pepper_file or home.state / "key-pepper",
        "secret-keys": config.registry.secrets.key_file or home.state / "secret-keys",
        "results.key": (config.gateway.results.key_file or home.state / "results.key").expanduser(),
        **{name: home.state / name for name in _FILES},
    }


@asynccontextmanager
async def _owned(addresses: Mapping[str, DatabaseAddress]) -> AsyncIterator[dict[str, Store]]:
    """Yields the databases, which this process owns. Raises ALREADY_EXISTS if a service runs on one."""
    roles = {each: dataclasses.replace(role, shares_file=False) for each, role in _ROLES.items()}
    stores = {each: Store(address, each, role=roles[each]) for each, address in addresses.items()}
    try:
        for store in stores.values():
            await store.open()
        yield stores
    finally:
        for store in stores.values():
            await store.close()


async def _revision(store: Store, service: str) -> str:
    schema = SCHEMAS[service]

    def look(tx: Tx) -> str:
        return schema_in(tx, schema).database_revision if schema.version_table in tables_in(tx) else ""

    found = await store.read(look)
    if found not in schema.revisions:
        known = f"the schema {found}, which this release does not know" if found else "no tables of weft"
        raise WeftError(Reason.NOT_FOUND, f"the {service}'s database {store.address.location} has {known}")
    return found


def _holdings(tx: Tx, *, service: str) -> list[str]:
    """Returns what an operator would miss of a database, such as `API keys (2)`."""
    present = set(tables_in(tx))
    held = {table: words for table, words in _HOLDINGS[service].items() if table.partition(" ")[0] in present}
    return _counted(held, lambda table: int(tx.value(f"SELECT count(*) FROM {table}")))  # noqa: S608 - named above


def _held_by(service: str, path: Path) -> list[str]:
    """Returns the holdings of a SQLite file without changing it; empty if it cannot be read."""
    wal = path.with_name(f"{path.name}-wal")
    mode = "mode=ro" if wal.exists() and wal.stat().st_size else "immutable=1"
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as file:
        return _counted(
            _HOLDINGS[service],
            lambda table: file.execute(f"SELECT count(*) FROM {table}").fetchone()[0],  # noqa: S608 - as above
        )
    return []


def _counted(held: Mapping[str, str], count: Callable[[str], int]) -> list[str]:
    return [f"{words} ({number})" for table, words in held.items() if (number := count(table))]


def _require_empty(service: str, store: Store, found: list[str]) -> None:
    if found:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"the {service}'s database {store.address.location} has {', '.join(found)}; name an empty one, or delete "
            "its content with --replace",
        )


class _TriedError(Exception):
    """Rolls back a trial."""


def _tried(work: Callable[[], None]) -> None:
    work()
    raise _TriedError


@contextmanager
def _restored_files(config: WeftConfig, home: WeftHome, path: Path, *, replace: bool) -> Iterator[None]:
    """Writes the key files of a dump. Restores the earlier ones if the block fails.

    Raises ALREADY_EXISTS if one has other content, and INVALID_ARGUMENT for one that this release does not know.
    """
    targets = _state_files(config, home)
    before_tables = takewhile(lambda each: "table" not in each, lines_of(path))
    wanted = {each["file"]: each["data"] for each in before_tables if "file" in each}
    if unknown := sorted(wanted.keys() - targets.keys()):
        raise invalid_field("file", f"{path} has {', '.join(unknown)}, which weft {__version__} does not know")
    present = {name: read_owner_file(targets[name], name, max_bytes=MAX_FILE_BYTES) for name in wanted}
    changed = {name: content for name, content in present.items() if content != wanted[name]}
    if (other := [str(targets[name]) for name, content in changed.items() if content is not None]) and not replace:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"{', '.join(other)} differ from those in the dump; move them away, or overwrite them with --replace",
        )
    try:
        for name, before in changed.items():
            if before is None:
                create_owner_file(targets[name], wanted[name], name)
            else:
                replace_file(targets[name], wanted[name])
        yield
    except BaseException:
        for name, before in changed.items():
            if before is None:
                targets[name].unlink(missing_ok=True)
            else:
                replace_file(targets[name], before)
        raise


def _moves(home: WeftHome) -> dict[str, float]:
    """Returns the SQLite files that were moved, and until when their content was, in UTC seconds."""
    with suppress(OSError, ValueError, AttributeError):
        return {str(name): float(at) for name, at in json.loads((home.state / MOVES_NAME).read_bytes()).items()}
    return {}


def _note_moves(config: WeftConfig, home: WeftHome, facts: DumpFacts) -> None:
    moved = {
        str(address.path): facts.ended_at + CHECKPOINT_SECONDS
        for each, address in _left_behind(config, home).items()
        if facts.services.get(each) and facts.sources[each] == address.location
    }
    if moved:
        replace_file(home.state / MOVES_NAME, json.dumps(_moves(home) | moved).encode())


def _changed_at(path: Path) -> float:
    """Returns when a SQLite file was last written, in UTC seconds."""
    wal = path.with_name(f"{path.name}-wal")
    return max(each.stat().st_mtime for each in (path, wal) if each is path or (wal.exists() and wal.stat().st_size))


def _until_interrupted(run: Callable[[Progress], Coroutine[Any, Any, None]], show: Progress) -> None:
    """Runs until the end, or until Ctrl-C at the next row."""
    stops = threading.Event()

    def progress(rows: int) -> None:
        if stops.is_set():
            raise WeftError(Reason.CANCELLED, "interrupted; nothing was written")
        show(rows)

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stops.set)
        await run(progress)

    asyncio.run(main())
