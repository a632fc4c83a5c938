"""Signers, their keys, a gate on a fake clock, and tokens as honest and hostile people make them."""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from registry_svc.operations.governance import Admission, Gatekeeper, build_gate
from registry_svc.operations.policy.governance import Refused
from registry_svc.registry_config import GovernanceConfig, GovernanceMode, Signer
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import load_pb2, runner_service_pb2
from weft.signing.tokens import token_fields
from weft_testing.fake_clock import FakeClock

LIFETIME, SKEW = 300, 30
SHARED_KEY = bytes(range(7, 47))
NAMES = ("alice", "bob", "carol")
Scope = runner_service_pb2.FlushCacheRequest


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_b64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


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


def config(mode: GovernanceMode = GovernanceMode.SHARED_KEY, **changes: Any) -> GovernanceConfig:
    """Alice, Bob and Carol, two of whom must agree; Eve is revoked."""
    signers = [*(Signer(id=name) for name in NAMES), Signer(id="eve", revoked=True)]
    settings: dict[str, Any] = {
        "mode": mode,
        "signers": tuple(signers),
        "required_signers": 2,
        "shared_key": SHARED_KEY,
        "token_lifetime_seconds": float(LIFETIME),
        "clock_skew_seconds": float(SKEW),
        **changes,
    }
    return GovernanceConfig(**settings)


@dataclass
class Stage:
    """A gate that has been started, some minutes ago."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    clock: FakeClock = field(default_factory=FakeClock)
    gate: Gatekeeper = field(init=False)
    made: int = 0

    def __post_init__(self) -> None:
        self.gate = build_gate(config(**self.changes), self.clock)
        self.gate.recall(None)
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

    def signed(self, action: operation_pb2.OperationAction, /, **changes: Any) -> str:
        """A token for an action; None takes a name out."""
        return with_code(self.op_token(token_fields(action), **changes))

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
