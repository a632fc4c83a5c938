"""Tokens that authorize operations: the opToken with its shared key, and the claims that signers sign.

A shared key proves that the maker of a token had the key, and no more: not which of the named signers agreed.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import invalid_field
from weft.signing.actions import FLUSH, operation_word, read_action, same_action, token_fields
from weft.signing.strict_json import MalformedToken, canonical_json, from_base64url, read_object, to_base64url

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
# Printable ASCII, which every database stores unchanged.
_NONCE = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpToken:
    """An opToken that is in form."""

    fields: Mapping[str, Any]
    """The action it allows, as `actions.token_fields` returns it."""
    issued_at: int
    """Seconds since the epoch."""
    signers: tuple[str, ...]
    """The signers it names, each once, in order."""
    nonce: str

    def allows(self, action: operation_pb2.OperationAction) -> bool:
        """Whether it is for exactly this action, options included.

        A token that names no runner is valid for one of them as well, and one for the cache of a model may omit the
        scope "model".
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
    """Read a shared key from a file: its bytes, for a text without the trailing line ends.

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


MAX_TEXT_CHARS = 128

_NAMES = frozenset({"aud", "op", "action", "readable", "nonce", "nbf", "exp", "iat", "policy"})
# 128 random bits in base64url are 22 characters.
_RANDOM_NONCE = re.compile(r"[A-Za-z0-9_-]{22,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a registry requires of signatures."""

    audience: str
    lifetime_seconds: int
    policy_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The signed claims. Times are in whole seconds since the epoch."""

    audience: str
    action: operation_pb2.OperationAction
    nonce: str
    not_before: int
    expires_at: int
    issued_at: int
    policy_version: str


def make_payload(action: operation_pb2.OperationAction, terms: Terms, *, now: int) -> bytes:
    """The bytes to sign for one use of `action` from `now` on, in seconds since the epoch."""
    return canonical_json(
        {
            "aud": terms.audience,
            "op": operation_word(action),
            "action": to_base64url(action.SerializeToString(deterministic=True)),
            "readable": readable(action),
            "nonce": secrets.token_urlsafe(NONCE_BYTES),
            "nbf": now,
            "exp": now + terms.lifetime_seconds,
            "iat": now,
            "policy": terms.policy_version,
        }
    )


def readable(action: operation_pb2.OperationAction) -> dict[str, Any]:
    """Return the action as JSON, for readers of a token. It has no effect, and must not differ from the action."""
    return json_format.MessageToDict(action)


def read_payload(payload: bytes) -> Claims:
    """Read signed bytes.

    Raises MalformedToken: a name is missing or unknown, or the action, its kind and the readable form differ.
    """
    document = read_object(payload)
    if document.keys() != _NAMES:
        raise MalformedToken("does not say what has to be signed, or says more")
    action = read_action(from_base64url(_text(document, "action", None)))
    if document["op"] != operation_word(action):
        raise MalformedToken("is for another kind of operation than its action")
    if not _is_said_by(document["readable"], action):
        raise MalformedToken("has a readable form that is not its action")
    if _RANDOM_NONCE.fullmatch(nonce := _text(document, "nonce")) is None:
        raise MalformedToken("must have a nonce of 128 random bits in base64url")
    return Claims(
        audience=_text(document, "aud"),
        action=action,
        nonce=nonce,
        not_before=require_epoch(document["nbf"], "nbf"),
        expires_at=require_epoch(document["exp"], "exp"),
        issued_at=require_epoch(document["iat"], "iat"),
        policy_version=_text(document, "policy"),
    )


def _text(document: dict[str, Any], name: str, max_chars: int | None = MAX_TEXT_CHARS) -> str:
    value = document[name]
    if not isinstance(value, str) or not value or (max_chars is not None and len(value) > max_chars):
        raise MalformedToken(f"must have {name} as a text")
    return value


def _is_said_by(said: object, action: operation_pb2.OperationAction) -> bool:
    if not isinstance(said, dict):
        return False
    try:
        return same_action(json_format.ParseDict(said, operation_pb2.OperationAction()), action)
    except (json_format.ParseError, ValueError, TypeError, RecursionError):
        return False
