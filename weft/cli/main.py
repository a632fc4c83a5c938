"""The entry point: commands are added here and written in modules of their own."""

from typing import Annotated

import typer

from weft import __version__
from weft.cli import serve
from weft.cli.chat import chat
from weft.cli.demo import demo
from weft.cli.doctor import doctor
from weft.cli.get import app as get_app
from weft.cli.get import ps
from weft.cli.up import up

app = typer.Typer(
    name="weft",
    help="One endpoint over every model you can reach or wake.",
    epilog="Start here: weft up",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up")(up)
app.command("demo")(demo)
app.command("chat")(chat)
app.command("ps")(ps)
app.command("doctor")(doctor)
app.add_typer(get_app, name="get")
app.add_typer(serve.app, name="serve")


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
