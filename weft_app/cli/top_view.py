"""The page of `weft top`: from what is known of a mesh to lines of text, for any size of terminal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from weft.kernel.units import size_words, wait_words
from weft_app.cli.output import safe_text

COLUMN_GAP = "  "
BAR_CHARS = 10
MIN_COLUMNS, MIN_ROWS = 20, 6


class Sort(StrEnum):
    """The order of models."""

    NAME = "name"
    LOAD = "load"
    MEMORY = "memory"


SORTS: Mapping[str, Sort] = {"n": Sort.NAME, "l": Sort.LOAD, "m": Sort.MEMORY}
"""Keys that sort the models."""


class Style(StrEnum):
    """What a line is; the terminal decides how that looks."""

    TITLE = "title"
    HEADER = "header"
    PLAIN = "plain"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the page."""

    text: str
    style: Style = Style.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How the page is shown."""

    columns: int
    rows: int
    sort: Sort = Sort.NAME
    is_paused: bool = False


def page(document: Mapping[str, Any], view: View) -> list[Line]:
    """Returns the lines of a document of `weft top`: at most `view.rows`, none longer than `view.columns`."""
    columns, rows = max(MIN_COLUMNS, view.columns), max(MIN_ROWS, view.rows)
    foot = Line(_keys(view), Style.HEADER)
    sections = _sections(document, view)
    lines = [Line(_summary(document), Style.TITLE)]
    if document["notice"]:
        lines.append(Line(document["notice"], Style.WARNING))
    for section, most in zip(sections, _shares(sections, rows - len(lines) - 1), strict=True):
        lines += _fitted(section, most)
    return [Line(safe_text(line.text)[:columns], line.style) for line in [*lines, foot]]


def _summary(document: Mapping[str, Any]) -> str:
    counts, speed = document["requests"], document["tokensPerSecond"]
    shown = "-" if speed is None else f"{speed:.1f}"
    return f"weft top  running {counts['running']}  waiting {counts['waiting']}  tokens/s {shown}  {document['time']}"


def _keys(view: View) -> str:
    pause = "p go on" if view.is_paused else "p pause"
    return f"q quit  {pause}  sort: n name, l load, m memory (now {view.sort})"


def _sections(document: Mapping[str, Any], view: View) -> list[list[Line]]:
    devices = [_device(device) for device in document["devices"]]
    models = [_model(model) for model in _sorted(document["models"], view.sort)]
    queue = [_waiting(request) for request in document["queue"]]
    ended = [_end(request) for request in document["ended"]]
    bad = [model["state"] in _BAD for model in _sorted(document["models"], view.sort)]
    return [
        _table(("DEVICE", "HOST", "MEMORY", "USED", "FREE", "BUSY"), devices),
        _table(("MODEL", "RUNNER", "STATE", "SLOTS", "MEMORY", "DETAIL"), models, bad),
        _table(("WAITING", "TARGET", "STATE", "POS", "ETA", "WAITS FOR"), queue),
        _table(("ENDED", "TARGET", "OUTCOME", "TOKENS", "TOOK", "TOK/S"), ended),
    ]


_BAD = frozenset({"crash-loop", "failed"})


def _sorted(models: Sequence[Mapping[str, Any]], sort: Sort) -> list[Mapping[str, Any]]:
    if sort is Sort.LOAD:
        return sorted(models, key=lambda model: (-model["slotsUsed"], model["model"], model["runner"]))
    if sort is Sort.MEMORY:
        return sorted(models, key=lambda model: (-model["memoryBytes"], model["model"], model["runner"]))
    return sorted(models, key=lambda model: (model["model"], model["runner"]))


def _device(device: Mapping[str, Any]) -> tuple[str, ...]:
    total, free, busy = device["totalBytes"], device["freeBytes"], device["utilization"]
    used = max(0, total - free)
    share = 0.0 if not total else used / total
    bar = "#" * round(share * BAR_CHARS)
    return (
        device["name"],
        device["host"],
        f"[{bar:<{BAR_CHARS}}]",
        size_words(used),
        size_words(free),
        "-" if busy is None else f"{busy * 100:.0f}%",
    )


def _model(model: Mapping[str, Any]) -> tuple[str, ...]:
    progress = model["loadProgress"]
    state = model["state"] if progress is None else f"{model['state']} {progress * 100:.0f}%"
    memory = size_words(model["memoryBytes"]) if model["memoryBytes"] else "-"
    slots = f"{model['slotsUsed']}/{model['slotsTotal']}"
    return model["model"], model["runner"], state, slots, memory, model["detail"]


def _waiting(request: Mapping[str, Any]) -> tuple[str, ...]:
    position, eta = request["position"], request["etaSeconds"]
    return (
        request["id"],
        request["target"],
        request["state"],
        "-" if position is None else str(position),
        "-" if eta is None else f"{wait_words(eta)}s",
        request["waitsFor"],
    )


def _end(request: Mapping[str, Any]) -> tuple[str, ...]:
    tokens, speed = request["tokens"], request["tokensPerSecond"]
    return (
        request["id"],
        request["target"],
        request["outcome"],
        "-" if tokens is None else f"{tokens[0]}+{tokens[1]}",
        f"{round(request['seconds'], 3):.3g}s",
        "-" if speed is None else f"{speed:.1f}",
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], bad: Sequence[bool] = ()) -> list[Line]:
    """Returns a header and rows, as wide as their widest cells."""
    cells = [[safe_text(cell) or "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]

    def joined(row: Sequence[str]) -> str:
        return COLUMN_GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    styles = [Style.WARNING if is_bad else Style.PLAIN for is_bad in bad] or [Style.PLAIN] * len(cells)
    return [
        Line(joined(titles), Style.HEADER),
        *(Line(joined(row), style) for row, style in zip(cells, styles, strict=True)),
    ]


def _shares(sections: Sequence[Sequence[Line]], rows: int) -> list[int]:
    """Returns how many lines each section gets: all where they fit, else the shorter ones first."""
    shares = [0] * len(sections)
    left = rows
    for done, place in enumerate(sorted(range(len(sections)), key=lambda place: len(sections[place]))):
        fair = left // (len(sections) - done)
        shares[place] = min(len(sections[place]), fair)
        left -= shares[place]
    return shares


def _fitted(lines: Sequence[Line], most: int) -> Iterator[Line]:
    """Yields the lines; the last one that fits says how many do not."""
    if len(lines) <= most:
        yield from lines
        return
    if most < 2:
        yield from lines[:most]
        return
    yield from lines[: most - 1]
    yield Line(f"... and {len(lines) - most + 1} more", Style.HEADER)
