"""Wake plans from the wire to the domain, with every limit of what they may hold.

Messages never repeat what was sent: URLs, headers and arguments may hold credentials.
"""

import re
from ipaddress import AddressValueError, IPv4Address
from urllib.parse import urlsplit

from registry_svc.checks import require_range
from weft.api.registry.v1 import wake_pb2
from weft.kernel.errors import invalid_field
from weft.wake.messages import plan_of
from weft.wake.recipes import MAX_WAIT_SECONDS, WakePlan

MIN_WAIT_SECONDS = 1.0
MAX_URL_CHARS = 2_048
MAX_HEADERS = 32
MAX_HEADER_NAME_CHARS = 128
MAX_HEADER_VALUE_CHARS = 4_096
MAX_ARGUMENTS = 64
MAX_ARGUMENT_CHARS = 4_096
MAX_PORT = 65_535

_METHODS = frozenset({"", "GET", "POST", "PUT", "PATCH", "DELETE"})
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_MAC_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}")


def to_wake(wake: wake_pb2.Wake, field: str, *, published: bool) -> WakePlan:
    """A valid wake plan; raises INVALID_ARGUMENT naming the field. `published`: a runner says it, not an operator."""
    if wake.HasField("max_wait"):
        seconds = wake.max_wait.seconds + wake.max_wait.nanos / 1e9
        require_range(seconds, f"{field}.max_wait", MIN_WAIT_SECONDS, MAX_WAIT_SECONDS)
    if wake.HasField("by_mesh"):
        _check_recipe(wake.by_mesh, f"{field}.by_mesh", published=published)
    elif not wake.by_runner:
        raise invalid_field(field, "must say who wakes it: by_runner, by_mesh or both")
    return plan_of(wake)


def _check_recipe(recipe: wake_pb2.WakeRecipe, field: str, *, published: bool) -> None:
    match recipe.WhichOneof("action"):
        case "http":
            _check_http(recipe.http, f"{field}.http")
            # A router would fill them in: whoever may publish a model could have its secrets sent to any URL.
            if published and any("${" in value for value in recipe.http.headers.values()):
                raise invalid_field(
                    f"{field}.http.headers",
                    "a runner may not use the routers' variables; an operator must declare this recipe with apply",
                )
        case "command":
            # A router would run it: whoever may publish a model could run programs on another machine.
            if published:
                raise invalid_field(
                    f"{field}.command",
                    "a runner may not have routers run a program; an operator must declare this recipe with apply",
                )
            _check_command(recipe.command, f"{field}.command")
        case "wake_on_lan":
            _check_wake_on_lan(recipe.wake_on_lan, f"{field}.wake_on_lan")
        case _:
            raise invalid_field(field, "must be one of http, command and wake_on_lan")


def _check_http(action: wake_pb2.HttpAction, field: str) -> None:
    if not _is_web_url(action.url):
        raise invalid_field(f"{field}.url", f"must be an http or https URL of at most {MAX_URL_CHARS} characters")
    if action.method not in _METHODS:
        raise invalid_field(f"{field}.method", "must be GET, POST, PUT, PATCH or DELETE, or empty")
    if len(action.headers) > MAX_HEADERS:
        raise invalid_field(f"{field}.headers", f"at most {MAX_HEADERS}")
    for name, value in action.headers.items():
        if len(name) > MAX_HEADER_NAME_CHARS or _HEADER_NAME.fullmatch(name) is None:
            raise invalid_field(f"{field}.headers", f"names must be tokens of 1 to {MAX_HEADER_NAME_CHARS} characters")
        if len(value) > MAX_HEADER_VALUE_CHARS or not value.isprintable():
            raise invalid_field(
                f"{field}.headers[{name}]",
                f"must be at most {MAX_HEADER_VALUE_CHARS} characters, without line breaks and control characters",
            )


def _is_web_url(url: str) -> bool:
    if len(url) > MAX_URL_CHARS or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError when it is none
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


def _check_command(action: wake_pb2.CommandAction, field: str) -> None:
    if not 1 <= len(action.argv) <= MAX_ARGUMENTS or not action.argv[0]:
        raise invalid_field(f"{field}.argv", f"must be a program and its arguments, 1 to {MAX_ARGUMENTS} in all")
    for index, argument in enumerate(action.argv):
        if len(argument) > MAX_ARGUMENT_CHARS or "\0" in argument:
            raise invalid_field(
                f"{field}.argv[{index}]", f"must be at most {MAX_ARGUMENT_CHARS} characters, none of them NUL"
            )


def _check_wake_on_lan(action: wake_pb2.WakeOnLanAction, field: str) -> None:
    if _MAC_ADDRESS.fullmatch(action.mac_address) is None:
        raise invalid_field(f"{field}.mac_address", "must be six pairs of hex digits joined by ':' or '-'")
    if action.broadcast_address and not _is_ipv4(action.broadcast_address):
        raise invalid_field(f"{field}.broadcast_address", "must be an IPv4 address, or empty")
    if not 0 <= action.port <= MAX_PORT:
        raise invalid_field(f"{field}.port", f"must be 0 to {MAX_PORT}")


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except AddressValueError:
        return False
    return True
