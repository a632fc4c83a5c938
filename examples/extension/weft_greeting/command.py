"""`weft mesh greet`."""

from typing import Annotated

import typer

from weft_app.cli.terminal import say


def greet(name: Annotated[str, typer.Argument(help="Whom to greet.")] = "world") -> None:
    """Print a greeting.

    Example: weft mesh greet you
    """
    say(f"hello, {name}\n")
