"""`weft cancel`: end tasks."""

from typing import Annotated

import typer

from weft.kernel.errors import invalid_field
from weft_app.cli.completion import complete_tasks
from weft_app.cli.options import DEFAULT_HOME, HomeOption, reporting
from weft_app.cli.tasks import cancel_tasks, is_about_tasks


def cancel(
    tasks: Annotated[
        list[str],
        typer.Argument(metavar="task ID...", help="task and ids; or task/ID...", autocompletion=complete_tasks),
    ],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """End tasks: one that waits is never begun, one that runs is ended with its backend.

    Example: weft cancel task/task-5f0c0d2b7a9e4c31d6a8b2f4
    """
    with reporting():
        if not is_about_tasks(tasks):
            raise invalid_field(
                "task", "only tasks can be cancelled here; `weft operation cancel`, `weft batch cancel`"
            )
        cancel_tasks(tasks, home)
