"""Commands that are imported when they are used: `weft get` needs neither the services nor their libraries."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from weft.kernel.garbage import collect_rarely

COMMANDS: Mapping[str, str] = {
    "up": "weft.cli.up:up",
    "demo": "weft.cli.demo:demo",
    "chat": "weft.cli.chat:chat",
    "get": "weft.cli.get:get",
    "describe": "weft.cli.describe:describe",
    "explain": "weft.cli.explain:explain",
    "apply": "weft.cli.declare:apply",
    "diff": "weft.cli.declare:diff",
    "delete": "weft.cli.delete:delete",
    "wait": "weft.cli.wait:wait",
    "cancel": "weft.cli.cancel:cancel",
    "batch": "weft.cli.batch:app",
    "events": "weft.cli.events:events",
    "config": "weft.cli.mesh_config:app",
    "ps": "weft.cli.ps:ps",
    "load": "weft.cli.model_control:load",
    "unload": "weft.cli.model_control:unload",
    "flush": "weft.cli.model_control:flush",
    "operation": "weft.cli.operations:app",
    "audit": "weft.cli.audit:app",
    "sign": "weft.cli.sign:app",
    "approve": "weft.cli.approve:approve",
    "keys": "weft.cli.keys:app",
    "logs": "weft.cli.model_control:logs",
    "estimate": "weft.cli.estimate:estimate",
    "simulate": "weft.cli.simulate:simulate",
    "lease": "weft.cli.lease:app",
    "doctor": "weft.cli.doctor:doctor",
    "conformance": "weft.cli.conformance:conformance",
    "serve": "weft.cli.serve:app",
    "runner": "weft.cli.runner:app",
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
