"""Writes the dashboards: `python -m boards <folder>`."""

import sys
from pathlib import Path

from boards import BOARDS
from boards.grafana import board_json


def main(folder: Path) -> None:
    """Writes one file per board."""
    folder.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (folder / f"{board.uid}.json").write_text(board_json(board), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
