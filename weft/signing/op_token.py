"""The opToken: what may be done, by whose leave, in the JSON that runner-api clients know; and the shared key over it.

A shared key proves that somebody who has it made the token, and no more: not which of the named signers agreed.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import invalid_field
from weft.signing.actions import FLUSH, token_fields
from weft.signing.strict_json import MalformedToken, canonical_json

MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096
MAX_NONCE_CHARS = 128
MAX_SIGNERS = 64
MAX_EPOCH_SECONDS = 253_402_300_799
"""The last second of the year 9999."""
NONCE_BYTES = 16

_KEPT_APART = frozenset({"issuedAt", "signers", "nonce"})
_NAMES_OF_ACTIONS = frozenset(
    {
        "operation",
        "modelId",
        "quantization",
        "maxContextLength",
        "gpuMemoryBudgetMB",
        "evictModel",
        "parameters",
        "keepAlive",
        "pin",
        "replicas",
        "scope",
        "tenantId",
        "tag",
        "runner",
    }
)
# Printable ASCII: what every database keeps as it is.
_NONCE = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpToken:
    """An opToken that is in form."""

    fields: Mapping[str, Any]
    """What it allows, as `actions.token_fields` says it."""
    issued_at: int
    """Seconds since the epoch."""
    signers: tuple[str, ...]
    """Those who are said to agree, each once, in order."""
    nonce: str

    def allows(self, action: operation_pb2.OperationAction) -> bool:
        """Whether it is for exactly this action, options included.

        A token that names no runner is good for one of them as well, and one for the cache of a model need not say that
        the scope is "model".
        """
        wanted = token_fields(action)
        named = dict(self.fields)
        if "runner" not in named:
            wanted.pop("runner", None)
        if named.get("operation") == FLUSH and "modelId" in named:
            named.setdefault("scope", "model")
        return canonical_json(named) == canonical_json(wanted)


def read_op_token(document: Mapping[str, Any]) -> OpToken:
    """The opToken that a JSON object is. Raises MalformedToken, also for names that it does not know."""
    unknown = document.keys() - _NAMES_OF_ACTIONS - _KEPT_APART
    if unknown:
        raise MalformedToken("says something that this version does not know")
    signers, nonce = document.get("signers"), document.get("nonce")
    if not isinstance(signers, list) or not 0 < len(signers) <= MAX_SIGNERS:
        raise MalformedToken(f"must name 1 to {MAX_SIGNERS} signers")
    if not all(isinstance(signer, str) for signer in signers):
        raise MalformedToken("has a signer that is no text")
    if not isinstance(nonce, str) or _NONCE.fullmatch(nonce) is None:
        raise MalformedToken(f"must have a nonce of 1 to {MAX_NONCE_CHARS} printable ASCII characters")
    return OpToken(
        fields={name: document[name] for name in document.keys() & _NAMES_OF_ACTIONS if document[name] is not None},
        issued_at=require_epoch(document.get("issuedAt"), "issuedAt"),
        signers=tuple(sorted(set(signers))),
        nonce=nonce,
    )


def require_epoch(value: object, name: str) -> int:
    """Whole seconds since the epoch. Raises MalformedToken."""
    if type(value) is not int or not 0 <= value <= MAX_EPOCH_SECONDS:
        raise MalformedToken(f"must have {name} in whole seconds since the epoch")
    return value


def shared_key_code(op_token: Mapping[str, Any], key: bytes) -> bytes:
    """HMAC-SHA256 over the canonical JSON of an opToken. Raises MalformedToken."""
    return hmac.digest(key, canonical_json(op_token), hashlib.sha256)


def make_op_token(
    action: operation_pb2.OperationAction, *, signers: Sequence[str], issued_at: int, key: bytes
) -> dict[str, Any]:
    """`{"opToken": ..., "signature": ...}` for one use of `action`; `issued_at` is in seconds since the epoch."""
    op_token = {
        **token_fields(action),
        "issuedAt": issued_at,
        "signers": list(signers),
        "nonce": secrets.token_urlsafe(NONCE_BYTES),
    }
    return {"opToken": op_token, "signature": shared_key_code(op_token, key).hex()}


def read_shared_key(path: Path, field: str) -> bytes:
    """The key in a file: its bytes, of a text without the line ends after it.

    Raises INVALID_ARGUMENT naming `field` when it cannot be read, or is shorter or longer than a key may be.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise invalid_field(field, f"{path} cannot be read: {error.strerror}") from error
    key = content.rstrip(b"\r\n") if _is_text(content) else content
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise invalid_field(field, f"{path} must hold a key of {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
    if key.lstrip().startswith((b"-----BEGIN", b"ssh-")):
        raise invalid_field(field, f"{path} holds a key for signatures; a shared key is random bytes")
    return key


def _is_text(content: bytes) -> bool:
    return all(0x20 <= byte < 0x7F or byte in b"\r\n\t" for byte in content)
