"""Showing how something comes up."""

import sys
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from weft.host.stage import ShowProgress, Stage


class StageDisplay:
    """Shows stages: spinners that turn into ticks on a terminal, one plain line each otherwise."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._stages: dict[str, Stage] = {}
        self._live = Live(console=self._console, refresh_per_second=10, transient=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.update(self._render())
            self._live.stop()

    @property
    def show(self) -> ShowProgress:
        """Where stages are told."""
        return self._show

    def _show(self, stage: Stage) -> None:
        self._stages[stage.name] = stage
        if self._console.is_terminal:
            self._live.update(self._render())
        else:
            sys.stdout.write(f"{'ok  ' if stage.done else '... '} {stage.name}: {stage.detail}\n")
            sys.stdout.flush()

    def failed(self) -> None:
        """Leave the display as it stands: what is not ticked did not succeed."""
        for stage in self._stages.values():
            if not stage.done and not self._console.is_terminal:
                sys.stdout.write(f"fail {stage.name}: {stage.detail}\n")

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for stage in self._stages.values():
            table.add_row("[green]✓[/green]" if stage.done else Spinner("dots"), f"{stage.name}: {stage.detail}")
        return table
