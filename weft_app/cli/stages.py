"""Progress of a start or stop, stage by stage."""

import os
import time
from typing import TYPE_CHECKING, Self

from weft_app.cli.terminal import is_out_terminal, safe_text, say

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from weft_app.compose.model_starts import Stage

STARTING = "starting weft "
"""Beginning of the first line of `weft up`."""
STOP_LINE = "  stop with Ctrl-C"
"""Last line that `weft up` prints at its start."""
_TENTHS = 10
BAR_CHARS = 40


class StageDisplay:
    """Stages as spinners that turn into ticks above a bar on a terminal, one plain line each elsewhere."""

    def __init__(self, total: int) -> None:
        """`total` is the number of stages."""
        self._total = total
        self._stages: dict[str, Stage] = {}
        self._tenths: dict[str, int] = {}
        """The last printed tenth of each stage, without a terminal."""
        self._began = time.monotonic()
        self._failed = False
        self._live = self._found_terminal()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._failed = kind is not None
        if self._live is not None:
            self._live.stop()
        elif self._failed:
            for stage in self._stages.values():
                if not stage.done:
                    say(f"fail {stage.name}: {stage.detail}\n")

    def show(self, stage: "Stage") -> None:
        """Shows that a stage started, progressed or finished."""
        self._stages[stage.name] = stage
        if self._live is None and self._is_news(stage):
            say(f"{'warn' if stage.is_warning else 'ok  ' if stage.done else '... '} {stage.text}\n")

    def _is_news(self, stage: "Stage") -> bool:
        """Whether to print a line for a stage; of progress one per 10 %."""
        if stage.progress is None:
            return True
        tenth = int(stage.progress * _TENTHS)
        is_news = self._tenths.get(stage.name) != tenth
        self._tenths[stage.name] = tenth
        return is_news

    def _found_terminal(self) -> "Live | None":
        """Returns the display that renders spinners and seconds at intervals; None without a terminal."""
        # rich is imported only for terminals; it respects these variables as well.
        if not (is_out_terminal() or os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE")):
            return None
        from rich.console import Console, Group  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415
        from rich.progress_bar import ProgressBar  # noqa: PLC0415
        from rich.spinner import Spinner  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        spinner = Spinner("dots")

        def render() -> "RenderableType":
            rows, foot = Table.grid(padding=(0, 1)), Table.grid(padding=(0, 1))
            for stage in self._stages.values():
                mark: RenderableType = Text("✗", style="red") if self._failed else spinner
                if stage.done:
                    mark = Text("!", style="yellow") if stage.is_warning else Text("✓", style="green")
                rows.add_row(mark, Text(safe_text(stage.text)))
            done = sum(stage.done for stage in self._stages.values())
            bar = ProgressBar(total=self._total, completed=done, width=BAR_CHARS)
            foot.add_row(bar, f"{done}/{self._total}", f"{time.monotonic() - self._began:.1f} s")
            return Group(rows, foot)

        console = Console(highlight=False)
        return Live(get_renderable=render, console=console, refresh_per_second=10) if console.is_terminal else None
