"""`weft mesh reload`: a running mesh reads its weft.yaml again; the differences as people read them."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from weft.api.operations.v1 import configuration_service_pb2 as pb
from weft.api.operations.v1.configuration_service_pb2_grpc import ConfigurationServiceStub
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.grpc_calls import call_registry
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, PageOutputOption
from weft_app.cli.output import print_page
from weft_app.compose.home import WeftHome

TIMEOUT_SECONDS = 3_900.0
"""Timeout of a reload: the longest drain, and a margin."""
_Change = pb.ConfigurationChange
_SIGNS = {_Change.ACTION_ADDED: "+", _Change.ACTION_REMOVED: "-", _Change.ACTION_CHANGED: "~"}
_EFFECTS = {
    _Change.EFFECT_MODEL_RELOAD: "it is reloaded after its running requests",
    _Change.EFFECT_RUNNER_RESTART: "its process is restarted after its running requests",
    _Change.EFFECT_MESH_RESTART: "needs a restart of the mesh: weft mesh restart",
}


def reload(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    output: PageOutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Reload the weft.yaml of a running mesh: only what changed is drained and restarted.

    An invalid file changes nothing. Settings that need a restart are listed and stay unchanged.

    Example: weft mesh reload --dry-run
    """
    folder = WeftHome(home.expanduser().absolute())
    request = pb.ReloadConfigurationRequest(dry_run=dry_run)
    try:
        answer: pb.ReloadConfigurationResponse = call_registry(
            folder.root, ConfigurationServiceStub, "ReloadConfiguration", request, TIMEOUT_SECONDS
        )
    except WeftError as error:
        if error.reason is Reason.UNSUPPORTED_OPERATION:
            raise WeftError(
                error.reason,
                f"the services on {folder.root} were started separately; only a "
                "mesh started by weft up can be reloaded",
            ) from error
        raise
    print_page(
        output, lambda: "\n".join((*reload_lines(answer, dry_run=dry_run), "")), lambda: _document(answer, dry_run)
    )


def reload_lines(answer: pb.ReloadConfigurationResponse, *, dry_run: bool = False) -> Iterator[str]:
    """Yields what a reload changed, or would change, as lines of text."""
    files = ", ".join(answer.files) or "no configuration file"
    if not answer.changes:
        yield f"{files}: no changes"
    else:
        count = len(answer.changes)
        yield f"{files}: {count} {'change' if count == 1 else 'changes'}{', not applied (dry run)' if dry_run else ''}"
    for change in answer.changes:
        yield from _change_lines(change)
    yield from answer.notes


def _change_lines(change: pb.ConfigurationChange) -> Iterator[str]:
    effect = _EFFECTS.get(change.effect, "")
    if change.kind == "setting":
        sign = "!" if change.effect == _Change.EFFECT_MESH_RESTART else "~"
        (setting,) = change.settings
        yield f"  {sign} {_setting_words(setting)}{f' ({effect})' if effect else ''}"
        return
    if change.action != _Change.ACTION_CHANGED:
        effect = ""  # shown in the line of its runner
    where = f" on {change.runner}" if change.runner else ""
    yield f"  {_SIGNS.get(change.action, '?')} {change.kind} {change.name}{where}{f': {effect}' if effect else ''}"
    for setting in change.settings:
        yield f"      {_setting_words(setting)}"


def _setting_words(setting: pb.SettingChange) -> str:
    return f"{setting.name}: {setting.before or 'not set'} -> {setting.after or 'not set'}"


def _document(answer: pb.ReloadConfigurationResponse, dry_run: bool) -> dict[str, Any]:
    document = document_of(answer)
    for change in document["changes"]:
        for each in change["settings"]:
            each |= {name: _value(each.get(name, "")) for name in ("before", "after")}
    return {"dryRun": dry_run, **document}


def _value(text: str) -> Any:
    """Parses a value; a shortened text stays text."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text
