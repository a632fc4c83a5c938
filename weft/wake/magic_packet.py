"""The magic packet of Wake-on-LAN. Pure functions."""

import re

_MAC_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}")
_REPEATS = 16


def is_mac_address(text: str) -> bool:
    """Whether `text` is six pairs of hex digits joined by ':' or '-'."""
    return _MAC_ADDRESS.fullmatch(text) is not None


def magic_packet(mac_address: str) -> bytes:
    """Six bytes of ones, then the address 16 times: 102 bytes. Raises ValueError when it is no hardware address."""
    if not is_mac_address(mac_address):
        raise ValueError("not a hardware address")
    return b"\xff" * 6 + bytes.fromhex(mac_address.replace(":", "").replace("-", "")) * _REPEATS
