"""Output: tables for people, JSON and YAML for programs and files."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weft_app.cli.options import OutputFormat

COLUMN_GAP = "  "
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its title and the function that gets the cell from a row."""

    title: str
    cell: Callable[[Any], str]
    ticks: bool = False
    """Whether its value changes with time alone; a watch does not print a row again for that."""
    min_chars: int = 0
    """Minimum width; a watch prints its header before the first row."""


def say(text: str) -> None:
    """Prints and flushes: output to a file or pipe is otherwise buffered until the program ends."""
    sys.stdout.write(text)
    sys.stdout.flush()


def safe_text(text: str) -> str:
    """Returns text reduced to one line without control characters, whatever its origin."""
    return "".join(character if character.isprintable() else " " for character in text)


class TextTable:
    """A table in kubectl's style: no frames, columns as wide as the rows seen so far."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._widths = [max(column.min_chars, len(column.title)) for column in columns]

    def cells(self, row: Any) -> list[str]:
        """Returns the row's cells, made safe for a terminal; an empty one is "-"."""
        return [safe_text(column.cell(row)) or "-" for column in self._columns]

    def fingerprint(self, row: Any) -> tuple[str, ...]:
        """Returns the values whose change makes a watch print the row again."""
        return tuple(column.cell(row) for column in self._columns if not column.ticks)

    def text(self, rows: Iterable[Any]) -> str:
        """Returns header and rows; the header is bold on a terminal."""
        header, *lines = self.plain_text(rows).splitlines()
        if sys.stdout.isatty():
            header = f"{BOLD}{header}{PLAIN}"
        return "\n".join([header, *lines]) + "\n"

    def plain_text(self, rows: Iterable[Any]) -> str:
        """Returns header and rows."""
        table = [self.cells(row) for row in rows]
        for cells in table:
            self._widen(cells)
        titles = [column.title for column in self._columns]
        return "\n".join(map(self._line, [titles, *table])) + "\n"

    def line(self, cells: Sequence[str]) -> str:
        """Returns one more row below those already printed."""
        self._widen(cells)
        return self._line(cells) + "\n"

    def _widen(self, cells: Sequence[str]) -> None:
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]

    def _line(self, cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True))
        line = COLUMN_GAP.join(padded).rstrip()
        # Cut to the width of a terminal, never in a pipe.
        return line[: shutil.get_terminal_size().columns] if sys.stdout.isatty() else line


def print_resources(kind: str, rows: Sequence[Any], columns: Sequence[Column], output: OutputFormat) -> None:
    """Prints `rows`, mappings of JSON types. As JSON or YAML it is one document `{kind, items}`."""
    if output is OutputFormat.TABLE:
        print_table(rows, columns)
    else:
        print_document({"kind": kind, "items": list(rows)}, output)


def print_document(document: Any, output: OutputFormat) -> None:
    """Prints one document as JSON or YAML."""
    if output is OutputFormat.YAML:
        import yaml  # noqa: PLC0415 - most commands print no YAML, and all should start fast

        say(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    else:
        say(json_text(document))


def json_text(document: Any) -> str:
    """Returns a document as JSON for people and programs."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def json_line(document: Any) -> str:
    """Returns a document as one line of JSON."""
    return json.dumps(document, ensure_ascii=False) + "\n"


def print_table(rows: Iterable[Any], columns: Sequence[Column]) -> None:
    """Prints a table."""
    say(TextTable(columns).text(rows))


def seconds_ago(seconds: float) -> str:
    """Returns an age as text: 5s, 3m, 2h, 4d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"
