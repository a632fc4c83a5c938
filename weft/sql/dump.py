"""Dumps of a mesh: the rows of its databases and its key files, for a move to another database and as a backup.

A dump is a gzip stream of lines of JSON, which is written and read in constant memory:

    {"weft_dump": 1, "version": "0.5.0", "services": {"registry": "0022", …}, "sources": {"registry": "/…/registry.db"}}
    {"file": "key-pepper", "data": {"b": "…"}}
    {"table": "api_keys", "service": "registry", "columns": ["id", …], "last_number": null}
    ["4xrt", …]                                    one line for each row; {"b": base64}, {"t": ISO time}
    {"lines": 12345, "sha256": "…", "ended_at": …}    of all lines before

It contains the pepper, the keys of secrets and the private keys of authorities, so only its owner may read it.
"""

import base64
import gzip
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from weft import __version__
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.sql.connections import DatabaseError, Tx
from weft.sql.migrations import Schema, bring_up_to_date, tables_in
from weft.sql.statements import insert

FORMAT = 1
MAX_LINE_BYTES = 256 * 1024 * 1024
"""Larger than every row of a service."""
ROWS_AT_ONCE = 100
COMPRESSION = 3
_TABLE = re.compile(r"^CREATE TABLE (\w+) \((.*?)^\);", re.MULTILINE | re.DOTALL)
_SERIAL = re.compile(r"(\w+) BIGSERIAL")

Progress = Callable[[int], None]
"""Called with the number of rows so far. Raises to stop."""


@dataclass(frozen=True, kw_only=True)
class DumpFacts:
    """The facts of a complete dump."""

    services: dict[str, str]
    """The schema revision of each service."""
    sources: dict[str, str]
    """The database of each service: a path, or host and database."""
    files: tuple[str, ...]
    rows: int
    ended_at: float
    """UTC seconds at which the databases were read."""


class DumpWriter:
    """Writes the lines of a dump."""

    def __init__(self, file: gzip.GzipFile, services: dict[str, str], sources: dict[str, str]) -> None:
        """`services` and `sources` as in `DumpFacts`."""
        self._file = file
        self._sum = hashlib.sha256()
        self._lines = 0
        self.write({"weft_dump": FORMAT, "version": __version__, "services": services, "sources": sources})

    def write(self, document: Any) -> None:
        """Writes a line."""
        line = json.dumps(document, default=_plain, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        self._sum.update(line)
        self._lines += 1
        self._file.write(line)

    def end(self) -> None:
        """Writes the last line. Call it once the databases are closed."""
        self.write({"lines": self._lines, "sha256": self._sum.hexdigest(), "ended_at": time.time()})

    def write_tables(self, tx: Tx, schema: Schema, skipped: frozenset[str], progress: Progress) -> None:
        """Writes the rows of a service's tables, without those of `skipped`."""
        present, rows = set(tables_in(tx)), 0
        for table, serial in _tables_of(schema).items():
            if table not in present or table in skipped:
                continue
            columns, found = tx.stream(f"SELECT * FROM {table}", ROWS_AT_ONCE)  # noqa: S608 - of a script
            following = _last_number(tx, table, serial) if serial else None
            self.write({"table": table, "service": schema.owner, "columns": columns, "last_number": following})
            for row in found:
                self.write(row)
                rows += 1
                if rows % ROWS_AT_ONCE == 0:
                    progress(rows)
        progress(rows)


@contextmanager
def writing(path: Path) -> Iterator[gzip.GzipFile]:
    """Yields the stream of a new dump that only its owner may read. `path` exists only once the block has ended.

    Raises ALREADY_EXISTS if there is such a file, and INVALID_ARGUMENT if it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    if path.exists():
        raise WeftError(Reason.ALREADY_EXISTS, f"{path} exists; name another file")
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                with gzip.GzipFile("", "wb", COMPRESSION, file, mtime=0) as lines:
                    yield lines
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise invalid_field("file", f"{path} cannot be written: {error.strerror or error}") from error


def lines_of(path: Path) -> Iterator[Any]:
    """Yields the documents of a dump, unchecked. Raises INVALID_ARGUMENT if it cannot be read."""
    for line in _raw_lines(path):
        yield json.loads(line, object_hook=_value)


def checked(path: Path, schemas: dict[str, Schema]) -> DumpFacts:
    """Reads a whole dump, and returns its facts. Raises INVALID_ARGUMENT if it is damaged, or of a newer release."""
    total, count, rows, files, last = hashlib.sha256(), 0, 0, [], None
    header: dict[str, Any] = {}
    for line in _raw_lines(path):
        if last is not None:
            total.update(last)
            count += 1
        last = line
        if line.startswith(b"["):
            rows += 1
            continue
        try:
            document = json.loads(line)
        except ValueError:
            raise _damaged(path) from None
        if not isinstance(document, dict):
            raise _damaged(path)
        header = header or document
        if header.get("weft_dump") != FORMAT:
            raise invalid_field("file", f"{path} is no dump that weft {__version__} can read")
        files += [str(document["file"])] if "file" in document else []
    end = json.loads(last) if last is not None and last.startswith(b'{"lines"') else {}
    if end.get("sha256") != total.hexdigest() or end.get("lines") != count:
        raise _damaged(path)
    for service, revision in header["services"].items():
        if service not in schemas or revision not in schemas[service].revisions:
            raise invalid_field(
                "file",
                f"{path} was written by weft {header['version']} with the {service} schema {revision}, which weft "
                f"{__version__} does not know; restore it with that release or a newer one",
            )
    return DumpFacts(
        services=header["services"],
        sources=header["sources"],
        files=tuple(files),
        rows=rows,
        ended_at=end["ended_at"],
    )


def restore_tables(tx: Tx, schema: Schema, revision: str, lines: Iterator[Any], progress: Progress) -> None:
    """Replaces the tables of a service with those of a dump, and brings them up to date.

    Raises INVALID_ARGUMENT naming a table with a row that this database does not take.
    """
    if tx.dialect == "postgresql":
        tx.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
    drop_tables(tx, schema)
    bring_up_to_date(tx, schema, to=revision)
    count = 0
    for head, rows in _tables_in(lines, schema.owner):
        table, columns = head["table"], head["columns"]
        while some := list(islice(rows, ROWS_AT_ONCE)):
            try:
                tx.many(insert(table, *columns), [_fitting(tx, dict(zip(columns, row, strict=True))) for row in some])
            except DatabaseError as error:
                raise invalid_field(
                    "file", f"a row of {schema.owner}'s table {table} does not fit into the database ({error.code})"
                ) from None
            count += len(some)
            progress(count)
        if head["last_number"]:
            _continue_after(tx, table, columns[0], head["last_number"])
    bring_up_to_date(tx, schema)


def drop_tables(tx: Tx, schema: Schema) -> None:
    """Removes a service's tables."""
    present = set(tables_in(tx))
    for table in [*reversed(_tables_of(schema)), schema.version_table]:
        if table in present:
            tx.execute(f"DROP TABLE {table}")


def _tables_of(schema: Schema) -> dict[str, str]:
    """Returns a schema's tables, parents first, and the name of each one's serial column, if any."""
    scripts = [(schema.scripts / f"{each}.sql").read_text(encoding="utf-8") for each in schema.revisions]
    found = [each for script in scripts for each in _TABLE.findall(script)]
    return {table: "".join(_SERIAL.findall(columns)) for table, columns in found}


def _last_number(tx: Tx, table: str, column: str) -> int | None:
    if tx.dialect == "sqlite":
        found = tx.value("SELECT seq FROM sqlite_sequence WHERE name = :table", table=table)
    else:
        sequence = tx.value("SELECT pg_get_serial_sequence(:table, :column)", table=table, column=column)
        found = tx.value(f"SELECT last_value FROM {sequence} WHERE is_called")  # noqa: S608 - PostgreSQL's own name
    return None if found is None else int(found)


def _continue_after(tx: Tx, table: str, column: str, number: int) -> None:
    if tx.dialect == "postgresql":
        tx.value("SELECT setval(pg_get_serial_sequence(:table, :column), :it)", table=table, column=column, it=number)
        return
    tx.execute("DELETE FROM sqlite_sequence WHERE name = :table", table=table)
    tx.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (:table, :it)", table=table, it=number)


def _tables_in(lines: Iterator[Any], service: str) -> Iterator[tuple[dict[str, Any], Iterator[list[Any]]]]:
    """Yields the tables of a service and their rows, which must be read before the next table."""
    head: Any = next(lines, None)

    def rows() -> Iterator[list[Any]]:
        nonlocal head
        for head in lines:
            if not isinstance(head, list):
                return
            yield head
        head = None

    while head is not None:
        table = head
        found = rows()
        if isinstance(table, dict) and table.get("service") == service:
            yield table, found
        for _ in found:
            pass


def _fitting(tx: Tx, row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row that PostgreSQL can store: its texts have no NUL."""
    if tx.dialect == "sqlite":
        return row
    return {name: each.replace("\0", "\ufffd") if isinstance(each, str) else each for name, each in row.items()}


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise _damaged(path) from None
    except OSError as error:
        raise invalid_field("file", f"{path} cannot be read: {error.strerror or error}") from error


def _damaged(path: Path) -> WeftError:
    return invalid_field("file", f"{path} is damaged or incomplete; nothing was restored")


def _plain(value: Any) -> Any:
    return {"t": value.isoformat()} if isinstance(value, datetime) else {"b": base64.b64encode(value).decode()}


def _value(found: dict[str, Any]) -> Any:
    if found.keys() == {"b"}:
        return base64.b64decode(found["b"])
    return datetime.fromisoformat(found["t"]) if found.keys() == {"t"} else found
