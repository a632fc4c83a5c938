"""`weft load`, `weft unload` and `weft logs`: one model on its runner."""

import sys
from typing import Annotated

import typer

from weft.cli.completion import complete_model
from weft.cli.options import DEFAULT_HOME, HomeOption, note, reporting
from weft.cli.output import safe_text, say
from weft.client.resources import connect_registry
from weft.client.runners import connect_runner_of
from weft.kernel.names import require_name

DEFAULT_LINES = 100
MAX_LINES = 1000
TIMEOUT_SECONDS = 600.0

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model.", autocompletion=complete_model)]
TimeoutOption = Annotated[float, typer.Option(min=0.1, help="Longest time to wait in seconds.")]


def load(model: ModelArgument, timeout: TimeoutOption = TIMEOUT_SECONDS, home: HomeOption = DEFAULT_HOME) -> None:
    """Wake or load a model, and keep it loaded until it is unloaded.

    Example: weft load qwen
    """
    with reporting():
        require_name(model, "MODEL")
        with connect_registry(home=home) as registry, connect_runner_of(registry, model) as runner:
            runner.load(timeout)
        say(f"model/{model} loaded\n")


def unload(model: ModelArgument, timeout: TimeoutOption = TIMEOUT_SECONDS, home: HomeOption = DEFAULT_HOME) -> None:
    """Let the requests of a model end, then put it to sleep; the next request wakes it.

    Example: weft unload qwen
    """
    with reporting():
        require_name(model, "MODEL")
        with connect_registry(home=home) as registry, connect_runner_of(registry, model) as runner:
            runner.unload(timeout)
        say(f"model/{model} unloaded\n")


def logs(
    model: ModelArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=MAX_LINES, help="Last lines.")] = DEFAULT_LINES,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show what the backend of a model printed.

    Example: weft logs qwen -f
    """
    with reporting(interrupted=0):
        require_name(model, "MODEL")
        with connect_registry(home=home) as registry, connect_runner_of(registry, model) as runner:
            for response in runner.log_lines(lines, follow=follow):
                if response.lost_line_count:
                    note(f"{response.lost_line_count} lines were lost: this reader is too slow")
                sys.stdout.write("".join(f"{safe_text(line)}\n" for line in response.lines))
                sys.stdout.flush()
