"""Runs a `weft` command on a machine with a wrong clock.

`python -m kit.clock_off SECONDS python -m weft_app.cli.main ...`
With `@FILE` the seconds are read from a file, which may change while the command runs.
"""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from weft.kernel.time.clock import SystemClock
from weft_app.cli.main import app


def main() -> None:
    """Shifts the clock of this process, then runs `weft`."""
    given = sys.argv[1]

    def utc_now(self: SystemClock) -> datetime:  # noqa: ARG001 - replaces a method
        seconds = Path(given[1:]).read_text() if given.startswith("@") else given
        return datetime.now(UTC) + timedelta(seconds=float(seconds))

    SystemClock.utc_now = utc_now  # type: ignore[method-assign]
    sys.argv = ["weft", *sys.argv[5:]]
    app()


if __name__ == "__main__":
    main()
