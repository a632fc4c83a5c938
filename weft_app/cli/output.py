"""Output: tables for people, JSON and YAML for programs and files."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weft.kernel.text.line_breaks import escaped
from weft.kernel.values.units import size_words, time_words, wait_words
from weft_app.cli.terminal import (
    BOLD,
    GREEN,
    PLAIN,
    RED,
    YELLOW,
    is_err_terminal,
    is_out_terminal,
    note,
    safe_text,
    say,
)

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


COLUMN_GAP = "  "
INDENT = "  "
FACT_CHARS = 13
TEXTS = ("table", "wide")
"""Output formats for people."""
STATE_TITLES = frozenset({"STATE", "STATUS", "OUTCOME"})
"""Columns with a colored word on a terminal, unless NO_COLOR is set."""
STATE_COLORS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("ready", "active", "running", "completed", "succeeded", "installed", "leader"), GREEN)
    | dict.fromkeys(("loading", "queued", "pending", "draining", "stopping", "changing", "outdated"), YELLOW)
    | dict.fromkeys(("failed", "crash-loop", "broken", "gone", "orphaned"), RED)
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table or line of a page: the title, and the source of the text in a record."""

    title: str
    source: str | Callable[[Any], str | None]
    """A path in the record (see `weft_app.cli.output`), or a function."""
    form: str = ""
    """A format of `formatted`."""
    ticks: bool = False
    """Whether the value changes with time only, so that a watch does not print the row again for it."""
    min_chars: int = 0
    """Minimum width, as a watch prints the header before any row."""
    is_minor: bool = False
    """Whether a terminal that is too narrow omits it before the others."""

    def text(self, record: Any) -> str | None:
        """Returns the text of a record; None prints "-" in a table and no line on a page."""
        if not isinstance(self.source, str):
            return self.source(record)
        return text_at(record, self.source, self.form)


def custom_columns(text: str, **functions: Callable[[Any], str | None]) -> tuple[Column, ...]:
    """Parses columns as in kubectl: TITLE:PATH or TITLE:PATH:FORMAT; a TITLE alone uses one of `functions`.

    An underscore in a title is a space. At the end, a tilde marks a column that `ticks`, a question mark one that
    `is_minor`.
    """
    found = []
    for word in text.split():
        ticking = word.removesuffix("?")
        title, *path = ticking.removesuffix("~").split(":", 2)
        source, form = (*path, "")[:2] if path else (functions[title], "")
        ticks, is_minor = ticking.endswith("~"), word.endswith("?")
        found.append(Column(title.replace("_", " "), source, form, ticks=ticks, is_minor=is_minor))
    return tuple(found)


SHORT_ID_CHARS = 8
"""Minimum number of characters of a shortened id after its kind. Commands accept the beginnings of ids."""
_ID_CHARS = 24
_SHORTENED = re.compile(rf"(?:req|task|batch|op)-[0-9a-f]{{{_ID_CHARS}}}")
"""Ids that services generate and `weft_app.cli.short_ids` completes."""


def short_ids(texts: Iterable[str]) -> dict[str, str]:
    """Returns a beginning with … for each generated id among the texts, unique among them."""
    found = {text for text in texts if _SHORTENED.fullmatch(text)}
    for chars in range(SHORT_ID_CHARS, _ID_CHARS):
        short = {each: shortened(each, each.index("-") + chars + 2) for each in found}
        if len(set(short.values())) == len(found):
            return short
    return {}


MIN_COLUMN_CHARS = 10
"""A column that is cut to fit a terminal keeps at least this width."""
WANTED_COLUMN_CHARS = 20
"""Minor columns are omitted before others are cut below this width."""
MIN_NAME_CHARS = 32
"""A first column that is cut, in the middle of its names, keeps at least this width: most names are shorter."""


def fitted(columns: Sequence[Column], widths: Mapping[int, int], room: int) -> dict[int, int]:
    """Returns the widths of the columns to show, by their indexes.

    If they need more than `room` characters, the widest are cut. Minor columns are omitted rather than cutting others
    below WANTED_COLUMN_CHARS, the others, from right to left, rather than below MIN_COLUMN_CHARS, and the first one
    below MIN_NAME_CHARS.
    """
    kept = dict(widths)
    for index in sorted(list(widths)[1:], key=lambda index: (not columns[index].is_minor, -index)):
        least = WANTED_COLUMN_CHARS if columns[index].is_minor else MIN_COLUMN_CHARS
        if _chars({each: min(width, least if each else MIN_NAME_CHARS) for each, width in kept.items()}) <= room:
            break
        del kept[index]
    return _cut(kept, room)


def _cut(widths: Mapping[int, int], room: int) -> dict[int, int]:
    """Returns widths that fit, if they can without cutting a column below its minimum."""
    found = dict(widths)
    while _chars(found) > room:
        spare = {index: width - (MIN_COLUMN_CHARS if index else MIN_NAME_CHARS) for index, width in found.items()}
        widest = max(spare, key=lambda index: spare[index])
        if spare[widest] <= 0:
            break
        found[widest] -= 1
    return found


def _chars(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + len(COLUMN_GAP) * (len(widths) - 1)


class TextTable:
    """A table in kubectl's style: no frames, columns as wide as the rows seen so far."""

    def __init__(
        self,
        columns: Sequence[Column],
        *,
        is_cut: bool = True,
        wider: str = "a wider terminal",
        room: int | None = None,
    ) -> None:
        """`is_cut`: fit lines into `room` characters, by default the width of a terminal, if there is one.

        `wider` names what shows the omitted columns.
        """
        self._columns = columns
        if room is None and is_out_terminal():
            room = shutil.get_terminal_size().columns
        self._room = room if is_cut else None
        self._wider = wider
        self._is_colored = is_out_terminal() and not os.environ.get("NO_COLOR")
        self._ids: Sequence[str] = ()
        """Generated ids in the first rows."""
        self.titles = [column.title for column in columns]
        self._widths = dict(enumerate(max(column.min_chars, len(column.title)) for column in columns))

    def cells(self, row: Any) -> list[str]:
        """Returns the row's cells, safe for a terminal; an empty one is "-"."""
        return [safe_text(column.text(row) or "") or "-" for column in self._columns]

    def fingerprint(self, row: Any) -> tuple[str | None, ...]:
        """Returns the values that make a watch print the row again when they change."""
        return tuple(column.text(row) for column in self._columns if not column.ticks)

    def text(self, rows: Iterable[Any]) -> str:
        """Returns header and rows; on a terminal the header is bold, and a last line names the omitted columns."""
        header, *lines = self.lines(rows, is_colored=self._is_colored)
        if is_out_terminal():
            header = f"{BOLD}{header}{PLAIN}"
        omitted = [title for index, title in enumerate(self.titles) if index not in self._widths]
        if omitted:
            lines.append(f"({self._wider} also shows {', '.join(omitted)})")
        return "\n".join([header, *lines]) + "\n"

    def plain_text(self, rows: Iterable[Any]) -> str:
        """Returns header and rows."""
        return "\n".join(self.lines(rows, is_colored=False)) + "\n"

    def lines(self, rows: Iterable[Any], *, is_colored: bool) -> list[str]:
        """Returns header and rows."""
        table = [self.cells(row) for row in rows]
        if self._room is not None:
            short = short_ids(cell for cells in table for cell in cells)
            self._ids, table = tuple(short), [[short.get(cell, cell) for cell in cells] for cells in table]
        for cells in table:
            self._widen(cells)
        if self._room is not None:
            # A watch may print the header before any row.
            least = 0 if table else MIN_COLUMN_CHARS
            likely = {index: max(width, least) for index, width in self._widths.items()}
            self._widths = fitted(self._columns, likely, self._room)
        return [self._line(cells, is_colored=is_colored) for cells in (self.titles, *table)]

    def line(self, cells: Sequence[str]) -> str:
        """Returns one more row below those already printed."""
        if self._room is not None:
            short = short_ids((*self._ids, *cells))
            cells = [short.get(cell, cell) for cell in cells]
        self._widen(cells)
        if self._room is not None:
            self._widths = _cut(self._widths, self._room)
        return self._line(cells, is_colored=self._is_colored) + "\n"

    def row(self, row: Any) -> str:
        """Returns a record as one more row below those already printed."""
        return self.line(self.cells(row))

    def _widen(self, cells: Sequence[str]) -> None:
        self._widths = {index: max(width, len(cells[index])) for index, width in self._widths.items()}

    def _line(self, cells: Sequence[str], *, is_colored: bool) -> str:
        shown = []
        for index, width in self._widths.items():
            cell = (shortened if index else shortened_name)(cells[index], width).ljust(width)
            color = STATE_COLORS.get(cells[index]) if is_colored and self.titles[index] in STATE_TITLES else None
            shown.append(cell if color is None else f"{color}{cell}{PLAIN}")
        line = COLUMN_GAP.join(shown).rstrip()
        if self._room is not None and _chars(self._widths) > self._room:
            plain = COLUMN_GAP.join(cells[index].ljust(width) for index, width in self._widths.items()).rstrip()
            return shortened(plain, self._room)
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The output of records of one kind: as a table, as names, as JSON and as YAML."""

    columns: Sequence[Column]
    wide: Sequence[Column] = ()
    name: Callable[[Any], str] = str
    """Returns the output of `-o name`."""
    kind: str = ""
    """Kind of the document with several records."""
    document: Callable[[Any], Any] = dict
    """Returns a record as JSON types."""
    lasting: Callable[[Any], Any] = dict
    """Returns the part of a record that makes a watch print it again when it changes."""
    yaml: Callable[[Any], str] | None = None
    """Returns a record as a YAML document, for a stream of them. None: one document, as with JSON."""
    plural: str = ""
    """Plural in the note about an empty stream."""
    empty: str = ""
    """Note on stderr below a table without rows."""

    def table(self, output: str) -> TextTable:
        """Returns an empty table with the columns of an output format."""
        if output == "wide":
            return TextTable(self.wide, is_cut=False)
        return TextTable(self.columns, wider="-o wide" if self.wide else "a wider terminal")

    def text(self, rows: Iterable[Any], output: str, whole: Callable[[], Any] | None = None) -> str:
        """Returns records as text; `whole` returns their document if it is not `{kind, items}`."""
        if output in TEXTS:
            return self.table(output).text(rows)
        if output == "name":
            return "".join(f"{self.name(row)}\n" for row in rows)
        if output == "yaml" and self.yaml is not None:
            return "---\n".join(map(self.yaml, rows)) or f"# there are no {self.plural}\n"
        document = {"kind": self.kind, "items": [self.document(row) for row in rows]} if whole is None else whole()
        return document_text(document, output)

    def print(self, rows: Iterable[Any], output: str, whole: Callable[[], Any] | None = None) -> None:
        """Prints records; see `text`. A table without rows has its note on stderr."""
        shown = list(rows)
        say(self.text(shown, output, whole))
        if self.empty and not shown and output in TEXTS:
            note(self.empty)


class Feed:
    """Formats records of a listing one by one."""

    def __init__(self, listing: Listing, output: str) -> None:
        self._listing = listing
        self._output = output
        self.table = listing.table(output)

    def first(self, rows: Iterable[Any]) -> str:
        """Returns the first rows, in a table with a header."""
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
    """Prints the outcome of one record: as a line, as its name, or as a document."""
    say(f"{text}\n" if output == "table" else f"{name}\n" if output == "name" else document_text(document, output))


def print_page(output: str, text: Callable[[], str], document: Callable[[], Any]) -> None:
    """Prints one record as text or as a document."""
    say(text() if output == "table" else document_text(document(), output))


def document_text(document: Any, output: str) -> str:
    """Returns one document as JSON or YAML."""
    if output != "yaml":
        return json_text(document)
    import yaml  # noqa: PLC0415 - most commands print no YAML, and all should start fast

    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text


def json_text(document: Any) -> str:
    """Returns a document as indented JSON."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def json_line(document: Any) -> str:
    """Returns a document as one line of JSON."""
    line = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return escaped(line).decode("utf-8", "surrogatepass") + "\n"


def print_table(rows: Iterable[Any], columns: Sequence[Column]) -> None:
    """Prints a table."""
    say(TextTable(columns).text(rows))


def page(columns: Sequence[Column], record: Any, title_chars: int = FACT_CHARS) -> Iterator[str]:
    """Yields a line with title and text, safe for a terminal, per column with a text."""
    for column in columns:
        text = column.text(record)
        if text is not None:
            yield safe_text(f"{f'{column.title}:':<{title_chars}} {text}")


def block(title: str, lines: Iterable[str], indent: str = INDENT) -> Iterator[str]:
    """Yields a title and indented lines; nothing without lines."""
    for index, line in enumerate(lines):
        if not index:
            yield f"{title}:"
        yield f"{indent}{line}"


def table_block(title: str, columns: Sequence[Column], rows: Sequence[Any], *, is_cut: bool = False) -> Iterator[str]:
    """Yields a title and a table, which `is_cut` fits into a terminal; nothing without rows."""
    room = shutil.get_terminal_size().columns - len(INDENT) if is_cut and is_out_terminal() else None
    table = TextTable(columns, is_cut=room is not None, room=room)
    return block(title, table.plain_text(rows).splitlines() if rows else ())


Show = Callable[[Any], None]
"""Shows the current state of a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStyle:
    """How to show the progress of records of one kind."""

    line: Callable[[Any], str]
    """Returns the line of a state without a terminal."""
    columns: Callable[[], "Sequence[ProgressColumn]"]
    """Returns new columns for one bar."""
    bar: Callable[[Any], Mapping[str, Any]]
    """Returns the bar's fields: description, total (None: it pulses), completed, and its own."""


@contextmanager
def shown_progress(style: ProgressStyle, *, is_shown: bool = True) -> Iterator[Show]:
    """Yields a function that shows a state, or does nothing unless `is_shown`."""
    if not is_shown:
        yield lambda _: None
    elif not is_err_terminal():
        yield _line_per_change(style)
    else:
        from rich.console import Console  # noqa: PLC0415 - completion of options draws no bar
        from rich.progress import Progress  # noqa: PLC0415

        with Progress(*style.columns(), console=Console(stderr=True, highlight=False)) as progress:
            task = progress.add_task("", total=None, failed="")
            # rich removes bells, but no escape sequences.
            yield lambda record: progress.update(task, **_safe(style.bar(record)))


def _safe(bar: Mapping[str, Any]) -> dict[str, Any]:
    return {name: safe_text(value) if isinstance(value, str) else value for name, value in bar.items()}


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
_SOURCES: Mapping[str, str] = MappingProxyType({"virtual": "runner", "public": "declared"})
"""Source of a model or agent: published by a runner, or declared by an operator."""


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
    """Parses a time of a record, which is text in documents."""
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def age(moment: datetime | str | None) -> str:
    """Returns an age, such as "3h"."""
    return "-" if moment is None else seconds_ago((datetime.now(UTC) - moment_in(moment)).total_seconds())


def ago(moment: datetime | str | None) -> str:
    """Returns an age, such as "3h ago"."""
    return "-" if moment is None else f"{age(moment)} ago"


def local(moment: datetime | str) -> str:
    """Returns the local time of day."""
    return f"{moment_in(moment).astimezone():%Y-%m-%d %H:%M:%S}"


def source_word(kind: str) -> str:
    """Returns the source of a model or agent."""
    return _SOURCES.get(kind, kind)


def _actor(name: str) -> str:
    from weft.kernel.access.principal import actor_words  # noqa: PLC0415 - it imports what verifies keys

    return actor_words(name)


def shortened(text: str, max_chars: int = MAX_SHORT_CHARS) -> str:
    """Returns a text with … for what exceeds `max_chars`."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def shortened_name(text: str, max_chars: int) -> str:
    """Returns a name with … in its middle for what exceeds `max_chars`: names differ at their ends, too."""
    if len(text) <= max_chars:
        return text
    end = (max_chars - 1) // 2
    return f"{text[: max_chars - 1 - end]}…{text[len(text) - end :]}"


FORMATS: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "actor": _actor,
        "age": age,
        "ago": ago,
        "commas": ",".join,
        "eta": lambda seconds: f"{wait_words(seconds)}s",
        "keep": keep_alive_text,
        "labels": lambda labels: ",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        "local": local,
        "short": lambda found: shortened(found if isinstance(found, str) else ",".join(found)),
        "source": source_word,
        "size": size_words,
        "time": time_words,
        "spaced": lambda word: str(word).replace("_", " "),
        "yes": lambda flag: "yes" if flag else "no",
        "wait": wait_words,
    }
)


def formatted(value: Any, form: str) -> str:
    """Returns a value in one of FORMATS, or a Python format such as "{:g}s"."""
    return form.format(value) if "{" in form else FORMATS[form](value)


def value_at(record: Any, path: str) -> Any:
    """Returns the value at a path of a record, such as "status.instance.phase"; None if there is none."""
    for step in path.split("."):
        record = record.get(step) if isinstance(record, Mapping) else getattr(record, step, None)
        if record is None:
            return None
    return record


def text_at(record: Any, paths: str, form: str = "") -> str | None:
    """Returns the text at the first path ("a|b") with a value; None if there is none. `form`: see `formatted`."""
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
