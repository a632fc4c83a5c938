"""`weft create` and `weft rotate`: resources that are made by options instead of a document."""

import typer

from weft_app.cli.secrets import create_secret, rotate_secret

app = typer.Typer(help="Create a secret.", no_args_is_help=True)
app.command("secret")(create_secret)

rotate_app = typer.Typer(help="Give a secret a new value.", no_args_is_help=True)
rotate_app.command("secret")(rotate_secret)
