"""Adds the manual page to the wheel."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManPage(BuildHookInterface):
    """Writes weft.1 for the time of the build."""

    def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
        """Writes the page and adds it to the files of the wheel."""
        sys.path.insert(0, self.root)
        from weft_app.cli.man_page import man_page  # noqa: PLC0415 - of the sources that are built

        self._folder = TemporaryDirectory()
        page = Path(self._folder.name) / "weft.1"
        page.write_text(man_page(self.metadata.version), encoding="utf-8")
        build_data["shared_data"][str(page)] = "share/man/man1/weft.1"

    def finalize(self, *_: object) -> None:
        """Removes the page."""
        self._folder.cleanup()
