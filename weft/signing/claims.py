"""What signers sign: one action, for one registry, for a short time, once."""

import re
import secrets
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from weft.api.operations.v1 import operation_pb2
from weft.signing.actions import operation_word, read_action, same_action
from weft.signing.op_token import NONCE_BYTES, require_epoch
from weft.signing.strict_json import MalformedToken, canonical_json, from_base64url, read_object, to_base64url

MAX_TEXT_CHARS = 128

_NAMES = frozenset({"aud", "op", "action", "readable", "nonce", "nbf", "exp", "iat", "policy"})
# 128 random bits in base64url are 22 characters.
_NONCE = re.compile(r"[A-Za-z0-9_-]{22,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a registry asks of those who sign."""

    audience: str
    lifetime_seconds: int
    policy_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What was signed. Times are in whole seconds since the epoch."""

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
    """The action as JSON, for those who look into a token. It counts for nothing, and may not say anything else."""
    return json_format.MessageToDict(action)


def read_payload(payload: bytes) -> Claims:
    """What signed bytes say.

    Raises MalformedToken: a name is missing or unknown, or the action, its kind and the readable form are not the same.
    """
    document = read_object(payload)
    if document.keys() != _NAMES:
        raise MalformedToken("does not say what has to be signed, or says more")
    action = read_action(from_base64url(_text(document, "action", None)))
    if document["op"] != operation_word(action):
        raise MalformedToken("is for another kind of operation than its action")
    if not _is_said_by(document["readable"], action):
        raise MalformedToken("has a readable form that is not its action")
    if _NONCE.fullmatch(nonce := _text(document, "nonce")) is None:
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
