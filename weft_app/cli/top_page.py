"""The page of `weft top`: a document of the mesh as lines for a terminal, a file or a pipe."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from weft.kernel.values.units import size_words, time_words
from weft_app.cli.mesh_api import Document
from weft_app.cli.output import Column, TextTable, custom_columns, shortened
from weft_app.cli.terminal import safe_text

BAR_CHARS = 10
MIN_COLUMNS, MIN_ROWS = 20, 6


class Sort(StrEnum):
    """The order of models."""

    NAME = "name"
    LOAD = "load"
    MEMORY = "memory"


TITLE, HEADER, PLAIN, WARNING, SELECTED = "bold", "dim", "", "yellow", "reverse"
"""Styles of lines in rich."""
Target = tuple[str, str]
"""A selectable row: "model" or "request", and its name or id."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the page. The text may have ANSI colors."""

    text: str
    style: str = PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Display settings of the page."""

    columns: int | None = None
    """None: any number, for a file or a pipe."""
    rows: int = sys.maxsize
    sort: Sort = Sort.NAME
    is_paused: bool = False
    is_colored: bool = False
    selected: Target | None = None
    message: str = ""
    """Replaces the list of keys; empty: none."""


def _bar(share: float) -> str:
    filled = round(max(0.0, min(1.0, share)) * BAR_CHARS)
    return "█" * filled + "░" * (BAR_CHARS - filled)


def _share_bar(key: str) -> Callable[[Document], str | None]:
    return lambda row: None if row[key] is None else f"{_bar(row[key])} {row[key] * 100:3.0f}%"


def _memory(total: str, used: Callable[[Document], int]) -> Callable[[Document], str | None]:
    """Returns a cell with a bar, the used and the total memory."""
    return lambda row: (
        f"{_bar(used(row) / row[total])} {size_words(used(row))} of {size_words(row[total])}" if row[total] else None
    )


_HOST = custom_columns(
    "HOST:host CPU CORES:cpuCount MEMORY RUNNERS:runners:commas?",
    CPU=_share_bar("cpuUtilization"),
    MEMORY=_memory("memoryTotalBytes", lambda host: int(host["memoryUsedBytes"])),
)
_DEVICE = custom_columns(
    "DEVICE:name BUSY MEMORY HOST:host?",
    BUSY=_share_bar("utilization"),
    MEMORY=_memory("totalBytes", lambda device: max(0, int(device["totalBytes"] - device["freeBytes"]))),
)
_MODEL = custom_columns(
    "MODEL:model RUNNER:runner? STATE SLOTS MEMORY TOK/S:tokensPerSecond:{:.1f} EXPIRES:until? PROGRESS? DETAIL:detail",
    STATE=lambda model: model["state"],
    SLOTS=lambda model: f"{model['slotsUsed']}/{model['slotsTotal']}",
    MEMORY=lambda model: size_words(model["memoryBytes"]) if model["memoryBytes"] else None,
    PROGRESS=_share_bar("loadProgress"),
)
_TOOK = {"TOOK": lambda request: time_words(request["seconds"])}
_RUNNING = custom_columns(
    "RUNNING:id TARGET:target STATE:state RUNNER:runner? TENANT:tenant? TOKENS:tokens TOOK "
    "TOK/S:tokensPerSecond:{:.1f}",
    **_TOOK,
)
_QUEUED = custom_columns(
    "WAITING:id TARGET:target STATE:state POS:position ETA:etaSeconds:eta TENANT:tenant? WAITS_FOR:waitsFor"
)
_ENDED = custom_columns(
    "ENDED:id TARGET:target OUTCOME TENANT:tenant? TOKENS TOOK TOK/S:tokensPerSecond:{:.1f}",
    OUTCOME=lambda request: request["outcome"],
    TOKENS=lambda request: "+".join(map(str, request["tokens"] or ())),
    **_TOOK,
)
_ORDERS: Mapping[Sort, Callable[[Document], tuple[Any, ...]]] = {
    Sort.NAME: lambda model: (model["model"], model["runner"]),
    Sort.LOAD: lambda model: (-model["slotsUsed"], model["model"], model["runner"]),
    Sort.MEMORY: lambda model: (-model["memoryBytes"], model["model"], model["runner"]),
}


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page, of the rows below a key of the document."""

    key: str
    columns: Sequence[Column]
    target: tuple[str, str] | None = None
    """Kind of its rows as targets, and the field with their names; None: they cannot be selected."""

    def rows(self, document: Mapping[str, Any], sort: Sort) -> list[Document]:
        """Returns the rows in order."""
        return sorted(document[self.key], key=_ORDERS[sort]) if self.key == "models" else document[self.key]

    def target_of(self, row: Document) -> Target | None:
        """Returns what a row selects."""
        return None if self.target is None else (self.target[0], row[self.target[1]])


SECTIONS = (
    Section("hosts", _HOST),
    Section("devices", _DEVICE),
    Section("models", _MODEL, ("model", "model")),
    Section("running", _RUNNING, ("request", "id")),
    Section("queue", _QUEUED, ("request", "id")),
    Section("ended", _ENDED, ("request", "id")),
)


def targets(document: Mapping[str, Any], sort: Sort) -> list[Target]:
    """Returns the selectable rows in the order of the page, each once."""
    found = (each.target_of(row) for each in SECTIONS for row in each.rows(document, sort))
    return list(dict.fromkeys(target for target in found if target is not None))


def page(document: Mapping[str, Any], view: View) -> list[Line]:
    """Returns the lines of a document: at most `view.rows`, none longer than `view.columns`."""
    rows = max(MIN_ROWS, view.rows)
    columns = None if view.columns is None else max(MIN_COLUMNS, view.columns)
    counts, speed = document["requests"], document["tokensPerSecond"]
    told = (
        f"running {counts['running']}  waiting {counts['waiting']}  tokens/s {'-' if speed is None else f'{speed:.1f}'}"
    )
    if more := max(0, counts["total"] - counts["running"] - counts["waiting"]):
        told += f"  not listed {more}"
    lines = [Line(_cut(f"weft top  {told}  {document['time']}", columns), TITLE)]
    if document["notice"]:
        lines.append(Line(_cut(document["notice"], columns), WARNING))
    filled = [_lines(section, document, view, columns) for section in SECTIONS if document[section.key]]
    for section, most in zip(filled, _shares(filled, rows - len(lines) - 1), strict=True):
        lines += _fitted(section, most)
    keys = f"q quit  p {'go on' if view.is_paused else 'pause'}  s sort ({view.sort})  ↑↓ select  c cancel  l logs"
    return [*lines, Line(_cut(view.message or keys, columns), TITLE if view.message else HEADER)]


def _cut(text: str, columns: int | None) -> str:
    return safe_text(text) if columns is None else shortened(safe_text(text), columns)


def _lines(section: Section, document: Mapping[str, Any], view: View, columns: int | None) -> list[Line]:
    """Returns the header and rows of a section."""
    rows = section.rows(document, view.sort)
    table = TextTable(section.columns, room=columns, is_cut=columns is not None)
    header, *texts = table.lines(rows, is_colored=view.is_colored)
    is_selected = [view.selected is not None and section.target_of(row) == view.selected for row in rows]
    styles = (SELECTED if each else PLAIN for each in is_selected)
    return [Line(header, HEADER), *map(Line, texts, styles)]


def _shares(sections: Sequence[Sequence[Line]], rows: int) -> list[int]:
    """Returns the number of lines per section: all if they fit, otherwise shorter sections first."""
    shares = [0] * len(sections)
    left = rows
    for done, index in enumerate(sorted(range(len(sections)), key=lambda index: len(sections[index]))):
        shares[index] = min(len(sections[index]), left // (len(sections) - done))
        left -= shares[index]
    return shares


def _fitted(lines: Sequence[Line], most: int) -> Sequence[Line]:
    """Returns the header and those rows that fit, the selected one among them, and how many are missing."""
    if len(lines) <= most or most < 2:
        return lines[:most]
    header, *rows = lines
    room = most - 2
    selected = next((index for index, row in enumerate(rows) if row.style == SELECTED), 0)
    first = max(0, min(selected - room + 1, len(rows) - room))
    return [header, *rows[first : first + room], Line(f"... and {len(rows) - room} more", HEADER)]
