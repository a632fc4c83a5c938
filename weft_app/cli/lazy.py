"""Commands that are imported when they are used: `weft get` needs neither the services nor their libraries."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from weft.kernel.garbage import collect_rarely

COMMANDS: Mapping[str, str] = {
    "up": "weft_app.cli.up:up",
    "demo": "weft_app.cli.demo:demo",
    "chat": "weft_app.cli.chat:chat",
    "get": "weft_app.cli.get:get",
    "describe": "weft_app.cli.describe:describe",
    "explain": "weft_app.cli.explain:explain",
    "apply": "weft_app.cli.declare:apply",
    "diff": "weft_app.cli.declare:diff",
    "delete": "weft_app.cli.delete:delete",
    "wait": "weft_app.cli.wait:wait",
    "cancel": "weft_app.cli.cancel:cancel",
    "batch": "weft_app.cli.batch:app",
    "events": "weft_app.cli.events:events",
    "config": "weft_app.cli.mesh_config:app",
    "ps": "weft_app.cli.ps:ps",
    "load": "weft_app.cli.model_control:load",
    "unload": "weft_app.cli.model_control:unload",
    "flush": "weft_app.cli.model_control:flush",
    "operation": "weft_app.cli.operations:app",
    "audit": "weft_app.cli.audit:app",
    "sign": "weft_app.cli.sign:app",
    "approve": "weft_app.cli.approve:approve",
    "keys": "weft_app.cli.keys:app",
    "logs": "weft_app.cli.model_control:logs",
    "estimate": "weft_app.cli.estimate:estimate",
    "simulate": "weft_app.cli.simulate:simulate",
    "lease": "weft_app.cli.lease:app",
    "doctor": "weft_app.cli.doctor:doctor",
    "conformance": "weft_app.cli.conformance:conformance",
    "serve": "weft_app.cli.serve:app",
    "runner": "weft_app.cli.runner:app",
}
"""Commands in the order of the help, and where each is: a function, or an app with commands of its own."""


class LazyGroup(TyperGroup):
    """The commands of COMMANDS, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Every command, in the order of the help."""
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None when there is none."""
        place = COMMANDS.get(cmd_name)
        return load(cmd_name, place) if place is not None else super().get_command(ctx, cmd_name)


def load(name: str, place: str) -> Any:
    """The command at `place`, "module:attribute"."""
    module, _, attribute = place.partition(":")
    collect_rarely()
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        group = get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(found)
    return get_command(alone)
