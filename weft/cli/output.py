"""Printing resources: a table for people, proto JSON or YAML for programs."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from weft.cli.options import OutputFormat


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its title and how to get the cell from a row."""

    title: str
    cell: Callable[[Any], str]


def say(text: str) -> None:
    """Tell the user now: output that goes to a file or a pipe is otherwise held back until the program ends."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_resources(kind: str, rows: Sequence[Any], columns: Sequence[Column], output: OutputFormat) -> None:
    """Print `rows`. As JSON or YAML it is one document `{kind, items}` in the proto JSON form."""
    if output is OutputFormat.TABLE:
        print_table(rows, columns)
        return
    print_document({"kind": kind, "items": [_plain(row) for row in rows]}, output)


def print_document(document: Any, output: OutputFormat) -> None:
    """Print one document as JSON or YAML."""
    if output is OutputFormat.YAML:
        sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    else:
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def print_table(rows: Sequence[Any], columns: Sequence[Column]) -> None:
    """Print a table in kubectl's manner: no frames, no colour in a pipe, never cut when nobody watches."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.title, no_wrap=True)
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    console = Console(highlight=False)
    console.print(table) if console.is_terminal else Console(highlight=False, width=10_000).print(table)


def _plain(row: Any) -> Any:
    return MessageToDict(row) if isinstance(row, Message) else row


def seconds_ago(seconds: float) -> str:
    """An age as people write it: 5s, 3m, 2h, 4d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"
