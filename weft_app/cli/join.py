"""`weft runner join`: the choice of the mesh and of the published models, and the state of the link.

Without an address, joins a mesh that is announced on the local network. Announcements are never trusted: the
fingerprint comes from an invitation or an option, or the user compares it.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from runner_svc.dial_out import LinkEvent, LinkState
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import configure_logging
from weft_app.cli.discover import shown_server
from weft_app.cli.network_options import Discover
from weft_app.cli.options import EXIT_FAILED, EXIT_INTERRUPTED
from weft_app.cli.serving import run_service
from weft_app.cli.terminal import is_err_terminal, note, safe_text, say
from weft_app.compose.discovery import discover as look
from weft_app.compose.environment import read_environment
from weft_app.compose.followed_servers import list_of_followed, why_none_served
from weft_app.compose.home import WeftHome
from weft_app.compose.invitation import SCHEME, Invitation, parse_invitation
from weft_app.compose.join import JoinPlan, config_with_server, pick_published
from weft_app.compose.join import join as join_mesh
from weft_app.compose.join_address import FindAddresses, Trust, parse_fingerprint, parse_join_address, parse_trust
from weft_app.compose.machine import this_machine
from weft_app.compose.mdns_announcement import (
    OTHER_WAY,
    Announcement,
    find_addresses,
    find_meshes,
    joined_mesh,
    listed,
    require_same_mesh,
)
from weft_app.config.config import WeftConfig
from weft_app.config.document import Document
from weft_app.config.loader import load_config

MAX_TOKEN_CHARS = 256
MAX_NUMBER_DIGITS = 4
TOKEN_VARIABLE = "WEFT_JOIN_TOKEN"  # noqa: S105 - the variable's name
COMMAND = "weft runner join --fingerprint sha256:... --token-file FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The options about the mesh and the token."""

    token: str | None
    token_file: Path | None
    ca_file: Path | None
    fingerprint: str | None

    def read_token(self) -> str:
        """Returns the token. Raises INVALID_ARGUMENT if it is missing or invalid."""
        token = self.token
        if self.token_file is not None:
            try:
                token = self.token_file.expanduser().read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise invalid_field("--token-file", f"{self.token_file} cannot be read as text") from error
        if not token:
            raise invalid_field(
                "--token",
                f"is required, or --token-file, or {TOKEN_VARIABLE}; create a token with `weft runner token create`",
            )
        if len(token) > MAX_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
            raise invalid_field("--token", "is not a join token, which looks like wjt_<id>_<secret>")
        return token

    def mesh(self, url: str | None) -> tuple[Invitation, FindAddresses | None]:
        """Returns the mesh to join, and a function that finds an announced one again when its addresses change.

        The mesh comes from an invitation, from URL and options, or without a URL from an announcement.
        """
        if url is None:
            if self.ca_file is not None:
                raise invalid_field("--ca-file", "needs the URL of the mesh, to check the name in its certificate")
            given = self.read_token() if self.token or self.token_file else ""
            return announced_mesh(self.fingerprint, lambda: given or self.read_token(), given)
        if not url.startswith(SCHEME):
            address = parse_join_address(url)
            trust = parse_trust(address, self.ca_file, self.fingerprint)
            return Invitation(addresses=(address,), trust=trust, token=self.read_token()), None
        for name in ("token_file", "ca_file", "fingerprint"):
            if getattr(self, name) is not None:
                raise invalid_field(f"--{name.replace('_', '-')}", "is part of the invitation; leave it out")
        return parse_invitation(url), None


def run_join(
    url: str | None,
    credentials: Credentials,
    *,
    runner: str | None,
    publish: Sequence[str],
    server: dict[str, Any],
    accepts_models: bool,
    discover: Discover | None,
    home: Path,
    config: Path | None,
) -> None:
    """Joins a mesh and serves until Ctrl-C. `server` has the options of a server to publish."""
    mesh, find = credentials.mesh(url)
    if server["url"] is None and not publish:
        server["url"] = _found_server(config, home, discover)
    loaded = _load(config, server, read_environment(os.environ).applied_to)
    section, published = pick_published(loaded, runner, list(publish))
    if section.http_port is not None:
        say("note: a runner that joins over a link has no HTTP API; its http_port is ignored\n")
    plan = JoinPlan(
        runner=section,
        published=tuple(published),
        mesh=mesh,
        accepts_models=accepts_models,
        find=find,
    )
    folder = WeftHome(home.expanduser().absolute())
    folder.create()
    name = f"runner-{plan.runner.name}"
    configure_logging("runner", level=loaded.log.level, file=folder.log_file(name, loaded.log.max_file_bytes))
    say(f"runner {plan.runner.name} joins {plan.shown_address}; logs: {folder.logs / f'{name}.log'}\n")
    warn_of_missing_models(plan)
    run_service(join_mesh(plan, loaded, folder, link_reporter(plan)))
    say("stopped\n")


def _found_server(config: Path | None, home: Path, mode: Discover | None) -> str | None:
    """Returns the URL of an engine of this machine to publish; None if runners are configured.

    Asks on a terminal; otherwise requires --discover=yes or --url. Raises INVALID_ARGUMENT with the remedy.
    """
    loaded = load_config(config)
    if loaded.runners is not None:
        return None
    found = asyncio.run(look(loaded.discovery, WeftHome(home.expanduser().absolute())))
    usable = [] if mode is Discover.NO else [server for server in found.servers if not server.why_empty]
    if not usable:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            "nothing to publish: there is no weft.yaml with runners, and no engine responds on this machine. Name one "
            "with --url http://HOST:PORT, or write a weft.yaml (docs/laptops.md)",
        )
    chosen = usable[0]
    for server in usable[1:]:
        note(f"also found but not published: {shown_server(server)}; publish it with --url {server.url}")
    note(f"found on this machine: {shown_server(chosen)}")
    if mode is not Discover.YES:
        if not (sys.stdin.isatty() and is_err_terminal()):
            raise WeftError(
                Reason.INVALID_ARGUMENT, f"add --discover=yes or --url {chosen.url} to publish all of its models"
            )
        try:
            agreed = typer.confirm("weft: publish all of its models in the mesh?", default=True, err=True)
        except typer.Abort:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        if not agreed:
            raise typer.Exit(EXIT_FAILED)
    return chosen.url


def _load(config: Path | None, server: dict[str, Any], environment: Callable[[Document], Document]) -> WeftConfig:
    """Returns the configuration of the file, or of the server on the command line."""
    if server["url"] is None:
        for name, value in server.items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                raise invalid_field(option, "is only for --url; models in the configuration have their own names")
        return load_config(config, below=environment)
    named = server.pop("name") or (*this_machine().names, "laptop")[0].partition(".")[0]
    return config_with_server(config, runner=named, below=environment, **server)


def warn_of_missing_models(plan: JoinPlan) -> None:
    """Warns of models that cannot be served yet: they are served once their server has them."""
    if plan.runner.follows_server:
        found = asyncio.run(list_of_followed(plan.runner))
        if found is not None and not (found.models and found.models.names):
            say(f"warn {plan.runner.name}: {why_none_served(found)}\n")
    find_fault = plan.runner.engine.find_fault
    if find_fault is None:
        return
    for model in plan.runner.models:
        fault = find_fault(model, os.environ) if model.name in plan.published else None
        if fault is not None:
            remedy = "" if fault.is_reachable else f"; {fault.remedy}"
            say(f"warn {model.name}: {fault.message}{remedy}\n")


def link_reporter(plan: JoinPlan) -> Callable[[LinkEvent], None]:
    """Returns a function that prints the state of the link, one line per change."""
    last = left_out = ""

    def show(event: LinkEvent) -> None:
        nonlocal last, left_out
        detail, models = safe_text(event.detail), ", ".join(plan.published) or "all models that its server lists"
        line = {
            "CONNECTING": f"...  connecting to {plan.shown_address}",
            "JOINED": f"ok   joined as {plan.runner.name}: {models}",
            "REFUSED": f"fail refused: {detail}; trying again",
            "LOST": f"fail no link: {detail}; trying again in {event.retry_seconds or 0.0:.1f} s",
        }.get(event.state.name, last)
        if line != last:
            say(f"{line}\n")
        last = line
        if event.state is LinkState.LEFT_OUT and detail != left_out:
            left_out = detail
            say(f"warn not served: {detail}\n" if detail else "ok   the mesh serves all models now\n")

    return show


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinDialog:
    """Questions to the user; tests answer them."""

    ask: Callable[[str], str]
    ask_secret: Callable[[str], str]
    confirm: Callable[[str], bool]
    show: Callable[[str], None] = note


def announced_mesh(
    fingerprint: str | None, read_token: Callable[[], str], given_token: str
) -> tuple[Invitation, FindAddresses | None]:
    """Returns the announced mesh to join, and the function that finds it again when its addresses change.

    Selects the mesh by fingerprint, or asks on a terminal; elsewhere raises an error that lists the found ones.
    `read_token` raises INVALID_ARGUMENT if there is no `given_token`.
    """
    wanted = None if fingerprint is None else parse_fingerprint(fingerprint, "--fingerprint")
    token = read_token() if wanted is not None else given_token
    found = asyncio.run(find_meshes())
    if wanted is not None:
        chosen = Invitation(addresses=joined_mesh(found, wanted), trust=Trust(fingerprint=wanted), token=token)
    else:
        require_some(found)
        chosen = ask_mesh(found, token, _dialog(found))
    find = partial(find_addresses, chosen.trust.fingerprint)
    return chosen, find if chosen.trust.fingerprint else None


def require_some(found: Sequence[Announcement]) -> None:
    """Raises NOT_FOUND if no mesh is announced."""
    if not found:
        raise WeftError(
            Reason.NOT_FOUND,
            "no mesh is announced on this network (weft up --host 0.0.0.0 --announce announces one; some networks do "
            f"not forward multicast). {OTHER_WAY}",
        )


def ask_mesh(found: Sequence[Announcement], token: str, dialog: JoinDialog) -> Invitation:
    """Asks which mesh to join, for a missing token, and whether the fingerprint is the mesh's.

    Raises PERMISSION_DENIED if an invitation is for another mesh.
    """
    dialog.show("meshes announced on this network (announcements can be forged):")
    for number, line in enumerate(listed(found), start=1):
        dialog.show(safe_text(f"  {number}  {line}"))
    mesh = _chosen(found, dialog)
    if not token:
        token = dialog.ask_secret("Its invitation (weft://...) or join token").strip()
    if token.startswith(SCHEME):
        invitation = parse_invitation(token)
        require_same_mesh(mesh, invitation.trust.fingerprint)
        addresses = (*mesh.join_addresses, *invitation.addresses)
        return Invitation(addresses=tuple(dict.fromkeys(addresses)), trust=invitation.trust, token=invitation.token)
    if not mesh.fingerprint:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"{mesh.name} has a certificate of a public authority, which is verified by the mesh's name: {OTHER_WAY}",
        )
    dialog.show("`weft up` and invitations show the mesh's fingerprint. Compare it with this one:")
    dialog.show(f"  {mesh.fingerprint}")
    dialog.show("If they differ, another machine would get the token and could join the mesh with it.")
    if not dialog.confirm("Are they the same?"):
        raise typer.Exit(EXIT_FAILED)
    dialog.show(f"to join without this question: weft runner join --fingerprint {mesh.fingerprint} --token-file FILE")
    return Invitation(addresses=mesh.join_addresses, trust=Trust(fingerprint=mesh.fingerprint), token=token)


def _chosen(found: Sequence[Announcement], dialog: JoinDialog) -> Announcement:
    answer = dialog.ask(f"Join which one (1-{len(found)})?").strip()
    if not answer.isdecimal() or len(answer) > MAX_NUMBER_DIGITS or not 1 <= int(answer) <= len(found):
        raise WeftError(Reason.INVALID_ARGUMENT, f"{safe_text(answer)!r} is not a number from 1 to {len(found)}")
    return found[int(answer) - 1]


def _dialog(found: Sequence[Announcement]) -> JoinDialog:
    """Returns a dialog on the terminal. Raises INVALID_ARGUMENT without a terminal."""
    if not (sys.stdin.isatty() and is_err_terminal()):
        for line in ("announced on this network:", *(f"  {line}" for line in listed(found))):
            note(safe_text(line))
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"without a terminal, name the mesh by the fingerprint that its operator gave you: {COMMAND}",
        )

    def answered(question: Callable[..., Any], text: str, **options: Any) -> Any:
        try:
            return question(f"weft: {text}", err=True, **options)
        except typer.Abort:
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return JoinDialog(
        ask=lambda text: str(answered(typer.prompt, text, default="1")),
        ask_secret=lambda text: str(answered(typer.prompt, text, hide_input=True)),
        confirm=lambda text: bool(answered(typer.confirm, text, default=False)),
    )
