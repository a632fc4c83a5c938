"""`weft config`: settings of the whole mesh that can change while it runs."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.client.resources import connect_registry
from weft.kernel.errors import invalid_field
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, reporting
from weft_app.cli.output import Column, print_document, print_table

if TYPE_CHECKING:
    from weft.client.resources import MeshSettings

app = typer.Typer(help="Show and change settings of the whole mesh.", no_args_is_help=True)

ALLOW_CLOUD_FALLBACK = "allowCloudFallback"

_MEANINGS = {ALLOW_CLOUD_FALLBACK: "routes may fall back to models off the premises"}
_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_COLUMNS = (
    Column("NAME", lambda row: row["name"]),
    Column("VALUE", lambda row: str(row["value"]).lower()),
    Column("MEANING", lambda row: _MEANINGS[row["name"]]),
)


@app.command("get")
def get(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the settings of the mesh.

    Example: weft config get -o json
    """
    with reporting():
        with connect_registry(home=home) as registry:
            settings = registry.settings()
        _show(settings, output)


@app.command("set")
def set_values(
    assignments: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="What to set.")],
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Change a setting; it survives restarts and applies from the next request on.

    Example: weft config set allowCloudFallback=false
    """
    with reporting():
        wanted = _parsed(assignments)
        with connect_registry(home=home) as registry:
            settings = registry.update_settings(allow_cloud_fallback=wanted.get(ALLOW_CLOUD_FALLBACK))
        _show(settings, output)


def _parsed(assignments: list[str]) -> dict[str, bool]:
    """Parses the settings. Raises INVALID_ARGUMENT naming what is wrong."""
    found: dict[str, bool] = {}
    for assignment in assignments:
        name, separator, word = assignment.partition("=")
        if not separator:
            raise invalid_field("NAME=VALUE", f"{assignment[:64]!r} has no '='")
        if name not in _MEANINGS:
            raise invalid_field(name[:64] or "NAME", f"there is no such setting; there is {', '.join(_MEANINGS)}")
        if name in found:
            raise invalid_field(name, "is given twice")
        if word.lower() not in _WORDS:
            raise invalid_field(name, "must be true or false")
        found[name] = _WORDS[word.lower()]
    return found


def _show(settings: "MeshSettings", output: OutputFormat) -> None:
    document: dict[str, Any] = {ALLOW_CLOUD_FALLBACK: settings.allow_cloud_fallback}
    if output is OutputFormat.TABLE:
        print_table([{"name": name, "value": value} for name, value in document.items()], _COLUMNS)
    else:
        print_document(document, output)
