"""Progress of a start or stop, stage by stage."""

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from weft_app.cli.output import say

if TYPE_CHECKING:
    from weft_app.compose.up import Stage

BAR_CHARS = 40


class StageDisplay:
    """Stages as spinners that turn into ticks over a bar on a terminal, one plain line each elsewhere."""

    def __init__(self, total: int) -> None:
        """`total` is the number of stages."""
        self._total = total
        self._began = time.monotonic()
        self._failed = False
        self._stages: dict[str, Stage] = {}
        self._spinner = Spinner("dots")
        self._console = Console(highlight=False)
        # Rendered at each refresh, so that spinner and seconds move between events.
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=10)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._failed = kind is not None
        if self._console.is_terminal:
            self._live.stop()
        elif self._failed:
            for stage in self._stages.values():
                if not stage.done:
                    say(f"fail {stage.name}: {stage.detail}\n")

    def show(self, stage: "Stage") -> None:
        """Shows that a stage began, progressed, or finished."""
        self._stages[stage.name] = stage
        if not self._console.is_terminal:
            say(f"{_word(stage)} {stage.name}: {stage.detail}\n")

    def _render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 1))
        for stage in self._stages.values():
            rows.add_row(self._mark(stage), f"{stage.name}: {stage.detail}")
        done = sum(stage.done for stage in self._stages.values())
        foot = Table.grid(padding=(0, 1))
        seconds = f"{time.monotonic() - self._began:.1f} s"
        foot.add_row(ProgressBar(total=self._total, completed=done, width=BAR_CHARS), f"{done}/{self._total}", seconds)
        return Group(rows, foot)

    def _mark(self, stage: "Stage") -> RenderableType:
        if stage.done:
            return Text("!", style="yellow") if stage.is_warning else Text("✓", style="green")
        return Text("✗", style="red") if self._failed else self._spinner


def _word(stage: "Stage") -> str:
    if stage.is_warning:
        return "warn"
    return "ok  " if stage.done else "... "
