"""Names of hosts as they stand in addresses and in lists of allowed hosts. Pure."""

import re

MAX_HOST_CHARS = 253
MAX_PORT = 65_535

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# The last label has a letter and is no hexadecimal number: `127.1` and `0x7f.0x1` are addresses to some resolvers.
_HOST = re.compile(rf"(?:{_LABEL}\.)+(?=[a-z0-9-]*[a-z])(?!0x){_LABEL}")
_ANY_BELOW = "*."


def is_host_name(host: str) -> bool:
    """Whether it is a name of at least two labels, in lower case, and no number."""
    return len(host) <= MAX_HOST_CHARS and _HOST.fullmatch(host) is not None


def is_host_pattern(pattern: str) -> bool:
    """Whether it is `name.example` or `*.name.example` (every name below it), either with `:port`."""
    name, separator, port = pattern.partition(":")
    if separator and not (port.isascii() and port.isdigit() and port[0] != "0" and int(port) <= MAX_PORT):
        return False
    return is_host_name(name.lower().removeprefix(_ANY_BELOW))


def fits_host_pattern(pattern: str, host: str, port: int, default_port: int) -> bool:
    """Whether a host name in lower case and a port are what `pattern` allows; without `:port` it is the default one."""
    name, _, wanted = pattern.lower().partition(":")
    if port != (int(wanted) if wanted else default_port):
        return False
    return host.endswith(name[1:]) if name.startswith(_ANY_BELOW) else host == name
