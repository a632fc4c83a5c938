"""Wake plans and their recipes, as immutable messages; see protos/weft/api/registry/v1/wake.proto.

Never print a plan or recipe: URLs, headers and arguments may contain credentials.
"""

import re
from collections.abc import Iterable

from weft.api.registry.v1 import wake_pb2

DEFAULT_MAX_WAIT_SECONDS = 60.0
MAX_WAIT_SECONDS = 3600.0
DEFAULT_METHOD = "POST"
DEFAULT_BROADCAST_ADDRESS = "255.255.255.255"
DEFAULT_WAKE_PORT = 9


def set_defaults(plan: wake_pb2.Wake) -> None:
    """Sets the defaults in a new plan, so that equal plans are equal messages."""
    plan.max_wait.FromNanoseconds(round(max_wait_seconds(plan) * 1e9))
    if plan.by_mesh.HasField("http"):
        plan.by_mesh.http.method = plan.by_mesh.http.method or DEFAULT_METHOD
    elif plan.by_mesh.HasField("wake_on_lan"):
        packet = plan.by_mesh.wake_on_lan
        packet.broadcast_address = packet.broadcast_address or DEFAULT_BROADCAST_ADDRESS
        packet.port = packet.port or DEFAULT_WAKE_PORT


def max_wait_seconds(plan: wake_pb2.Wake) -> float:
    """Returns the maximum wait from the first step until the model accepts requests."""
    return plan.max_wait.ToNanoseconds() / 1e9 or DEFAULT_MAX_WAIT_SECONDS


def mesh_recipe(plan: wake_pb2.Wake) -> wake_pb2.WakeRecipe | None:
    """Returns the recipe that a router runs to wake the host; None if there is none of a known kind."""
    return plan.by_mesh if plan.by_mesh.WhichOneof("action") else None


_MAC_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}")
_REPEATS = 16


def is_mac_address(text: str) -> bool:
    """Whether `text` is six pairs of hex digits joined by ':' or '-'."""
    return _MAC_ADDRESS.fullmatch(text) is not None


def magic_packet(mac_address: str) -> bytes:
    """Returns six 0xff bytes and the address 16 times. Raises ValueError for an invalid address."""
    if not is_mac_address(mac_address):
        raise ValueError("not a hardware address")
    return b"\xff" * 6 + bytes.fromhex(mac_address.replace(":", "").replace("-", "")) * _REPEATS


HIDDEN = "[hidden]"
MIN_SECRET_CHARS = 3
"""Minimum length of a secret, since redacting shorter words would make any text unreadable."""
LONG_SECRET_CHARS = 12
"""Number of characters that identify a secret anywhere in a text: others escape, join and cut what they quote."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>)\]]+")


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Returns `text` with URLs and `secrets` replaced by HIDDEN."""
    text = _URL.sub(HIDDEN, text)
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET_CHARS:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
        if len(secret) >= LONG_SECRET_CHARS:
            begin, rest = re.escape(secret[:LONG_SECRET_CHARS]), secret[LONG_SECRET_CHARS:].lower()
            first, *others = re.split(begin, text, flags=re.IGNORECASE)
            text = HIDDEN.join([first, *(other[_shared_chars(other.lower(), rest) :] for other in others)])
    return text


def _shared_chars(one: str, other: str) -> int:
    """Returns the length of the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
