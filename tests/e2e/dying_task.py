"""Run a `weft` command in which a background task has a bug: `dying_task.py TASK python -m weft_app.cli.main ...`."""

import asyncio
import sys
from collections.abc import Coroutine

from weft.kernel.services import service_lifecycle as service


def main() -> None:
    """Have the critical task of this name die as soon as it runs, then be `weft`."""
    dying, start = sys.argv[1], service.start_critical

    def start_critical(work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        if name != dying:
            return start(work, name=name)
        work.close()
        return start(_die(), name=name)

    service.start_critical = start_critical
    sys.argv = ["weft", *sys.argv[5:]]
    from weft_app.cli.main import app  # noqa: PLC0415 - only now

    app()


async def _die() -> None:
    raise ZeroDivisionError("a bug")


if __name__ == "__main__":
    main()
