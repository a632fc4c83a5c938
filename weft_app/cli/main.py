"""The entry point. The commands are in modules of their own; `lazy` says which, and imports them when they are used."""

from typing import Annotated

import typer

from weft import __version__
from weft_app.cli.lazy import LazyGroup

app = typer.Typer(
    name="weft",
    cls=LazyGroup,
    help="One endpoint over every model you can reach or wake.",
    epilog="Start here: weft up",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One endpoint over every model you can reach or wake."""


if __name__ == "__main__":
    app()
