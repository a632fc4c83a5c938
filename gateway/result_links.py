"""Signed URLs of results: a URL gives access to one result without a key until it expires.

HMAC-SHA256 of the tenant, the id and the expiry, with a key that the gateways of a mesh share.
"""

import base64
import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from starlette.types import Scope

from gateway.errors import EdgeError
from gateway.request_facts import headers_of
from weft.durable.batches import file_not_found
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS, is_token

RESULTS_PATH = "/v1/results"
KEY_BYTES = 32
MAX_EXPIRY_CHARS = 12
GONE = 410
_PURPOSE = b"weft result v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedResult:
    """The parameters of a signed URL."""

    tenant: str
    file_id: str
    expires: str
    """Unix time in seconds."""
    signature: str


class ResultLinks:
    """Creates and checks the URLs of one gateway's results."""

    def __init__(
        self, key: bytes, clock: Clock, *, link_seconds: float, public_url: str = "", public_scheme: str = ""
    ) -> None:
        """`public_url`: the gateway's URL for callers; empty: from the request, with `public_scheme` if given."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key must have {KEY_BYTES} bytes")
        self._key = key
        self._clock = clock
        self._link_seconds = link_seconds
        self._public_url = public_url.rstrip("/")
        self._public_scheme = public_scheme

    def base_of(self, scope: Scope) -> str:
        """Returns the URL by which the caller of a request reaches the gateway; empty: unknown."""
        if self._public_url:
            return self._public_url
        host = headers_of(scope).get(b"host", b"").decode("latin-1")
        return f"{self._public_scheme or scope['scheme']}://{host}" if host else ""

    def link(self, base: str, tenant: str, file_id: str) -> str:
        """Returns the signed URL of a result."""
        expires = str(int(self._clock.utc_now().timestamp() + self._link_seconds))
        query = {"tenant": tenant, "expires": expires, "signature": self._signature(tenant, file_id, expires)}
        return f"{base}{RESULTS_PATH}/{quote(file_id, safe='')}?{urlencode(query)}"

    def require_valid(self, asked: SignedResult) -> None:
        """Raises NOT_FOUND for a wrong signature; for an expired URL, with HTTP status 410."""
        names = ((asked.tenant, MAX_TENANT_CHARS), (asked.file_id, MAX_REQUEST_ID_CHARS))
        is_form = all(is_token(text, most) for text, most in names) and len(asked.expires) <= MAX_EXPIRY_CHARS
        own = self._signature(asked.tenant, asked.file_id, asked.expires)
        # Compared as bytes, because compare_digest rejects text beyond ASCII.
        is_signed = hmac.compare_digest(own.encode(), asked.signature.encode("utf-8", "replace"))
        if not (is_form and is_signed):
            raise file_not_found(asked.file_id)
        if int(asked.expires) <= self._clock.utc_now().timestamp():
            message = "the address of this result has expired; ask for its task again"
            raise EdgeError(GONE, Reason.NOT_FOUND, message)

    def _signature(self, tenant: str, file_id: str, expires: str) -> str:
        text = b"\0".join((_PURPOSE, tenant.encode(), file_id.encode("utf-8", "replace"), expires.encode()))
        return base64.urlsafe_b64encode(hmac.digest(self._key, text, hashlib.sha256)).decode().rstrip("=")
