"""`weft mesh service`: services of systemd, for meshes and runners that start with the machine."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft_app.cli.options import EXIT_FAILED, EXIT_NOT_FOUND, OutputFormat, OutputOption
from weft_app.cli.output import Listing, custom_columns
from weft_app.cli.runner import URL_VARIABLE
from weft_app.cli.terminal import note, say
from weft_app.compose.service_units import UnitKind, UnitPlan
from weft_app.compose.systemd import Systemd, UnitState, user_ends_with_session

app = typer.Typer()
HOMES = (Path("/root"), Path("/home"))
"""Folders that a system service cannot read."""
KindArgument = Annotated[UnitKind, typer.Argument(metavar="KIND", help=f"One of {', '.join(UnitKind)}.")]
ScopeOption = Annotated[
    bool | None,
    typer.Option(
        "--system/--user",
        help="System-wide, started at boot, or for this user. Default: system-wide for root, else for this user.",
        show_default=False,
    ),
]

_UNITS = Listing(
    columns=custom_columns(
        "UNIT:unit STATE:state DETAIL:detail PID RESTARTS:restarts SINCE:since",
        PID=lambda state: str(state.process or "-"),
    ),
    kind="ServiceList",
    document=asdict,
)


@app.command("install")
def install(
    kind: KindArgument,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|URL] [-- ARGUMENTS]",
            help="Name of a runner, or an invitation to join with; then arguments of the command.",
        ),
    ] = None,
    *,
    system: ScopeOption = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Enable and start it.")] = True,
) -> None:
    """Install a service and start it: it starts with the machine, is restarted when it fails, and drains when it stops.

    weft.yaml and weft.env (environment variables) are in /etc/weft, or in ~/.config/weft for services of a user. An
    invitation is kept in weft-join.env there, readable only by its owner. The same command again replaces a service.

    Example: weft mesh service install mesh -- --host 0.0.0.0, or: weft mesh service install join weft://...
    """
    manager = Systemd(is_system=_is_system(system))
    plan, environment = _plan(kind, list(arguments or ()), is_system=manager.is_system)
    others = manager.sharing(plan)
    file = manager.install(plan, environment)
    if others:
        note(f"all runners share {file}: from its next start, {' and '.join(others)} has these arguments, too")
    if not start:
        say(f"wrote {file}; start it with: systemctl {_scope(manager)}enable --now {plan.unit}\n")
        return
    manager.start(plan)
    option = "" if manager.is_system is _is_system(None) else f" --{'system' if manager.is_system else 'user'}"
    say(
        f"{plan.unit} is started\n\n"
        f"  weft mesh service status{option}   journalctl {_scope(manager)}-u {plan.unit} -f\n"
    )
    if not manager.is_system and user_ends_with_session():
        note("it stops with your last session and starts with the next; to keep it running: loginctl enable-linger")


@app.command("status")
def status(system: ScopeOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the services that are installed: state, process, restarts.

    Exit code 1 if one is not active, 3 if there is none. weft mesh health checks whether it can do its work.

    Example: weft mesh service status -o json
    """
    manager = Systemd(is_system=_is_system(system))
    found: list[UnitState] = list(manager.states())
    _UNITS.print(found, output)
    if not found:
        note(f"no service of weft is installed {'for the machine' if manager.is_system else 'for this user'}")
        raise typer.Exit(EXIT_NOT_FOUND)
    if any(each.state != "active" for each in found):
        raise typer.Exit(EXIT_FAILED)


@app.command("remove")
def remove(
    kind: KindArgument,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The name of a runner.", show_default=False)] = "",
    system: ScopeOption = None,
) -> None:
    """Stop a service, finishing its running requests, and remove it. Settings and state stay where they are.

    Example: weft mesh service remove runner gpu-0
    """
    manager = Systemd(is_system=_is_system(system))
    _require_name(kind, name)
    plan = UnitPlan(kind=kind, is_system=manager.is_system, instance=name)
    if not manager.remove(plan):
        raise WeftError(Reason.NOT_FOUND, f"{plan.unit} is not installed in {manager.folder}")
    home = "/var/lib/weft" if manager.is_system else "~/.weft"
    say(f"removed {plan.unit}; its settings in {manager.settings} and its home {home} stay\n")


def _plan(kind: UnitKind, arguments: list[str], *, is_system: bool) -> tuple[UnitPlan, dict[str, str]]:
    """Returns the unit for a command line, and the content of its environment file."""
    named = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    rest = arguments[1:] if named else arguments
    environment = {}
    match kind:
        case UnitKind.RUNNER:
            _require_name(kind, named)
        case UnitKind.JOIN:
            if '"' in named or "\\" in named or not named.isprintable():
                raise invalid_field("URL", "must be an invitation, weft://..., or https://host:port")
            environment = {URL_VARIABLE: named} if named else {}
        case _ if named:
            raise invalid_field("ARGUMENTS", f"of {kind} are options, such as -- --config FILE, and not {named}")
    program = Path(sys.executable).with_name("weft")
    if is_system:
        _require_readable(program)
    instance = named if kind is UnitKind.RUNNER else ""
    return UnitPlan(
        kind=kind, is_system=is_system, instance=instance, program=str(program), arguments=tuple(rest)
    ), environment


def _require_readable(program: Path) -> None:
    """Raises INVALID_ARGUMENT if the user of a system service cannot read weft or its Python."""
    for path in (program, Path(sys.executable).resolve()):
        if any(path.is_relative_to(home) for home in HOMES):
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"a service of the machine cannot read {path}; install weft where all can: "
                "/usr/bin/python3 -m venv /opt/weft, then /opt/weft/bin/pip install ./weft (its clone), and "
                "/opt/weft/bin/weft mesh service install; or install it for a user: --user",
            )


def _require_name(kind: UnitKind, name: str) -> None:
    if kind is UnitKind.RUNNER and not name:
        raise invalid_field("NAME", "is required for a runner: its name in weft.yaml")


def _is_system(chosen: bool | None) -> bool:
    return os.geteuid() == 0 if chosen is None else chosen


def _scope(manager: Systemd) -> str:
    return "" if manager.is_system else "--user "
