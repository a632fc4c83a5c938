"""Recipes carried out. Every failure is WAKE_FAILED and says what failed, never URL, headers or arguments."""

import ipaddress
import socket
from collections.abc import Mapping

import aiohttp

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.wake.command import run_command
from weft.wake.magic_packet import magic_packet
from weft.wake.recipes import CommandRecipe, HttpRecipe, Recipe, WakeOnLanRecipe
from weft.wake.substitution import substituted

MAX_HEADER_BYTES = 16 * 1024
PACKET_COPIES = 3
"""Datagrams get lost and cost nothing."""


async def run_recipe(recipe: Recipe, *, timeout_seconds: float, environment: Mapping[str, str]) -> None:
    """Carry out `recipe` within `timeout_seconds`; returns when it has succeeded, raises WAKE_FAILED otherwise.

    `environment` gives the variables of its header values, and is the whole environment of a command.
    """
    match recipe:
        case HttpRecipe():
            await _send_request(recipe, timeout_seconds, environment)
        case CommandRecipe():
            await run_command(recipe.argv, timeout_seconds=timeout_seconds, environment=environment)
        case WakeOnLanRecipe():
            _send_packet(recipe)


async def _send_request(recipe: HttpRecipe, timeout_seconds: float, environment: Mapping[str, str]) -> None:
    headers = substituted(recipe.headers, environment)
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    # `from None`: aiohttp's own messages hold the address.
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, max_field_size=MAX_HEADER_BYTES) as session,
            # A redirect could send the headers to somebody else, so it counts as a failure.
            session.request(recipe.method, recipe.url, headers=headers, allow_redirects=False) as response,
        ):
            status = response.status
    except aiohttp.ClientConnectorError:
        raise _failed("the recipe's request could not connect") from None
    except (aiohttp.InvalidURL, ValueError):
        raise _failed("the recipe's request cannot be sent: its URL or a header is malformed") from None
    except TimeoutError:
        raise _failed(f"the recipe's request got no answer within {timeout_seconds:g} s") from None
    except aiohttp.ClientError:
        raise _failed("the recipe's request's connection broke before the answer") from None
    if not 200 <= status < 300:
        raise _failed(f"the recipe's request was answered with status {status}")


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
