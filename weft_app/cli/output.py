"""Output: tables for people, JSON and YAML for programs and files."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unicodedata import category

from weft.kernel.units import size_words, wait_words
from weft_app.cli.options import note

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


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
    """A path in the record (see `weft_app.cli.output`), or a function."""
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


def custom_columns(text: str, **functions: Callable[[Any], str | None]) -> tuple[Column, ...]:
    """Returns columns from words as kubectl has them: TITLE:PATH or TITLE:PATH:FORMAT; of a TITLE alone by `functions`.

    An underscore in a title is a space, and a tilde at the end says that the column `ticks`.
    """
    found = []
    for word in text.split():
        title, *path = word.removesuffix("~").split(":", 2)
        source, form = (*path, "")[:2] if path else (functions[title], "")
        found.append(Column(title.replace("_", " "), source, form, ticks=word.endswith("~")))
    return tuple(found)


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

    def __init__(self, columns: Sequence[Column], *, is_cut: bool = True) -> None:
        """`is_cut`: on a terminal lines end at its width."""
        self._columns = columns
        self._is_cut = is_cut
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
        return line[: shutil.get_terminal_size().columns] if self._is_cut and sys.stdout.isatty() else line


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

    def table(self, output: str) -> TextTable:
        """Returns an empty table with the columns of an output format."""
        return TextTable(self.wide if output == "wide" else self.columns)

    def text(self, rows: Iterable[Any], output: str, whole: Callable[[], Any] | None = None) -> str:
        """Returns records as text; `whole` makes their one document where it is not `{kind, items}`."""
        if output in TEXTS:
            return self.table(output).text(rows)
        if output == "name":
            return "".join(f"{self.name(row)}\n" for row in rows)
        if output == "yaml" and self.yaml is not None:
            return "---\n".join(map(self.yaml, rows)) or f"# there are no {self.plural}\n"
        document = {"kind": self.kind, "items": [self.document(row) for row in rows]} if whole is None else whole()
        return document_text(document, output)

    def print(self, rows: Iterable[Any], output: str, whole: Callable[[], Any] | None = None) -> None:
        """Prints records; see `text`. A table without rows has its sentence on stderr below it."""
        shown = list(rows)
        say(self.text(shown, output, whole))
        if self.empty and not shown and output in TEXTS:
            note(self.empty)


class Feed:
    """Texts of records of a listing that is printed one by one."""

    def __init__(self, listing: Listing, output: str) -> None:
        self._listing = listing
        self._output = output
        self.table = listing.table(output)

    def first(self, rows: Iterable[Any]) -> str:
        """Returns what is printed first: a header too, in a table."""
        return self.table.text(rows) if self._output in TEXTS else "".join(map(self.row, rows))

    def row(self, row: Any) -> str:
        """Returns one record."""
        listing = self._listing
        match self._output:
            case "json":
                return json_line(listing.document(row))
            case "yaml" if listing.yaml is not None:
                return "---\n" + listing.yaml(row)
            case "name":
                return f"{listing.name(row)}\n"
            case _:
                return self.table.row(row)


def print_document(document: Any, output: str) -> None:
    """Prints one document as JSON or YAML."""
    say(document_text(document, output))


def print_outcome(output: str, text: str, name: str, document: Any) -> None:
    """Prints what became of one record: as a line for people, as its name, or as one document."""
    say(f"{text}\n" if output == "table" else f"{name}\n" if output == "name" else document_text(document, output))


def print_page(output: str, text: Callable[[], str], document: Callable[[], Any]) -> None:
    """Prints what is known of one record: as text for people, or as one document."""
    say(text() if output == "table" else document_text(document(), output))


def document_text(document: Any, output: str) -> str:
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


Show = Callable[[Any], None]
"""Shows the current state of a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStyle:
    """How the progress of records of one kind is shown."""

    line: Callable[[Any], str]
    """Returns the line of a state, where there is no terminal."""
    columns: Callable[[], "Sequence[ProgressColumn]"]
    """Returns the columns of the bar, which are of one bar only."""
    bar: Callable[[Any], Mapping[str, Any]]
    """Returns what the bar shows of a state: description, total (None: it pulses), completed, and its own fields."""


@contextmanager
def shown_progress(style: ProgressStyle, *, is_shown: bool = True) -> Iterator[Show]:
    """Yields the function that shows a state; it shows nothing unless `is_shown`."""
    if not is_shown:
        yield lambda _: None
    elif not sys.stderr.isatty():
        yield _line_per_change(style)
    else:
        from rich.console import Console  # noqa: PLC0415 - completion of options draws no bar
        from rich.progress import Progress  # noqa: PLC0415

        with Progress(*style.columns(), console=Console(stderr=True, highlight=False)) as progress:
            task = progress.add_task("", total=None, failed="")
            yield lambda record: progress.update(task, **style.bar(record))


def _line_per_change(style: ProgressStyle) -> Show:
    last = ""

    def show(record: Any) -> None:
        nonlocal last
        line = style.line(record)
        if line != last:
            last = line
            note(line)

    return show


MAX_SHORT_CHARS = 60
LEAST_SHOWN_SECONDS = 0.001
_SOURCES: Mapping[str, str] = MappingProxyType({"virtual": "runner", "public": "declared"})
"""Where a model or an agent comes from: a runner publishes it, or an operator declared it."""


def seconds_ago(seconds: float) -> str:
    """Returns an age as text: 5s, 3m, 2h, 4d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def keep_alive_text(seconds: float | None) -> str:
    """Returns how long a model stays loaded after a request, such as "300s"; "-": not configured."""
    if seconds is None:
        return "-"
    return "never" if seconds < 0 else f"{seconds:g}s"


def moment_in(value: datetime | str) -> datetime:
    """Returns a time of a record, which is a text in documents."""
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def age(moment: datetime | str | None) -> str:
    """Returns how long ago, such as "3h"."""
    return "-" if moment is None else seconds_ago((datetime.now(UTC) - moment_in(moment)).total_seconds())


def ago(moment: datetime | str | None) -> str:
    """Returns an age as text, such as "3h ago"."""
    return "-" if moment is None else f"{age(moment)} ago"


def local(moment: datetime | str) -> str:
    """Returns a time of day on this machine."""
    return f"{moment_in(moment).astimezone():%Y-%m-%d %H:%M:%S}"


def source_word(kind: str) -> str:
    """Returns where a model or an agent of a kind comes from."""
    return _SOURCES.get(kind, kind)


def labels_text(labels: Mapping[str, str]) -> str:
    """Returns labels as selectors have them: `team=a,zone=b`."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _actor(name: str) -> str:
    from weft.kernel.principal import actor_words  # noqa: PLC0415 - it imports what verifies keys

    return actor_words(name)


def shortened(text: str) -> str:
    """Returns a text cut to a number of characters."""
    return text if len(text) <= MAX_SHORT_CHARS else f"{text[: MAX_SHORT_CHARS - 1]}…"


def span(seconds: float) -> str:
    """Returns a measured time with three digits, such as "0.313 s"; below a millisecond only that it is."""
    return f"{seconds:.3g} s" if seconds >= LEAST_SHOWN_SECONDS or seconds == 0 else "under 0.001 s"


FORMATS: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "actor": _actor,
        "age": age,
        "ago": ago,
        "commas": ",".join,
        "keep": keep_alive_text,
        "labels": labels_text,
        "local": local,
        "short": lambda found: shortened(found if isinstance(found, str) else ",".join(found)),
        "source": source_word,
        "size": size_words,
        "span": span,
        "spaced": lambda word: str(word).replace("_", " "),
        "yes": lambda flag: "yes" if flag else "no",
        "wait": wait_words,
    }
)
"""Formats by their names."""


def formatted(value: Any, form: str) -> str:
    """Returns a value in one of FORMATS, or one of Python's, such as "{:g}s"."""
    return form.format(value) if "{" in form else FORMATS[form](value)


def value_at(record: Any, path: str) -> Any:
    """Returns what is at a path of a record, such as "status.instance.phase"; None: nothing."""
    for step in path.split("."):
        record = record.get(step) if isinstance(record, Mapping) else getattr(record, step, None)
        if record is None:
            return None
    return record


def text_at(record: Any, paths: str, form: str = "") -> str | None:
    """Returns the text of what is at a path, or at the first of several ("a|b") with a value; None: nothing.

    `form`: see `formatted`.
    """
    path, *others = paths.split("|")
    value = value_at(record, path)
    if others:
        value = value or next(filter(None, (value_at(record, other) for other in others)), None)
    if value is None or value in ("", [], {}, ()):
        return None
    if form:
        return formatted(value, form)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
