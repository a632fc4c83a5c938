"""Invitations of runners: the relay's addresses, its fingerprint and a join token in one word.

Example: `weft://wjt_<id>_<secret>@192.168.1.5:7443,box.local:7443/sha256:<hex>`. No character is special in a shell.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.address import is_loopback, split_address
from weft_app.compose.home import WeftHome
from weft_app.compose.join_address import MAX_URL_CHARS, JoinAddress, Trust, parse_fingerprint, parse_join_address
from weft_app.compose.machine import this_machine
from weft_app.compose.relay import RelayEndpoint, known_endpoint

SCHEME = "weft://"
MAX_ADDRESSES = 8
"""Maximum number of addresses in an invitation."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,256}")
_FIELD = "URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """A parsed invitation."""

    addresses: tuple[JoinAddress, ...]
    """At least one. The relay is at the one that presents the certificate."""
    trust: Trust
    token: str = field(repr=False)

    @property
    def text(self) -> str:
        """The invitation as one word."""
        pin = f"/{self.trust.fingerprint}" if self.trust.fingerprint else ""
        return f"{SCHEME}{self.token}@{','.join(address.target for address in self.addresses)}{pin}"


def parse_invitation(text: str) -> Invitation:
    """Parses an invitation. Raises INVALID_ARGUMENT."""
    if len(text) > MAX_URL_CHARS:
        raise invalid_field(_FIELD, f"has more than {MAX_URL_CHARS} characters")
    token, at, rest = text.removeprefix(SCHEME).partition("@")
    targets, slash, pin = rest.partition("/")
    if not text.startswith(SCHEME) or not at or _TOKEN.fullmatch(token) is None:
        raise invalid_field(_FIELD, "is not a complete invitation; copy it again from `weft runner token create`")
    found = targets.split(",")
    if len(found) > MAX_ADDRESSES:
        raise invalid_field(_FIELD, f"names more than {MAX_ADDRESSES} addresses")
    return Invitation(
        addresses=tuple(parse_join_address(f"https://{target}") for target in found),
        trust=Trust(fingerprint=parse_fingerprint(pin, _FIELD)) if slash else Trust(),
        token=token,
    )


def invitation_to(endpoint: RelayEndpoint, token: str) -> Invitation | None:
    """Returns an invitation to this machine's relay; None if other machines cannot reach it."""
    if not endpoint.url.startswith("https://"):
        return None
    own = parse_join_address(endpoint.url)
    hosts: tuple[str, ...] = (own.host,)
    if endpoint.is_everywhere and endpoint.fingerprint:
        machine = this_machine()
        # Some shells expand the brackets of IPv6 addresses, and IPv4 is nearly always available.
        hosts = tuple(each for each in machine.addresses if ":" not in each) or machine.addresses
        hosts = (*hosts[: MAX_ADDRESSES - 1], *(name for name in machine.names[-1:] if not is_loopback(name)))
    addresses = tuple(JoinAddress(host=host, port=own.port, is_tls=True) for host in hosts or (own.host,))
    return Invitation(addresses=addresses, trust=Trust(fingerprint=endpoint.fingerprint), token=token)


def invitation_to_relays(targets: Sequence[str], fingerprint: str, token: str) -> Invitation:
    """Returns an invitation to relays that share a certificate. Raises INVALID_ARGUMENT for targets not HOST:PORT."""
    if len(targets) > MAX_ADDRESSES:
        raise invalid_field("--address", f"may be given {MAX_ADDRESSES} times")
    for target in targets:
        split_address(target, "--address")
    addresses = tuple(parse_join_address(f"https://{target}") for target in targets)
    return Invitation(addresses=addresses, trust=Trust(fingerprint=fingerprint), token=token)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCommand:
    """The command that joins a runner to the mesh of a home."""

    text: str = field(repr=False)
    this_machine_only: bool = False
    """Whether it works only on the mesh's own machine."""


def join_command(home: WeftHome, token: str) -> JoinCommand | None:
    """Returns the command to join a runner with a token; None if no relay runs on this home."""
    endpoint = known_endpoint(home)
    if endpoint is None:
        return None
    invitation = invitation_to(endpoint, token)
    if invitation is not None:
        return JoinCommand(text=f"weft runner join {invitation.text}")
    return JoinCommand(text=f"weft runner join {endpoint.url} --token {token}", this_machine_only=True)
