"""Progress of a start or stop, stage by stage."""

import os
import sys
from typing import TYPE_CHECKING, Self

from weft_app.cli.output import say

if TYPE_CHECKING:
    from weft_app.cli.live_stages import LiveStages
    from weft_app.compose.up import Stage


_TENTHS = 10


class StageDisplay:
    """Stages as spinners that turn into ticks over a bar on a terminal, one plain line each elsewhere."""

    def __init__(self, total: int) -> None:
        """`total` is the number of stages."""
        self._stages: dict[str, Stage] = {}
        self._live: LiveStages | None = None
        self._tenths: dict[str, int] = {}
        """The share that was printed last of each stage, where there is no terminal."""
        # rich is imported for terminals alone; it heeds these variables as well.
        if sys.stdout.isatty() or os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE"):
            from weft_app.cli.live_stages import live_stages  # noqa: PLC0415

            self._live = live_stages(total, self._stages)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._live is not None:
            self._live.stop(failed=kind is not None)
        elif kind is not None:
            for stage in self._stages.values():
                if not stage.done:
                    say(f"fail {stage.name}: {stage.detail}\n")

    def show(self, stage: "Stage") -> None:
        """Shows that a stage began, progressed, or finished."""
        self._stages[stage.name] = stage
        if self._live is None and self._is_news(stage):
            say(f"{_word(stage)} {stage.text}\n")

    def _is_news(self, stage: "Stage") -> bool:
        """Whether a stage gets a line: of shares one in ten percent."""
        if stage.progress is None:
            return True
        tenth = int(stage.progress * _TENTHS)
        is_news = self._tenths.get(stage.name) != tenth
        self._tenths[stage.name] = tenth
        return is_news


def _word(stage: "Stage") -> str:
    if stage.is_warning:
        return "warn"
    return "ok  " if stage.done else "... "
