"""`weft runner join` without an address: the choice among the meshes that are announced on the local network.

An announcement is never trusted: the fingerprint comes from an invitation or an option, or the user compares it.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import typer

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.options import EXIT_FAILED, EXIT_INTERRUPTED, note
from weft_app.cli.output import safe_text
from weft_app.compose.announcement import (
    OTHER_WAY,
    Announcement,
    find_addresses,
    find_meshes,
    joined_mesh,
    listed,
    require_same_mesh,
)
from weft_app.compose.invitation import SCHEME, Invitation, parse_invitation
from weft_app.compose.join_address import FindAddresses, Trust, parse_fingerprint

COMMAND = "weft runner join --fingerprint sha256:... --token-file FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinDialog:
    """The questions to the user; tests answer them."""

    ask: Callable[[str], str]
    ask_secret: Callable[[str], str]
    confirm: Callable[[str], bool]
    show: Callable[[str], None] = note


def announced_mesh(
    fingerprint: str | None, read_token: Callable[[], str], given_token: str
) -> tuple[Invitation, FindAddresses | None]:
    """Returns the announced mesh to join, and the function that finds it again when its addresses change.

    With a fingerprint it is the one that is announced with it. Otherwise it is asked for on a terminal; elsewhere the
    command is refused with what was found. `read_token` raises INVALID_ARGUMENT where no token is `given_token`.
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
    """Raises NOT_FOUND where no mesh is announced."""
    if not found:
        raise WeftError(
            Reason.NOT_FOUND,
            "no mesh is announced on this network (weft up --host 0.0.0.0 --announce announces one, and some networks "
            f"carry no multicast); {OTHER_WAY}",
        )


def ask_mesh(found: Sequence[Announcement], token: str, dialog: JoinDialog) -> Invitation:
    """Asks which mesh to join, for the token if there is none yet, and whether the fingerprint is the mesh's.

    Raises PERMISSION_DENIED where an invitation is for another mesh.
    """
    dialog.show("meshes announced on this network (an announcement proves nothing: anyone there can send one):")
    for number, line in enumerate(listed(found), start=1):
        dialog.show(safe_text(f"  {number}  {line}"))
    mesh = _chosen(found, dialog)
    if not token:
        token = dialog.ask_secret("Invitation (weft://...) or token of it").strip()
    if token.startswith(SCHEME):
        invitation = parse_invitation(token)
        require_same_mesh(mesh, invitation.trust.fingerprint)
        addresses = (*mesh.join_addresses, *invitation.addresses)
        return Invitation(addresses=tuple(dict.fromkeys(addresses)), trust=invitation.trust, token=invitation.token)
    if not mesh.fingerprint:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"{mesh.name} has the certificate of a public authority, which is known by the mesh's name: {OTHER_WAY}",
        )
    dialog.show("weft up and the mesh's invitations show the fingerprint of the mesh. Compare it with this one:")
    dialog.show(f"  {mesh.fingerprint}")
    dialog.show("If it is another one, someone else gets the token, and with it the mesh.")
    if not dialog.confirm("Is it the same?"):
        raise typer.Exit(EXIT_FAILED)
    dialog.show(f"without a question from now on: weft runner join --fingerprint {mesh.fingerprint} --token-file FILE")
    return Invitation(addresses=mesh.join_addresses, trust=Trust(fingerprint=mesh.fingerprint), token=token)


def _chosen(found: Sequence[Announcement], dialog: JoinDialog) -> Announcement:
    answer = dialog.ask(f"Join which one (1-{len(found)})?").strip()
    if not answer.isdecimal() or not 1 <= int(answer[:4]) <= len(found):
        raise WeftError(Reason.INVALID_ARGUMENT, f"{safe_text(answer)!r} is none of the numbers 1 to {len(found)}")
    return found[int(answer) - 1]


def _dialog(found: Sequence[Announcement]) -> JoinDialog:
    """Returns the questions on the terminal. Raises INVALID_ARGUMENT where there is none."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        for line in ("announced on this network:", *(f"  {line}" for line in listed(found))):
            note(safe_text(line))
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"without a terminal the mesh is named by the fingerprint that its operator gave you: {COMMAND}",
        )
    return JoinDialog(
        ask=lambda text: str(_answered(partial(typer.prompt, f"weft: {text}", default="1", err=True))),
        ask_secret=lambda text: str(_answered(partial(typer.prompt, f"weft: {text}", hide_input=True, err=True))),
        confirm=lambda text: bool(_answered(partial(typer.confirm, f"weft: {text}", default=False, err=True))),
    )


def _answered(question: Callable[[], Any]) -> Any:
    """Returns the answer; ends the command where there is none (Ctrl-C)."""
    try:
        return question()
    except typer.Abort:
        raise typer.Exit(EXIT_INTERRUPTED) from None
