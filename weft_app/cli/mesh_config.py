"""`weft config`: the effective configuration, and settings of the whole mesh that can change while it runs."""

import json
import os
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from weft.kernel.errors.error_tree import invalid_field
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption, OutputFormat, OutputOption
from weft_app.cli.output import Column, Listing
from weft_app.cli.terminal import note, say

app = typer.Typer()

PATH = "/api/v1/config"
ALLOW_CLOUD_FALLBACK = "allowCloudFallback"
JOURNAL = "journal"


ConfiguredService = Literal["up", "registry", "router", "gateway", "runner"]
"""The command that reads a configuration. Commands read different environment variables."""
_MEANINGS = {
    ALLOW_CLOUD_FALLBACK: "routes may fall back to remote models",
    JOURNAL: "whether requests are durable tasks: none, wait, or keep (also if the caller disconnects)",
}
_JOURNAL_WORDS = ("none", "wait", "keep")
_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_VALUES = Listing(
    columns=(
        Column("NAME", "name"),
        Column("VALUE", lambda value: value.value if isinstance(value.value, str) else json.dumps(value.value)),
        Column("SOURCE", "source"),
    ),
    kind="Configuration",
    document=asdict,
)
_SETTINGS = Listing(
    columns=(
        Column("NAME", lambda setting: setting[0]),
        Column("VALUE", lambda setting: str(setting[1]).lower()),
        Column("MEANING", lambda setting: _MEANINGS[setting[0]]),
    )
)


@app.command("show")
def show(
    config: ConfigOption = None,
    effective: Annotated[bool, typer.Option("--effective", help="Show every value, defaults included.")] = False,
    service: Annotated[
        ConfiguredService, typer.Option(help="Command that reads it: `weft up`, or `weft serve SERVICE`.")
    ] = "up",
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="Same as this option of `weft up` or `weft serve`.")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Same as this option of `weft up` or `weft serve`.")] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the configuration and where each value comes from: file and line, environment, command line or default.

    Secrets are concealed.

    Example: weft config show --effective -o yaml
    """
    from weft_app.compose.environment import environment_of  # noqa: PLC0415 - every command starts fast
    from weft_app.config.document import Given  # noqa: PLC0415
    from weft_app.config.loader import DEFAULT, effective_values, load_with_sources  # noqa: PLC0415

    flags = {"port": ("--port", port), "grpc_port": ("--grpc-port", grpc_port)}
    given = {
        name: Given(value, f"command line flag {flag}") for name, (flag, value) in flags.items() if value is not None
    }
    loaded = load_with_sources(config, given, environment_of(service, os.environ))
    for message in loaded.removed:
        note(message)
    _VALUES.print((value for value in effective_values(loaded) if effective or value.source != DEFAULT), output)


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of weft.yaml, for editors.

    Example: weft config schema > config.schema.json
    """
    from weft_app.config.schema import schema_text  # noqa: PLC0415 - every command starts fast

    say(schema_text())


@app.command("get")
def get(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the settings of the mesh.

    Example: weft config get -o json
    """
    with connect(home) as api:
        _show(api.get(PATH), output)


@app.command("set")
def set_values(
    assignments: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="What to set.")],
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Change a setting; it survives restarts and applies from the next request on.

    Example: weft config set allowCloudFallback=false journal=keep
    """
    wanted = _parsed(assignments)
    body = {name: _WORDS.get(word, word) for name, word in wanted.items()}
    with connect(home) as api:
        if ALLOW_CLOUD_FALLBACK not in body:
            # Only the journal may be omitted.
            body[ALLOW_CLOUD_FALLBACK] = api.get(PATH)[ALLOW_CLOUD_FALLBACK]
        _show(api.put(PATH, body), output)


def _parsed(assignments: list[str]) -> dict[str, str]:
    """Returns the values by setting. Raises INVALID_ARGUMENT naming the invalid part."""
    found: dict[str, str] = {}
    for assignment in assignments:
        name, separator, word = assignment.partition("=")
        if not separator:
            raise invalid_field("NAME=VALUE", f"{assignment[:64]!r} has no '='")
        if name not in _MEANINGS:
            raise invalid_field(name[:64] or "NAME", f"unknown setting; the settings are {', '.join(_MEANINGS)}")
        if name in found:
            raise invalid_field(name, "is given twice")
        if name == ALLOW_CLOUD_FALLBACK and word.lower() not in _WORDS:
            raise invalid_field(name, "must be true or false")
        if name == JOURNAL and word.lower() not in _JOURNAL_WORDS:
            raise invalid_field(name, f"must be {', '.join(_JOURNAL_WORDS)}")
        found[name] = word.lower()
    return found


def _show(settings: Document, output: OutputFormat) -> None:
    # The document has settings without a default only if they are set.
    shown = {ALLOW_CLOUD_FALLBACK: settings[ALLOW_CLOUD_FALLBACK], JOURNAL: settings.get(JOURNAL, "none")}
    _SETTINGS.print(shown.items(), output, lambda: settings)
