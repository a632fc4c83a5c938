"""Tokens that authorize operations: the opToken with a shared key.

A shared key only proves that the maker of a token had the key, not which of the named signers agreed.
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
from weft.api.runner.v1 import load_pb2, model_store_pb2, runner_service_pb2
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.field_rules import enum_words
from weft.signing.strict_json import MalformedToken, canonical_json

FLUSH = "cache-flush"
CONTEXT_PARAMETER = "context_tokens"
BYTES_PER_MB = 1024 * 1024

_KINDS: Mapping[str, str] = {
    "load_model": "model-load",
    "unload_model": "model-unload",
    "flush_cache": FLUSH,
    "pull_model": "model-pull",
    "remove_model": "model-remove",
}
"""Words of each kind of action in tokens."""
_SCOPES = enum_words(runner_service_pb2.FlushCacheRequest.Scope.DESCRIPTOR)
_FORMS = enum_words(model_store_pb2.StoredForm.DESCRIPTOR)


def operation_word(action: operation_pb2.OperationAction) -> str:
    """Returns the kind of an action, such as "model-load". Raises MalformedToken if it is empty."""
    kind = action.WhichOneof("kind")
    if kind is None:
        raise MalformedToken("has an action that does nothing")
    return _KINDS[kind]


def has_unknown_fields(action: operation_pb2.OperationAction) -> bool:
    """Whether an action has fields that this release does not know."""
    known = operation_pb2.OperationAction()
    known.CopyFrom(action)
    known.DiscardUnknownFields()
    return known.ByteSize() != action.ByteSize()


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
        raise invalid_field(field, f"{path} holds a PEM or SSH key; a shared key is random bytes")
    return key


def _is_text(content: bytes) -> bool:
    return all(0x20 <= byte < 0x7F or byte in b"\r\n\t" for byte in content)
