"""Dumps: every row survives a move between SQLite and PostgreSQL; what is damaged or does not fit changes nothing."""

import asyncio
import gzip
import random
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.sql.connections import Tx
from weft.sql.dump import DumpFacts, DumpWriter, checked, lines_of, restore_tables, writing
from weft.sql.migrations import Schema, tables_in
from weft.sql.statements import insert
from weft.sql.store import Store
from weft_app.compose.dump import SCHEMAS, dump_mesh, restore_mesh
from weft_app.compose.home import WeftHome
from weft_app.config.loader import parse_config

pytest_plugins = ("database_fixtures",)

ROWS = 5
FIRST = "CREATE TABLE things (\n    id VARCHAR(8) NOT NULL PRIMARY KEY,\n    word TEXT\n);\n"
SECOND = "ALTER TABLE things ADD COLUMN color VARCHAR(16) DEFAULT 'red' NOT NULL;\n"
FILL = "INSERT INTO things (id, word) VALUES ('a', 'lamp')"


def ignored(_rows: int) -> None:
    """Shows no progress."""


async def dumped(store: Store, path: Path, service: str, schema: Schema) -> DumpFacts:
    with writing(path) as file:
        writer = DumpWriter(file, {service: schema.newest}, {service: store.address.location})
        await store.read(lambda tx: writer.write_tables(tx, schema, frozenset(), ignored))
        writer.end()
    return checked(path, {service: schema})


async def restored(
    store: Store, path: Path, service: str, schema: Schema, show: Callable[[int], None] = ignored
) -> None:
    facts = checked(path, {service: schema})
    await store.run(lambda tx: restore_tables(tx, schema, facts.services[service], lines_of(path), show))


def content_of(path: Path) -> Mapping[str, Any]:
    """Rows by table, in a common order, beside columns and numbers."""
    found: dict[str, Any] = {}
    rows = list[Any]()
    for line in lines_of(path):
        if isinstance(line, list):
            rows.append(line)
        elif "table" in line:
            rows = found.setdefault(line["table"], (line["columns"], line["last_number"], []))[2]
    for _, _, rows in found.values():
        rows.sort(key=repr)
    return found


def _internal(tx: Tx) -> list[str]:
    return [name for (name,) in tx.rows("SELECT name FROM sqlite_master")]


class Filler:
    """Rows of any values that the columns of the tables may have."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def fill(self, tx: Tx) -> None:
        for table in self._parents_first(tx):
            if table.endswith("alembic_version") or table == "sqlite_sequence":
                continue
            columns = tx.rows(f"SELECT name, type FROM pragma_table_info('{table}')")
            parents = {row[3]: (row[2], row[4]) for row in tx.rows(f"PRAGMA foreign_key_list({table})")}
            for number in range(ROWS):
                values = {
                    name: tx.value(f"SELECT {parents[name][1]} FROM {parents[name][0]} LIMIT 1 OFFSET {number}")
                    if name in parents
                    else self._value(kind, number)
                    for name, kind in columns
                }
                tx.execute(insert(table, *values), **values)
        for table in tx.rows("SELECT name FROM sqlite_sequence") if "sqlite_sequence" in _internal(tx) else ():
            # Its number must not come again.
            tx.execute(f"DELETE FROM {table.name} WHERE seq = (SELECT max(seq) FROM {table.name})")

    def _parents_first(self, tx: Tx) -> list[str]:
        tables = tables_in(tx)
        return sorted(tables, key=lambda table: (self._depth(tx, table), table))

    def _depth(self, tx: Tx, table: str) -> int:
        return max((1 + self._depth(tx, row[2]) for row in tx.rows(f"PRAGMA foreign_key_list({table})")), default=0)

    def _value(self, kind: str, number: int) -> Any:
        pick = self._random
        if kind.startswith("VARCHAR") or kind == "TEXT":
            most = int(kind[8:-1]) if "(" in kind else 40
            alphabet = "aZ0 '\"\\\n\u00e9\u4e2d\U0001f600\u2028{}[]%:"
            return f"{number}{''.join(pick.choices(alphabet, k=pick.randrange(max(1, most - 1))))}"
        makers: Mapping[str, Callable[[], Any]] = {
            "BLOB": lambda: pick.randbytes(pick.choice([0, 1, 300])),
            "DATETIME": lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=pick.randrange(10**15)),
            "BOOLEAN": lambda: pick.random() < 0.5,
            "DOUBLE": lambda: pick.choice([0.0, 1e300, 1 / 3, 1795969274.1438792, pick.random()]),
            "SMALLINT": lambda: pick.randrange(-(2**15), 2**15),
            "BIGINT": lambda: number * 2**55 + pick.randrange(2**50),
        }
        return makers.get(kind, lambda: number * 10 + pick.randrange(10))()


@pytest.mark.parametrize("service", SCHEMAS)
@pytest.mark.parametrize("seed", range(3))
async def test_every_row_survives_a_move_to_postgresql_and_back(
    service: str, seed: int, postgres_url: str, tmp_path: Path
) -> None:
    schema = SCHEMAS[service]
    source = Store(tmp_path / "source.db", service, schema=schema)
    await source.open()
    await source.run(Filler(seed).fill)
    await dumped(source, tmp_path / "0.dump", service, schema)
    tables = set(await source.read(tables_in)) - {"sqlite_sequence", schema.version_table}
    await source.close()
    expected = content_of(tmp_path / "0.dump")
    assert expected.keys() == tables, "no table is forgotten"
    assert all(rows for _, _, rows in expected.values())
    urls: list[str | Path] = [postgres_url, tmp_path / "again.db"]
    for number, url in enumerate(urls, 1):
        store = Store(url, service)
        await store.open()
        await restored(store, tmp_path / f"{number - 1}.dump", service, schema)
        await dumped(store, tmp_path / f"{number}.dump", service, schema)
        await store.close()
        assert content_of(tmp_path / f"{number}.dump") == expected
        opened = Store(url, service, schema=schema)
        await opened.open()
        for table, (columns, last, _) in expected.items():
            if last is not None:
                others = [each for each in columns if each != columns[0]]
                again = (
                    f"INSERT INTO {table} ({', '.join(others)}) SELECT {', '.join(others)} FROM {table} LIMIT 1 "
                    f"RETURNING {columns[0]}"
                )
                with suppress(WeftError):  # a unique column
                    assert await opened.run(lambda tx, again=again: tx.value(again)) > last  # type: ignore[misc]
        await opened.close()


def schema_of(folder: Path, *scripts: str) -> Schema:
    folder.mkdir(exist_ok=True)
    for number, script in enumerate(scripts, 18):
        (folder / f"{number:04}.sql").write_text(script)
    return Schema(owner="things", scripts=folder, version_table="things_alembic_version")


@pytest.fixture
def older(tmp_path: Path) -> Schema:
    return schema_of(tmp_path / "older", FIRST)


@pytest.fixture
def newer(tmp_path: Path) -> Schema:
    return schema_of(tmp_path / "newer", FIRST, SECOND)


@pytest.fixture
async def dump(tmp_path: Path, older: Schema) -> Path:
    """A dump of an earlier release."""
    store = Store(tmp_path / "a.db", "things", schema=older)
    await store.open()
    await store.run(lambda tx: tx.execute(FILL))
    await dumped(store, tmp_path / "a.dump", "things", older)
    await store.close()
    return tmp_path / "a.dump"


async def test_dump_of_an_earlier_release_is_brought_up_to_date(dump: Path, newer: Schema, database_url: str) -> None:
    store = Store(database_url, "things")
    await store.open()
    for _ in range(2):
        await restored(store, dump, "things", newer)
    assert [tuple(row) for row in await store.read(lambda tx: tx.rows("SELECT * FROM things"))] == [
        ("a", "lamp", "red")
    ]
    await store.close()


async def test_dump_of_a_newer_release_is_refused(older: Schema, newer: Schema, tmp_path: Path) -> None:
    store = Store(tmp_path / "b.db", "things", schema=newer)
    await store.open()
    await dumped(store, tmp_path / "b.dump", "things", newer)
    await store.close()
    with pytest.raises(FieldError, match=r"with the things schema 0019, which weft .* does not know"):
        checked(tmp_path / "b.dump", {"things": older})


def damages(content: bytes) -> Iterator[bytes]:
    text = gzip.decompress(content)
    yield content[:-20]
    yield content[:40] + bytes([content[40] ^ 1]) + content[41:]
    yield gzip.compress(text.replace(b"lamp", b"limp"))
    yield gzip.compress(b"".join(text.splitlines(keepends=True)[:-1]))
    yield gzip.compress(text + b'{"table":"things"}\n')
    yield gzip.compress(b"".join(text.splitlines(keepends=True)[:-1]) + b'["sha256"]\n')
    yield gzip.compress(b"[]\n")
    yield gzip.compress(b"7\n")
    yield gzip.compress(text.replace(b'"weft_dump":1', b'"weft_dump":2'))
    yield text
    yield b""


def test_damaged_dumps_are_refused(dump: Path, older: Schema, tmp_path: Path) -> None:
    for damaged in damages(dump.read_bytes()):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(FieldError, match=r"is damaged or incomplete|is no dump that weft"):
            checked(tmp_path / "damaged", {"things": older})
    with pytest.raises(FieldError, match="cannot be read: No such file"):
        checked(tmp_path / "nothing", {"things": older})


def test_interrupted_dump_leaves_no_file_and_a_complete_one_is_only_its_owners(dump: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(dump.stat().st_mode) == 0o600
    with pytest.raises(KeyboardInterrupt), writing(tmp_path / "b.dump"):
        raise KeyboardInterrupt
    with pytest.raises(WeftError, match="exists; name another file") as refused, writing(dump):
        pass
    assert refused.value.reason is Reason.ALREADY_EXISTS
    assert list(tmp_path.glob("*.dump*")) == [dump]
    with pytest.raises(FieldError, match="cannot be written: No such file"), writing(tmp_path / "no" / "b.dump"):
        pass


async def test_interrupted_restore_changes_nothing(dump: Path, older: Schema, database_url: str) -> None:
    store = Store(database_url, "things", schema=older)
    await store.open()
    await store.run(lambda tx: tx.execute(FILL.replace("lamp", "kept")))

    def stop(_rows: int) -> None:
        raise WeftError(Reason.CANCELLED, "interrupted")

    with pytest.raises(WeftError, match="interrupted"):
        await restored(store, dump, "things", older, stop)
    assert await store.read(lambda tx: tx.value("SELECT word FROM things")) == "kept"
    await store.close()


def test_failed_restore_leaves_the_key_files_of_before(tmp_path: Path) -> None:
    """With --replace, the pepper of the dump stayed, and every key of the mesh was unknown."""
    home, config, dump = WeftHome(tmp_path / "home"), parse_config({}), tmp_path / "mesh.dump"
    pepper, results = home.state / "key-pepper", home.state / "results.key"
    for file in (pepper, results):
        replace_file(file, b"that of the dump".ljust(32))

    async def fill() -> None:
        store = Store(home.state / "registry.db", "registry", schema=SCHEMAS["registry"])
        await store.open()
        await store.run(Filler(0).fill)
        await store.close()

    def stop(_rows: int) -> None:
        raise WeftError(Reason.CANCELLED, "interrupted")

    asyncio.run(fill())
    dump_mesh(config, home, dump, from_home=False, show=ignored)
    replace_file(pepper, b"another one".ljust(32))
    results.unlink()
    with pytest.raises(WeftError, match="interrupted"):
        restore_mesh(config, home, dump, replace=True, show=stop)
    assert pepper.read_bytes() == b"another one".ljust(32)
    assert not results.exists()


def test_key_of_results_is_that_of_the_configuration(tmp_path: Path) -> None:
    """The URLs of stored images did not work on the other machine."""
    home, named = WeftHome(tmp_path / "home"), tmp_path / "shared.key"
    config = parse_config({"gateway": {"results": {"key_file": str(named)}}})
    for file, content in ((home.state / "results.key", b"an earlier one"), (named, b"the one in use")):
        replace_file(file, content.ljust(32))

    async def create() -> None:
        store = Store(home.state / "registry.db", "registry", schema=SCHEMAS["registry"])
        await store.open()
        await store.close()

    asyncio.run(create())
    dump_mesh(config, home, tmp_path / "mesh.dump", from_home=False, show=ignored)
    named.unlink()
    restore_mesh(config, home, tmp_path / "mesh.dump", replace=False, show=ignored)
    assert named.read_bytes() == b"the one in use".ljust(32)


async def test_text_that_postgresql_cannot_store_is_replaced_and_a_value_that_does_not_fit_is_named(
    older: Schema, postgres_url: str, tmp_path: Path
) -> None:
    source, target = Store(tmp_path / "a.db", "things", schema=older), Store(postgres_url, "things")
    await source.open()
    await target.open()
    await source.run(lambda tx: tx.execute("INSERT INTO things VALUES ('a', :word)", word="la\0mp"))
    await dumped(source, tmp_path / "a.dump", "things", older)
    await restored(target, tmp_path / "a.dump", "things", older)
    assert await target.read(lambda tx: tx.value("SELECT word FROM things")) == "la\ufffdmp"
    await source.run(lambda tx: tx.execute("INSERT INTO things VALUES ('longer than 8', 'lamp')"))
    await dumped(source, tmp_path / "b.dump", "things", older)
    with pytest.raises(FieldError, match=r"a row of things's table things does not fit into the database \(22001\)"):
        await restored(target, tmp_path / "b.dump", "things", older)
    assert await target.read(lambda tx: tx.value("SELECT count(*) FROM things")) == 1
    for each in (source, target):
        await each.close()
