"""The request that delivers an event. Separate, because most routers never need the HTTP client's memory."""

import asyncio
import hmac
from base64 import b64decode, b64encode
from collections.abc import Mapping

import aiohttp
import msgspec
from yarl import URL

from weft.api.router.v1.webhook_pb2 import WebhookEvent
from weft.kernel.channels.outbound import ForbiddenAddressError, Outbound
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

SEND_SECONDS = 10.0
"""Maximum duration of an attempt."""
MAX_FIELD_BYTES = 8 * 1024


def body_of(event: WebhookEvent) -> bytes:
    """Returns the event as JSON, in OpenAI's format."""
    about = {"id": event.id, "object": "event", "created_at": event.create_time.seconds, "type": event.type}
    return msgspec.json.encode(about | {"data": {"id": event.object_id}})


def signed_headers(event: str, secret: str, body: bytes, now: float) -> Mapping[str, str]:
    """Returns the headers of the Standard Webhooks specification; `now`: UTC seconds."""
    timestamp = str(int(now))
    # Not by the package `standardwebhooks`, which ignores wrong characters in a secret.
    key = b64decode(secret.removeprefix("whsec_"), validate=True)
    signature = hmac.digest(key, f"{event}.{timestamp}.".encode() + body, "sha256")
    return {
        "webhook-id": event,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{b64encode(signature).decode()}",
        "Content-Type": "application/json",
        "User-Agent": "weft",
    }


async def send(url: str, secret: str, event: WebhookEvent, now: float, outbound: Outbound) -> None:
    """Sends an event. Raises CONNECT_FAILED, HEADERS_TIMEOUT, PERMISSION_DENIED, BACKEND_ERROR without a 2xx status."""
    body, target = body_of(event), URL(url)
    # `from None`: aiohttp's messages contain the address.
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await asyncio.to_thread(outbound.resolve, target.raw_host or "", target.port or 0)
            status = await _post(target, signed_headers(event.id, secret, body, now), body, outbound)
    except ForbiddenAddressError as refused:
        raise WeftError(Reason.PERMISSION_DENIED, f"the address of the webhook's URL {refused}") from None
    except TimeoutError:
        raise WeftError(Reason.HEADERS_TIMEOUT, f"the receiver did not answer within {SEND_SECONDS:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise WeftError(Reason.CONNECT_FAILED, f"the receiver could not be reached: {type(error).__name__}") from None
    # A redirect, which could name another host, is a failure too.
    if not 200 <= status < 300:
        raise WeftError(Reason.BACKEND_ERROR, f"the receiver answered with status {status}")


async def _post(target: URL, headers: Mapping[str, str], body: bytes, outbound: Outbound) -> int:
    """Returns the status; the body of the answer is not read."""
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=outbound.open_socket, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_field_size=MAX_FIELD_BYTES,
        ) as session,
        session.post(target, data=body, headers=headers, allow_redirects=False) as response,
    ):
        return response.status
