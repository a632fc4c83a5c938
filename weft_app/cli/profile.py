"""`weft mesh profile`: save what is as a profile, and switch to one."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.api.registry.v1.profile_pb2 import ProfileLoadSettings
from weft.documents.codec import leave_out_defaults
from weft.kernel.errors import WeftError
from weft.kernel.names import require_name
from weft_app.cli.columns import label_of
from weft_app.cli.completion import complete_profile
from weft_app.cli.declare import UNCHANGED, difference
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.operations import ADMIN, follow, outcome_text
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, note
from weft_app.cli.output import print_document, say

PROFILES = "/api/v1/profiles"
TIMEOUT_SECONDS = 60.0
"""Timeout of a save or a switch, which ask runners how their models were loaded."""
EXIT_NOT_DONE = 1
"""Exit code if the documents were switched but a model could not be loaded or unloaded."""

app = typer.Typer()

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The profile.", autocompletion=complete_profile)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]


@app.command("save")
def save(
    name: NameArgument,
    description: Annotated[str, typer.Option("--description", "-d", help="Description of its purpose.")] = "",
    leave_others: Annotated[
        bool, typer.Option("--leave-others", help="Leave other models loaded at a switch.")
    ] = False,
    dry_run: DryRunOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Save the current state as a profile: declared models, agents, routes and aliases, and loaded models with options.

    It becomes the active profile, and replaces one of the same name.

    Example: weft mesh profile save coding --description "Two coders, no vision"
    """
    require_name(name, "NAME")
    body = {"description": description, "leaveOthers": leave_others}
    with connect(home, TIMEOUT_SECONDS) as api:
        (result,) = api.post(f"{PROFILES}/{name}/save", body, dryRun=dry_run)["results"]
    if dry_run:
        say(difference(result, "now"))
    say(f"profile/{name} {result['outcome']}{' (dry run)' if dry_run else ''}\n")


@app.command("switch")
def switch(
    name: NameArgument,
    dry_run: DryRunOption = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Print the operations' names without waiting for their ends.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Switch to a profile: apply its declarations, all or none, then unload and load models.

    Running requests finish before their model is unloaded. Exit code 1 if a model could not be loaded or unloaded.

    Example: weft mesh profile switch coding --dry-run
    """
    require_name(name, "NAME")
    with connect(home, TIMEOUT_SECONDS) as api:
        switched = api.post(f"{PROFILES}/{name}/switch", dryRun=dry_run)
    if output is not OutputFormat.TABLE:
        print_document(switched, output)
    else:
        say(_text(switched, name, dry_run=dry_run))
    if dry_run:
        return
    problems = [step for step in switched["steps"] if step.get("problem")]
    for step in problems:
        note(f"cannot {step['step']} {step['model']}: {step['problem']}")
    failed = len(problems)
    if not no_wait:
        failed += _followed(switched, home, quiet=output is not OutputFormat.TABLE)
    if failed:
        note(
            f"profile/{name} is active, but {failed} of {len(switched['steps'])} models could not be loaded or unloaded"
        )
        raise typer.Exit(EXIT_NOT_DONE)


def _text(switched: Document, name: str, *, dry_run: bool) -> str:
    changed = [each for each in switched["results"] if each["outcome"] != UNCHANGED]
    if dry_run:
        lines = [difference(each, f"profile/{name}") for each in changed]
    else:
        lines = [f"{label_of(each)} {each['outcome']}\n" for each in changed]
    suffix = " (dry run)" if dry_run else ""
    lines += [f"{step['step']} {step['model']}{_settings(step)}{suffix}\n" for step in switched["steps"]]
    if not lines:
        lines = ["nothing is different\n"]
    return "".join(lines) + (f"switched to profile/{name}\n" if not dry_run else "")


def _settings(step: Document) -> str:
    descriptor: Any = ProfileLoadSettings.DESCRIPTOR
    found = leave_out_defaults(descriptor, step.get("settings", {}))
    return f" ({', '.join(f'{key}={value}' for key, value in found.items())})" if found else ""


def _followed(switched: Document, home: Path, *, quiet: bool) -> int:
    """Follows the operations to their ends and prints their outcomes. Returns how many failed."""
    failed = 0
    with connect(home, TIMEOUT_SECONDS) as api:
        for step in switched["steps"]:
            if not step.get("operation"):
                continue
            try:
                ended = follow(api, api.get(f"{ADMIN}/{step['operation']}"), shown=sys.stderr.isatty())
            except WeftError as error:
                note(f"cannot {step['step']} {step['model']}: {error.message}")
                failed += 1
                continue
            if not quiet:
                say(f"{outcome_text(ended)}\n")
    return failed
