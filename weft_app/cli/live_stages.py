"""Stages of a start on a terminal: spinners that turn into ticks, over a bar. It imports rich, unlike `stages`."""

import time
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft_app.compose.up import Stage

BAR_CHARS = 40


def live_stages(total: int, stages: "Mapping[str, Stage]") -> "LiveStages | None":
    """Returns a display of `total` stages; None where rich finds no terminal."""
    console = Console(highlight=False)
    return LiveStages(console, total, stages) if console.is_terminal else None


class LiveStages:
    """Renders stages until `stop`."""

    def __init__(self, console: Console, total: int, stages: "Mapping[str, Stage]") -> None:
        """`stages` changes while they are rendered."""
        self._total = total
        self._began = time.monotonic()
        self._failed = False
        self._stages = stages
        self._spinner = Spinner("dots")
        # Rendered at each refresh, so that spinner and seconds move between events.
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=10)

    def start(self) -> None:
        """Starts to render."""
        self._live.start()

    def stop(self, *, failed: bool) -> None:
        """Renders once more and stops; `failed`: unfinished stages get a cross."""
        self._failed = failed
        self._live.stop()

    def _render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 1))
        for stage in self._stages.values():
            rows.add_row(self._mark(stage), stage.text)
        done = sum(stage.done for stage in self._stages.values())
        foot = Table.grid(padding=(0, 1))
        seconds = f"{time.monotonic() - self._began:.1f} s"
        foot.add_row(ProgressBar(total=self._total, completed=done, width=BAR_CHARS), f"{done}/{self._total}", seconds)
        return Group(rows, foot)

    def _mark(self, stage: "Stage") -> RenderableType:
        if stage.done:
            return Text("!", style="yellow") if stage.is_warning else Text("✓", style="green")
        return Text("✗", style="red") if self._failed else self._spinner
