"""Texts that clients keep for the mesh and cannot read or change: AES-256-GCM, bound to a tenant and a purpose.

Keys are derived from the one that the gateways of a mesh share. The nonce is derived from the text, so that every
rendering of a stored answer is the same, on any gateway.
"""

import base64
import binascii
import hashlib
import hmac

from weft.kernel.errors.error_tree import FieldError, invalid_field

KEY_BYTES = 32
_NONCE_BYTES = 12
_PREFIX = "weft1."
_UNREADABLE = (
    "cannot be read: another service or tenant wrote it, or a gateway with another gateway.results.key_file; "
    "send the conversation itself"
)


class SealedTexts:
    """Seals and opens the texts of one purpose, such as summaries."""

    def __init__(self, key: bytes, purpose: str) -> None:
        """`key`: at least 32 bytes, the same on all gateways of the mesh."""
        if len(key) < KEY_BYTES:
            raise ValueError(f"the key must have at least {KEY_BYTES} bytes")
        self._key = key
        self._purpose = purpose

    def seal(self, tenant: str, text: str) -> str:
        """Returns the text, encrypted and authenticated; the same for the same text."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - 6 MB of memory

        data = text.encode("utf-8", "surrogatepass")
        nonce = hmac.digest(self._key_of(tenant, "nonce"), data, hashlib.sha256)[:_NONCE_BYTES]
        sealed = nonce + AESGCM(self._key_of(tenant, "text")).encrypt(nonce, data, None)
        return _PREFIX + base64.urlsafe_b64encode(sealed).decode()

    def open(self, tenant: str, sealed: object, field: str) -> str:
        """Returns a text that was sealed for the tenant. Raises INVALID_ARGUMENT naming `field`."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - as in `seal`
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

        if not isinstance(sealed, str) or not sealed.startswith(_PREFIX):
            raise unreadable(field)
        try:
            data = base64.urlsafe_b64decode(sealed.removeprefix(_PREFIX))
            key = AESGCM(self._key_of(tenant, "text"))
            return key.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], None).decode("utf-8", "surrogatepass")
        except (InvalidTag, binascii.Error, ValueError):
            raise unreadable(field) from None

    def _key_of(self, tenant: str, use: str) -> bytes:
        name = f"weft sealed text v1\0{self._purpose}\0{use}\0{tenant}"
        return hmac.digest(self._key, name.encode("utf-8", "surrogatepass"), hashlib.sha256)


def unreadable(field: str) -> FieldError:
    """Returns the error of a text that this gateway cannot open."""
    return invalid_field(field, _UNREADABLE)
