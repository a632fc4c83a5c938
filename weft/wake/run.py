"""Recipes carried out. Every failure is WAKE_FAILED and says what failed, never URL, headers or arguments."""

import ipaddress
import socket
from collections.abc import Mapping

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.wake.command import run_command
from weft.wake.magic_packet import magic_packet
from weft.wake.recipes import CommandRecipe, HttpRecipe, Recipe, WakeOnLanRecipe

PACKET_COPIES = 3
"""Datagrams get lost and cost nothing."""


async def run_recipe(recipe: Recipe, *, timeout_seconds: float, environment: Mapping[str, str]) -> None:
    """Carry out `recipe` within `timeout_seconds`; returns when it has succeeded, raises WAKE_FAILED otherwise.

    `environment` gives the variables of its header values, and is the whole environment of a command.
    """
    match recipe:
        case HttpRecipe():
            from weft.wake.http_request import send_request  # noqa: PLC0415 - see that module

            await send_request(recipe, timeout_seconds, environment)
        case CommandRecipe():
            await run_command(recipe.argv, timeout_seconds=timeout_seconds, environment=environment)
        case WakeOnLanRecipe():
            _send_packet(recipe)


def _send_packet(recipe: WakeOnLanRecipe) -> None:
    try:
        packet = magic_packet(recipe.mac_address)
        address = str(ipaddress.IPv4Address(recipe.broadcast_address))
    except ValueError:
        raise _failed("the magic packet cannot be sent: its hardware or broadcast address is malformed") from None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            for _ in range(PACKET_COPIES):
                sender.sendto(packet, (address, recipe.port))
    except OSError as error:
        raise _failed(f"the magic packet could not be sent: {error.strerror or 'network error'}") from None


def _failed(message: str) -> WeftError:
    return WeftError(Reason.WAKE_FAILED, message)
