"""The HTTP request of a wake recipe. Separate, because most routers never need the HTTP client's memory."""

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress

import aiohttp
from yarl import URL

from weft.api.registry.v1 import wake_pb2
from weft.kernel.channels.outbound import ForbiddenAddressError, Outbound
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.wake.recipes import DEFAULT_METHOD

MAX_HEADER_BYTES = 16 * 1024


async def send_request(
    action: wake_pb2.HttpAction, timeout_seconds: float, environment: Mapping[str, str], outbound: Outbound
) -> None:
    """Sends the request. Raises WAKE_FAILED unless the response has a 2xx status."""
    headers = substituted(action.headers, environment)
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    # `from None`: aiohttp's messages contain the address.
    try:
        target = URL(action.url)
        async with asyncio.timeout(timeout_seconds):
            with suppress(OSError):  # told below
                await asyncio.to_thread(outbound.resolve, target.raw_host or "", target.port or 0)
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=outbound.open_socket),
                timeout=timeout,
                max_field_size=MAX_HEADER_BYTES,
            ) as session,
            # A redirect could send the headers to another host, so it counts as a failure.
            session.request(
                action.method or DEFAULT_METHOD, action.url, headers=headers, allow_redirects=False
            ) as response,
        ):
            status = response.status
    except ForbiddenAddressError as refused:
        raise _failed(f"the recipe's request is not sent: its address {refused}") from None
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


def _failed(message: str) -> WeftError:
    return WeftError(Reason.WAKE_FAILED, message)


# Only these variables: a recipe of another host must not read the rest of the environment.
_VARIABLE = re.compile(r"\$\{(WEFT_WAKE_[A-Z0-9_]+)\}")


def substituted(headers: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers with every variable replaced by its value. Raises WAKE_FAILED naming an unset variable."""

    def value_of(found: re.Match[str]) -> str:
        name = found[1]
        if name not in environment:
            raise WeftError(Reason.WAKE_FAILED, f"the environment variable {name} is not set where the recipe runs")
        return environment[name]

    return {header: _VARIABLE.sub(value_of, value) for header, value in headers.items()}
