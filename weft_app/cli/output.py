"""Output: tables for people, JSON and YAML for programs and files."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from unicodedata import category

from weft_app.cli.formats import text_at
from weft_app.cli.options import note

COLUMN_GAP = "  "
INDENT = "  "
FACT_CHARS = 13
TEXTS = ("table", "wide")
"""Output formats for people."""
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table or line of a page: its title and how the text follows from a record."""

    title: str
    source: str | Callable[[Any], str | None]
    """A path in the record (see `weft_app.cli.formats`), or a function."""
    form: str = ""
    """The format of the value at the path."""
    ticks: bool = False
    """Whether its value changes with time alone; a watch does not print a row again for that."""
    min_chars: int = 0
    """Minimum width; a watch prints its header before the first row."""

    def text(self, record: Any) -> str | None:
        """Returns the text of a record; None: there is none, so that a table has "-" and a page no line."""
        if not isinstance(self.source, str):
            return self.source(record)
        return text_at(record, self.source, self.form)


def say(text: str) -> None:
    """Prints and flushes: output to a file or pipe is otherwise buffered until the program ends."""
    sys.stdout.write(text)
    sys.stdout.flush()


def safe_text(text: str) -> str:
    """Returns text reduced to one line without control characters, whatever its origin."""
    return "".join(character if character.isprintable() else " " for character in text)


def shown(text: str) -> str:
    """Model output made safe for a terminal: no escape sequence can move the cursor or change the title."""
    return "".join(character if character in "\n\t" or category(character) != "Cc" else " " for character in text)


class TextTable:
    """A table in kubectl's style: no frames, columns as wide as the rows seen so far."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self.titles = [column.title for column in columns]
        self._widths = [max(column.min_chars, len(column.title)) for column in columns]

    def cells(self, row: Any) -> list[str]:
        """Returns the row's cells, made safe for a terminal; an empty one is "-"."""
        return [safe_text(column.text(row) or "") or "-" for column in self._columns]

    def fingerprint(self, row: Any) -> tuple[str | None, ...]:
        """Returns the values whose change makes a watch print the row again."""
        return tuple(column.text(row) for column in self._columns if not column.ticks)

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
        return "\n".join(map(self._line, [self.titles, *table])) + "\n"

    def line(self, cells: Sequence[str]) -> str:
        """Returns one more row below those already printed."""
        self._widen(cells)
        return self._line(cells) + "\n"

    def row(self, row: Any) -> str:
        """Returns a record as one more row below those already printed."""
        return self.line(self.cells(row))

    def _widen(self, cells: Sequence[str]) -> None:
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]

    def _line(self, cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True))
        line = COLUMN_GAP.join(padded).rstrip()
        # Cut to the width of a terminal, never in a pipe.
        return line[: shutil.get_terminal_size().columns] if sys.stdout.isatty() else line


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """How records of one kind are printed: as a table, as names, as JSON and as YAML."""

    columns: Sequence[Column]
    wide: Sequence[Column] = ()
    """The columns of `-o wide`."""
    name: Callable[[Any], str] = str
    """Returns what `-o name` prints of a record."""
    kind: str = ""
    """The kind of a document of several records."""
    document: Callable[[Any], Any] = dict
    """Returns a record as JSON types."""
    lasting: Callable[[Any], Any] = dict
    """Returns what of a record makes a watch print it again when it changes."""
    yaml: Callable[[Any], str] | None = None
    """Returns a record as a YAML document; YAML is a stream of these. None: it is one document, as JSON is."""
    plural: str = ""
    """What a stream says that there are none of."""
    empty: str = ""
    """What is said on stderr of a table without rows."""

    def table(self, output: StrEnum) -> TextTable:
        """Returns an empty table with the columns of an output format."""
        return TextTable(self.wide if output == "wide" else self.columns)

    def text(self, rows: Iterable[Any], output: StrEnum, whole: Callable[[], Any] | None = None) -> str:
        """Returns records as text; `whole` makes their one document where it is not `{kind, items}`."""
        if output in TEXTS:
            return self.table(output).text(rows)
        if output == "name":
            return "".join(f"{self.name(row)}\n" for row in rows)
        if output == "yaml" and self.yaml is not None:
            return "---\n".join(map(self.yaml, rows)) or f"# there are no {self.plural}\n"
        document = {"kind": self.kind, "items": [self.document(row) for row in rows]} if whole is None else whole()
        return document_text(document, output)

    def print(self, rows: Iterable[Any], output: StrEnum, whole: Callable[[], Any] | None = None) -> None:
        """Prints records; see `text`. A table without rows has its sentence on stderr below it."""
        shown = list(rows)
        say(self.text(shown, output, whole))
        if self.empty and not shown and output in TEXTS:
            note(self.empty)


class Feed:
    """Texts of records of a listing that is printed one by one."""

    def __init__(self, listing: Listing, output: StrEnum) -> None:
        self._listing = listing
        self._output = output
        self.table = listing.table(output)

    def first(self, rows: Iterable[Any]) -> str:
        """Returns what is printed first: a header too, in a table."""
        return self.table.text(rows) if self._output in TEXTS else "".join(map(self.row, rows))

    def row(self, row: Any) -> str:
        """Returns one record."""
        listing = self._listing
        match self._output.value:
            case "json":
                return json_line(listing.document(row))
            case "yaml" if listing.yaml is not None:
                return "---\n" + listing.yaml(row)
            case "name":
                return f"{listing.name(row)}\n"
            case _:
                return self.table.row(row)


def print_document(document: Any, output: StrEnum) -> None:
    """Prints one document as JSON or YAML."""
    say(document_text(document, output))


def print_page(output: StrEnum, text: Callable[[], str], document: Callable[[], Any]) -> None:
    """Prints what is known of one record: as text for people, or as one document."""
    say(text() if output == "table" else document_text(document(), output))


def document_text(document: Any, output: StrEnum) -> str:
    """Returns one document as JSON or YAML."""
    if output != "yaml":
        return json_text(document)
    import yaml  # noqa: PLC0415 - most commands print no YAML, and all should start fast

    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text


def json_text(document: Any) -> str:
    """Returns a document as JSON for people and programs."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def json_line(document: Any) -> str:
    """Returns a document as one line of JSON."""
    return json.dumps(document, ensure_ascii=False) + "\n"


def print_table(rows: Iterable[Any], columns: Sequence[Column]) -> None:
    """Prints a table."""
    say(TextTable(columns).text(rows))


def page(columns: Sequence[Column], record: Any, title_chars: int = FACT_CHARS) -> Iterator[str]:
    """Yields one line for each column of which the record has a text: its title and the text, safe for a terminal."""
    for column in columns:
        text = column.text(record)
        if text is not None:
            yield safe_text(f"{f'{column.title}:':<{title_chars}} {text}")


def block(title: str, lines: Iterable[str], indent: str = INDENT) -> Iterator[str]:
    """Yields a title and the lines below it, indented; nothing where there are no lines."""
    for place, line in enumerate(lines):
        if not place:
            yield f"{title}:"
        yield f"{indent}{line}"


def table_block(title: str, columns: Sequence[Column], rows: Sequence[Any]) -> Iterator[str]:
    """Yields a title and a table below it; nothing where there are no rows."""
    return block(title, TextTable(columns).plain_text(rows).splitlines() if rows else ())
