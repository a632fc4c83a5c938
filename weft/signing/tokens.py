"""Tokens that authorize operations: the opToken with a shared key, and the claims that signers sign.

A shared key only proves that the maker of a token had the key, not which of the named signers agreed.
"""

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_service_pb2 import GetGovernanceResponse
from weft.api.runner.v1 import load_pb2, model_store_pb2, runner_service_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.field_rules import enum_words
from weft.kernel.names import MAX_NAME_CHARS, is_token
from weft.signing.strict_json import MalformedToken, canonical_json, from_base64url, read_object, to_base64url

FLUSH = "cache-flush"
CONTEXT_PARAMETER = "context_tokens"
BYTES_PER_MB = 1024 * 1024

_KINDS: Mapping[str, tuple[str, str]] = {
    "load_model": ("model-load", "load"),
    "unload_model": ("model-unload", "unload"),
    "flush_cache": (FLUSH, "flush the cache of"),
    "pull_model": ("model-pull", "pull"),
    "remove_model": ("model-remove", "remove"),
}
"""Words of each kind of action: in tokens, and in a headline."""
_SCOPES = enum_words(runner_service_pb2.FlushCacheRequest.Scope.DESCRIPTOR)
_FORMS = enum_words(model_store_pb2.StoredForm.DESCRIPTOR)


def operation_word(action: operation_pb2.OperationAction) -> str:
    """Returns the kind of an action, such as "model-load". Raises MalformedToken if it is empty."""
    return _words_of(action)[0]


def _words_of(action: operation_pb2.OperationAction) -> tuple[str, str]:
    kind = action.WhichOneof("kind")
    if kind is None:
        raise MalformedToken("has an action that does nothing")
    return _KINDS[kind]


def read_action(data: bytes) -> operation_pb2.OperationAction:
    """Parses a serialized action. Raises MalformedToken, also for unknown fields, which might be conditions."""
    try:
        action = operation_pb2.OperationAction.FromString(data)
    except DecodeError as error:
        raise MalformedToken("has an action that cannot be read") from error
    if has_unknown_fields(action):
        raise MalformedToken("has an action with a part that this version does not know")
    operation_word(action)
    return action


def has_unknown_fields(action: operation_pb2.OperationAction) -> bool:
    """Whether an action has fields that this release does not know."""
    known = operation_pb2.OperationAction()
    known.CopyFrom(action)
    known.DiscardUnknownFields()
    return known.ByteSize() != action.ByteSize()


def same_action(one: operation_pb2.OperationAction, other: operation_pb2.OperationAction) -> bool:
    """Whether two actions are the same; empty options equal none."""
    return _normal(one) == _normal(other)


def token_fields(action: operation_pb2.OperationAction) -> dict[str, Any]:
    """Returns the fields of an opToken for exactly this action: JSON types, only what is set."""
    match action.WhichOneof("kind"):
        case "load_model":
            fields = _load_fields(action.load_model)
        case "unload_model":
            fields = {"modelId": action.unload_model.model}
        case "pull_model":
            pull = action.pull_model
            form = _FORMS.get(pull.form, pull.form)
            fields = {"modelId": pull.source, "runner": pull.runner, "form": form or None}
        case "remove_model":
            fields = {"modelId": action.remove_model.model}
        case _:
            flush = action.flush_cache
            fields = {
                "modelId": flush.model,
                "scope": _SCOPES.get(flush.scope),
                "tenantId": flush.tenant,
                "tag": flush.tag,
                "runner": flush.runner,
            }
    set_fields = {name: value for name, value in fields.items() if value not in (None, "", {})}
    return {"operation": operation_word(action), **set_fields}


def _load_fields(load: operation_pb2.LoadModel) -> dict[str, Any]:
    options = load.options
    parameters = {name: _plain(value) for name, value in options.parameters.items()}
    context = parameters.get(CONTEXT_PARAMETER)
    if type(context) is int:
        del parameters[CONTEXT_PARAMETER]
    else:
        context = None
    return {
        # A model that is given by its source has the source as its id, as in the runner API.
        "modelId": load.source or load.model,
        "name": load.model if load.source else None,
        "runner": load.runner,
        "quantization": options.quantization,
        "maxContextLength": context,
        "gpuMemoryBudgetMB": _whole_if_whole(options.memory_budget_bytes, BYTES_PER_MB) or None,
        "evictModel": load.evict_model,
        "parameters": parameters,
        "keepAlive": _seconds(options) if options.HasField("keep_alive") else None,
        "pin": options.pin or None,
        "replicas": load.replicas or None,
    }


def _plain(value: load_pb2.LoadValue) -> int | float | str | bool | None:
    kind = value.WhichOneof("kind")
    return None if kind is None else getattr(value, kind)


def _seconds(options: load_pb2.LoadOptions) -> int | float:
    return _whole_if_whole(options.keep_alive.seconds * 10**9 + options.keep_alive.nanos, 10**9)


def _whole_if_whole(value: int, unit: int) -> int | float:
    return value / unit if value % unit else value // unit


def _normal(action: operation_pb2.OperationAction) -> operation_pb2.OperationAction:
    normal = operation_pb2.OperationAction()
    normal.CopyFrom(action)
    if normal.HasField("load_model") and not normal.load_model.options.ByteSize():
        normal.load_model.ClearField("options")
    return normal


_EVERYTHING = "every model"


def in_words(action: operation_pb2.OperationAction) -> list[str]:
    """Returns a headline such as "load qwen", then a line `name: value` for each other field that is set.

    Raises MalformedToken for an empty action.
    """
    verb = _words_of(action)[1]
    work = getattr(action, str(action.WhichOneof("kind")))
    subject = "source" if getattr(work, "source", "") else "model"
    what = getattr(work, subject)
    return [f"{verb} {_quoted(what) if what else _EVERYTHING}", *_lines(work, (subject,))]


def _lines(message: Message, left_out: tuple[str, ...] = ()) -> Iterator[str]:
    for field, value in message.ListFields():
        if field.name not in left_out:
            yield from _set_fields(field, value)


def _set_fields(field: FieldDescriptor, value: Any) -> Iterator[str]:
    if field.message_type is None:
        yield f"{field.name}: {_word(field, value)}"
    elif field.message_type.GetOptions().map_entry:
        for name in sorted(value):
            yield f"{name}: {_value(value[name])}"
    elif isinstance(value, Duration):
        yield f"{field.name}: {value.ToJsonString()}"
    else:
        yield from _lines(value)


def _value(value: Message) -> str:
    return ", ".join(_word(field, inner) for field, inner in value.ListFields()) or "nothing"


def _word(field: FieldDescriptor, value: Any) -> str:
    if field.enum_type is not None:
        found = field.enum_type.values_by_number.get(value)
        return str(value) if found is None else found.name.rpartition("_")[2].lower()
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    """Returns a plain name unchanged, and any other text in quotes."""
    return text if is_token(text, MAX_NAME_CHARS) else json.dumps(text)


MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096
MAX_NONCE_CHARS = 128
MAX_SIGNERS = 64
MAX_EPOCH_SECONDS = 253_402_300_799
"""The last second of the year 9999."""
NONCE_BYTES = 16

_KEPT_APART = frozenset({"issuedAt", "signers", "nonce"})
_NAMES_OF_ACTIONS = frozenset(
    {"operation", "form", "scope", "tenantId", "tag", *_load_fields(operation_pb2.LoadModel())}
)
# Printable ASCII, which all databases store unchanged.
_NONCE = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpToken:
    """A well-formed opToken."""

    fields: Mapping[str, Any]
    """The action it allows, as returned by `token_fields`."""
    issued_at: int
    """Seconds since the epoch."""
    signers: tuple[str, ...]
    """The named signers, unique and sorted."""
    nonce: str

    def allows(self, action: operation_pb2.OperationAction) -> bool:
        """Whether it is for exactly this action, including options.

        A token without a runner is valid for any runner, and one for a model's cache may omit the scope "model".
        """
        wanted = token_fields(action)
        named = dict(self.fields)
        if "runner" not in named:
            wanted.pop("runner", None)
        if named.get("operation") == FLUSH and "modelId" in named:
            named.setdefault("scope", "model")
        return canonical_json(named) == canonical_json(wanted)


def read_op_token(document: Mapping[str, Any]) -> OpToken:
    """Returns the opToken in a JSON object. Raises MalformedToken, also for unknown names."""
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
    """Returns `value` if it is whole seconds since the epoch. Raises MalformedToken otherwise."""
    if type(value) is not int or not 0 <= value <= MAX_EPOCH_SECONDS:
        raise MalformedToken(f"must have {name} in whole seconds since the epoch")
    return value


def shared_key_code(op_token: Mapping[str, Any], key: bytes) -> bytes:
    """Returns the HMAC-SHA256 of the canonical JSON of an opToken. Raises MalformedToken."""
    return hmac.digest(key, canonical_json(op_token), hashlib.sha256)


def make_op_token(
    action: operation_pb2.OperationAction, *, signers: Sequence[str], issued_at: int, key: bytes
) -> dict[str, Any]:
    """Returns `{"opToken": ..., "signature": ...}` for one use of `action`; `issued_at` is in epoch seconds."""
    op_token = {
        **token_fields(action),
        "issuedAt": issued_at,
        "signers": list(signers),
        "nonce": secrets.token_urlsafe(NONCE_BYTES),
    }
    return {"opToken": op_token, "signature": shared_key_code(op_token, key).hex()}


def read_shared_key(path: Path, field: str) -> bytes:
    """Returns the shared key in a file; a text loses its trailing newlines.

    Raises INVALID_ARGUMENT naming `field` if the file cannot be read, or its content is not a shared key.
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
class Claims:
    """Signed claims. Times are whole seconds since the epoch."""

    audience: str
    action: operation_pb2.OperationAction
    nonce: str
    not_before: int
    expires_at: int
    issued_at: int
    policy_version: str


def make_payload(action: operation_pb2.OperationAction, rules: GetGovernanceResponse, *, now: int) -> bytes:
    """Returns the bytes to sign for one use of `action` from `now` (epoch seconds) under a registry's rules."""
    return canonical_json(
        {
            "aud": rules.audience,
            "op": operation_word(action),
            "action": to_base64url(action.SerializeToString(deterministic=True)),
            "readable": readable(action),
            "nonce": secrets.token_urlsafe(NONCE_BYTES),
            "nbf": now,
            # Whole seconds, rounded down, since the registry rejects a longer lifetime than its limit.
            "exp": now + rules.token_lifetime.seconds,
            "iat": now,
            "policy": rules.policy_version,
        }
    )


def readable(action: operation_pb2.OperationAction) -> dict[str, Any]:
    """Returns the action as JSON for people who read a token. It has no effect, but must match the action."""
    return json_format.MessageToDict(action)


def read_payload(payload: bytes) -> Claims:
    """Returns the claims in signed bytes.

    Raises MalformedToken if a name is missing or unknown, or the action, its kind and the readable form differ.
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
