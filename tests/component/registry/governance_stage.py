"""Signers, their keys, a gate on a fake clock, and tokens as honest and hostile people make them."""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf import json_format

from registry_svc.config import GovernanceConfig, GovernanceMode, Signer
from registry_svc.operations.governance import Admission, Gatekeeper, GovernanceMarks, build_gate
from registry_svc.operations.policy.governance import Refused
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import load_pb2, runner_service_pb2
from weft_testing.fake_clock import FakeClock

AUDIENCE = "reg-0123456789abcdef"
POLICY = "7"
LIFETIME, SKEW = 300, 30
SHARED_KEY = bytes(range(7, 47))
HEADER = {"alg": "EdDSA", "typ": "weft-op+json"}
NAMES = ("alice", "bob", "carol")
Scope = runner_service_pb2.FlushCacheRequest


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_b64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def private_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def public_bytes(name: str) -> bytes:
    return private_key(name).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def load(model: str = "qwen", **options: int) -> operation_pb2.OperationAction:
    """A load, with whole numbers as parameters."""
    parameters = {name: load_pb2.LoadValue(integer=value) for name, value in options.items()}
    return operation_pb2.OperationAction(
        load_model=operation_pb2.LoadModel(model=model, options=load_pb2.LoadOptions(parameters=parameters))
    )


def unload(model: str = "qwen") -> operation_pb2.OperationAction:
    return operation_pb2.OperationAction(unload_model=operation_pb2.UnloadModel(model=model))


def flush(scope: "Scope.Scope.ValueType", **fields: str) -> operation_pb2.OperationAction:
    return operation_pb2.OperationAction(flush_cache=operation_pb2.FlushCache(scope=scope, **fields))


def config(mode: GovernanceMode, **changes: Any) -> GovernanceConfig:
    """Alice, Bob and Carol, two of whom must agree; Eve's key is revoked."""
    signers = [Signer(id=name, public_key=b64(public_bytes(name))) for name in NAMES]
    signers.append(Signer(id="eve", public_key=b64(public_bytes("eve")), revoked=True))
    settings: dict[str, Any] = {
        "mode": mode,
        "signers": tuple(signers),
        "required_signers": 2,
        "shared_key": SHARED_KEY if mode is GovernanceMode.SHARED_KEY else b"",
        "token_lifetime_seconds": float(LIFETIME),
        "clock_skew_seconds": float(SKEW),
        "policy_version": POLICY,
        **changes,
    }
    return GovernanceConfig(**settings)


@dataclass
class Stage:
    """A gate that has been started, some minutes ago."""

    mode: GovernanceMode
    changes: Mapping[str, Any] = field(default_factory=dict)
    clock: FakeClock = field(default_factory=FakeClock)
    gate: Gatekeeper = field(init=False)
    made: int = 0

    def __post_init__(self) -> None:
        self.gate = build_gate(config(self.mode, **self.changes), self.clock)
        self.gate.recall(GovernanceMarks(audience=AUDIENCE))
        self._started = self.clock.utc_now()
        self.seconds_later = 600.0

    @property
    def now(self) -> int:
        """Whole seconds since the epoch."""
        return int((self._started + timedelta(seconds=self.seconds_later)).timestamp())

    def admit(self, action: operation_pb2.OperationAction, authorization: str) -> Admission:
        now = self._started + timedelta(seconds=self.seconds_later)
        return self.gate.admit(action, authorization, now)

    def why_refused(self, action: operation_pb2.OperationAction, authorization: str) -> str:
        """Why the gate refuses this token."""
        with pytest.raises(Refused) as refused:
            self.admit(action, authorization)
        return refused.value.why

    def nonce(self) -> str:
        self.made += 1
        return b64(hashlib.sha256(str(self.made).encode()).digest()[:16])

    def payload(self, action: operation_pb2.OperationAction, /, **changes: Any) -> bytes:
        """What honest signers sign, but for `changes`; None takes a name out."""
        claims = {
            "aud": AUDIENCE,
            "op": {"load_model": "model-load", "unload_model": "model-unload", "flush_cache": "cache-flush"}[
                str(action.WhichOneof("kind"))
            ],
            "action": b64(action.SerializeToString()),
            "readable": json_format.MessageToDict(action),
            "nonce": self.nonce(),
            "nbf": self.now,
            "exp": self.now + LIFETIME,
            "iat": self.now,
            "policy": POLICY,
            **changes,
        }
        return json.dumps({name: value for name, value in claims.items() if value is not None}).encode()

    def signed(
        self, action: operation_pb2.OperationAction, /, *, by: Sequence[str] = ("alice", "bob"), **changes: Any
    ) -> str:
        return envelope(self.payload(action, **changes), [signature_of(name) for name in by])

    def op_token(self, action_fields: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        """An opToken as clients of the runner API make it; None takes a name out."""
        token = {
            **action_fields,
            "issuedAt": self.now,
            "signers": ["alice", "bob"],
            "nonce": self.nonce(),
            **changes,
        }
        return {name: value for name, value in token.items() if value is not None}


@dataclass(frozen=True)
class SignatureOf:
    """How one signature is made."""

    header: Mapping[str, Any]
    key_of: str


def signature_of(name: str, key_of: str = "", **header: Any) -> SignatureOf:
    """By `name`, with the key of somebody else and other headers where that is said; None takes a header out."""
    wanted = {**HEADER, "kid": name, **header}
    return SignatureOf({key: value for key, value in wanted.items() if value is not None}, key_of or name)


def envelope(payload: bytes, signatures: Sequence[SignatureOf]) -> str:
    """A JWS in general JSON form, made without the library that checks it."""
    made = []
    for each in signatures:
        protected = b64(json.dumps(dict(each.header)).encode())
        signature = private_key(each.key_of).sign(f"{protected}.{b64(payload)}".encode())
        made.append({"protected": protected, "signature": b64(signature)})
    return json.dumps({"payload": b64(payload), "signatures": made})


def canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def with_code(op_token: Mapping[str, Any], key: bytes = SHARED_KEY) -> str:
    """The envelope of an opToken."""
    code = hmac.digest(key, canonical(op_token), hashlib.sha256).hex()
    return json.dumps({"opToken": op_token, "signature": code})


def compact(payload: bytes, key: bytes = SHARED_KEY, **header: Any) -> str:
    """A compact JWS with HMAC-SHA256, whatever its header says."""
    signed = f"{b64(json.dumps({'alg': 'HS256', **header}).encode())}.{b64(payload)}"
    return f"{signed}.{b64(hmac.digest(key, signed.encode(), hashlib.sha256))}"
