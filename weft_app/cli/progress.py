"""Progress of what runs in the mesh, on stderr: a bar on a terminal, one line per change elsewhere."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft_app.cli.options import note

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

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
