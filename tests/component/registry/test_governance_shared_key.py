"""Governance with a shared key: the tokens of the runner API, in each of their forms."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from governance_stage import (
    LIFETIME,
    SHARED_KEY,
    SKEW,
    Scope,
    Stage,
    b64,
    canonical,
    compact,
    config,
    flush,
    load,
    unload,
    with_code,
)

from registry_svc.operations.governance import build_gate
from registry_svc.registry_config import GovernanceMode
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import load_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.signing.tokens import make_op_token, read_shared_key, token_fields
from weft_testing.fake_clock import FakeClock

PLAIN = {"operation": "model-load", "modelId": "qwen"}
NO_CODE = "its authentication code is not that of the shared key"
OTHER = "it is for another action, or for other options"


@pytest.fixture
def stage() -> Stage:
    return Stage()


def _everything() -> operation_pb2.OperationAction:
    options = load_pb2.LoadOptions(
        quantization="q8_0",
        memory_budget_bytes=40_000 * 1024 * 1024,
        keep_alive=Duration(seconds=300, nanos=500_000_000),
        pin=True,
        parameters={
            "context_tokens": load_pb2.LoadValue(integer=32_768),
            "spec_draft_p_min": load_pb2.LoadValue(number=0.75),
            "cache_type_k": load_pb2.LoadValue(word="q8_0"),
            "flash_attention": load_pb2.LoadValue(flag=True),
        },
    )
    return operation_pb2.OperationAction(
        load_model=operation_pb2.LoadModel(model="big", options=options, evict_model="small", replicas=2)
    )


EVERYTHING: dict[str, Any] = {
    "operation": "model-load",
    "modelId": "big",
    "quantization": "q8_0",
    "maxContextLength": 32_768,
    "gpuMemoryBudgetMB": 40_000,
    "evictModel": "small",
    "keepAlive": 300.5,
    "pin": True,
    "replicas": 2,
    "parameters": {"spec_draft_p_min": 0.75, "cache_type_k": "q8_0", "flash_attention": True},
}


def test_runner_api_token_is_accepted_in_every_form(stage: Stage) -> None:
    forms = [
        with_code(stage.op_token(PLAIN)),
        b64(with_code(stage.op_token(PLAIN)).encode()),
        base64.urlsafe_b64encode(with_code(stage.op_token(PLAIN)).encode()).decode(),
        compact(json.dumps(stage.op_token(PLAIN)).encode()),
        compact(json.dumps(stage.op_token(PLAIN), indent=3).encode(), typ="JWT"),
    ]
    assert forms[3].startswith("eyJ")
    for form in forms:
        admission = stage.admit(load(), form)
        assert admission.signers == ("alice", "bob")
        assert admission.nonce
        assert admission.issued_at is not None
        assert admission.issued_at.timestamp() == stage.now


def test_mac_can_be_hex_or_base64url(stage: Stage) -> None:
    token = json.loads(with_code(stage.op_token(PLAIN)))
    code = bytes.fromhex(token["signature"])
    for form in (code.hex().upper(), b64(code), b64(code) + "="):
        assert stage.admit(load(), json.dumps({**token, "signature": form})).signers


def test_every_option_can_be_specified(stage: Stage) -> None:
    assert token_fields(_everything()) == EVERYTHING
    assert stage.admit(_everything(), with_code(stage.op_token(EVERYTHING))).signers


def test_tokens_created_by_this_library_are_accepted(stage: Stage) -> None:
    for action in (_everything(), unload(), flush(Scope.SCOPE_TAG, tenant="acme", tag="häuser")):
        token = make_op_token(action, signers=["bob", "alice"], issued_at=stage.now, key=SHARED_KEY)
        assert stage.admit(action, json.dumps(token)).signers == ("alice", "bob")


@pytest.mark.parametrize("name", [name for name in EVERYTHING if name not in ("operation", "modelId")])
def test_option_missing_in_the_token_is_rejected(stage: Stage, name: str) -> None:
    """A token for a plain load allows no other context length."""
    assert stage.why_refused(_everything(), with_code(stage.op_token(EVERYTHING, **{name: None}))) == OTHER


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("operation", "model-unload"),
        ("modelId", "bigger"),
        ("quantization", "q4_0"),
        ("maxContextLength", 32_769),
        ("maxContextLength", "32768"),
        ("maxContextLength", 32768.0),
        ("gpuMemoryBudgetMB", 39_999),
        ("evictModel", "another"),
        ("keepAlive", 300),
        ("pin", 1),
        ("replicas", True),
        ("parameters", {}),
        ("parameters", {"spec_draft_p_min": 0.75, "cache_type_k": "q8_0", "flash_attention": 1}),
        ("scope", "all"),
    ],
)
def test_option_that_differs_is_rejected(stage: Stage, name: str, value: object) -> None:
    assert stage.why_refused(_everything(), with_code(stage.op_token({**EVERYTHING, name: value}))) == OTHER


def test_null_fields_count_as_absent(stage: Stage) -> None:
    token = {**stage.op_token({"operation": "cache-flush", "scope": "tenant", "tenantId": "x"}), "modelId": None}
    assert stage.admit(flush(Scope.SCOPE_TENANT, tenant="x"), with_code(token)).signers


@pytest.mark.parametrize(
    ("fields", "action", "passes"),
    [
        ({"modelId": "qwen"}, flush(Scope.SCOPE_MODEL, model="qwen"), True),
        ({"modelId": "qwen"}, flush(Scope.SCOPE_ALL, model="qwen"), False),
        ({}, flush(Scope.SCOPE_ALL), False),
        ({"scope": "all"}, flush(Scope.SCOPE_ALL), True),
        ({"scope": "all"}, flush(Scope.SCOPE_ALL, runner="r1"), True),
        ({"scope": "all", "runner": "r1"}, flush(Scope.SCOPE_ALL, runner="r1"), True),
        ({"scope": "all", "runner": "r1"}, flush(Scope.SCOPE_ALL), False),
        ({"scope": "all", "runner": "r1"}, flush(Scope.SCOPE_ALL, runner="r2"), False),
        ({"scope": "tenant", "tenantId": "a"}, flush(Scope.SCOPE_TENANT, tenant="b"), False),
        ({"scope": "tag", "tag": "t"}, flush(Scope.SCOPE_TAG, tag="t", tenant="a"), False),
    ],
)
def test_flush_must_match_the_token(
    stage: Stage, fields: dict[str, Any], action: operation_pb2.OperationAction, passes: bool
) -> None:
    token = with_code(stage.op_token({"operation": "cache-flush", **fields}))
    if passes:
        assert stage.admit(action, token).signers
    else:
        assert stage.why_refused(action, token) == OTHER


def test_wrong_key_is_rejected_in_every_form(stage: Stage) -> None:
    other = bytes(40)
    assert stage.why_refused(load(), with_code(stage.op_token(PLAIN), key=other)) == NO_CODE
    assert stage.why_refused(load(), compact(json.dumps(stage.op_token(PLAIN)).encode(), key=other)) == NO_CODE


def test_token_without_a_mac_is_rejected(stage: Stage) -> None:
    header, payload, _ = compact(json.dumps(stage.op_token(PLAIN)).encode(), alg="none").split(".")
    for token in (f"{header}.{payload}.", f"{header}.{payload}.AA"):
        assert stage.why_refused(load(), token)


@pytest.mark.parametrize(
    "header",
    [
        *({"alg": algorithm} for algorithm in ("none", "HS384", "HS512", "EdDSA", "RS256", "", 5, None, ["HS256"])),
        *({"kid": "a"}, {"jwk": {}}, {"b64": False}, {"crit": ["b64"], "b64": False}),
    ],
)
def test_algorithm_and_key_are_never_taken_from_the_token(stage: Stage, header: dict[str, Any]) -> None:
    assert stage.why_refused(load(), compact(json.dumps(stage.op_token(PLAIN)).encode(), **header)) == NO_CODE


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        *(({"signers": each}, "signer") for each in (None, [], "alice", ["alice", 5], [["alice"]], ["alice"] * 65)),
        *(({"issuedAt": each}, "whole seconds") for each in (None, "1745880000", 1.5, True, -1, 10**20)),
        *(({"nonce": each}, "nonce") for each in (None, "", "x" * 129, 5, "a b", "é", "a\u0000b")),
        ({"onlyOn": "a condition, maybe"}, "does not know"),
        ({"padding": "A" * 20_000}, "larger than 16 KiB"),
    ],
)
def test_token_with_a_wrong_field_is_rejected(stage: Stage, changes: dict[str, Any], why: str) -> None:
    assert why in stage.why_refused(load(), with_code(stage.op_token(PLAIN, **changes)))


def test_swapped_part_is_rejected(stage: Stage) -> None:
    mine, other = stage.op_token(PLAIN), stage.op_token({**PLAIN, "modelId": "other"})
    code = json.loads(with_code(mine))["signature"]
    assert stage.why_refused(load("other"), json.dumps({"opToken": other, "signature": code})) == NO_CODE
    header, _, signature = compact(canonical(mine)).split(".")
    assert stage.why_refused(load("other"), f"{header}.{b64(canonical(other))}.{signature}") == NO_CODE


def test_field_boundaries_are_covered_by_the_mac(stage: Stage) -> None:
    """ "model-load" + "a" and "model-loada" + "" are the same letters; the canonical form keeps them apart."""
    split = stage.op_token({"operation": "model-loada", "modelId": ""})
    token = json.loads(with_code(stage.op_token({"operation": "model-load", "modelId": "a"}, nonce=split["nonce"])))
    assert stage.why_refused(load("a"), json.dumps({"opToken": split, "signature": token["signature"]})) == NO_CODE
    assert stage.admit(load("a"), json.dumps(token)).signers


@pytest.mark.parametrize(
    ("age", "why"),
    [(LIFETIME - 1, ""), (LIFETIME + 1, "it expired"), (-SKEW, ""), (-SKEW - 1, "it was issued in the future")],
)
def test_token_is_valid_for_its_lifetime_from_its_issue_time(stage: Stage, age: int, why: str) -> None:
    token = with_code(stage.op_token(PLAIN, issuedAt=stage.now - age))
    if why:
        assert stage.why_refused(load(), token) == why
    else:
        assert stage.admit(load(), token).signers


def test_duplicate_field_is_rejected(stage: Stage) -> None:
    token = with_code(stage.op_token(PLAIN)).replace('"modelId": "qwen"', '"modelId": "other", "modelId": "qwen"')
    assert "a name twice" in stage.why_refused(load(), token)
    payload = canonical(stage.op_token(PLAIN)).replace(b'"modelId":"qwen"', b'"modelId":"other","modelId":"qwen"')
    assert "a name twice" in stage.why_refused(load(), compact(payload))


def test_text_the_database_cannot_store_is_rejected(stage: Stage) -> None:
    token = with_code(stage.op_token(PLAIN)).replace('"qwen"', '"\\ud800"')
    assert stage.why_refused(load(), token)


@pytest.mark.parametrize("key", [b"", b"short", bytes(31), bytes(5000)])
def test_key_of_wrong_length_is_rejected(key: bytes) -> None:
    with pytest.raises(FieldError, match="32 to 4096"):
        build_gate(config(GovernanceMode.SHARED_KEY, shared_key=key), FakeClock())


def test_pem_is_rejected_as_a_shared_key(tmp_path: Path) -> None:
    """Others may know a public key, and could make tokens."""
    body = b"MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE="
    pem = b"-----BEGIN PUBLIC KEY-----\n" + body + b"\n-----END PUBLIC KEY-----\n"
    with pytest.raises(FieldError, match="random bytes"):
        build_gate(config(GovernanceMode.SHARED_KEY, shared_key=pem), FakeClock())
    (tmp_path / "key").write_bytes(pem)
    with pytest.raises(FieldError, match="random bytes"):
        read_shared_key(tmp_path / "key", "key_file")


def test_text_key_file_is_stripped_of_its_line_ending(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef0123456789abcdef\r\n")
    assert read_shared_key(file, "key_file") == b"0123456789abcdef0123456789abcdef"
    file.write_bytes(bytes(31) + b"\n")
    assert read_shared_key(file, "key_file") == bytes(31) + b"\n"
    file.write_bytes(b"too short\n")
    with pytest.raises(FieldError, match="key_file"):
        read_shared_key(file, "key_file")
    with pytest.raises(FieldError, match="cannot be read"):
        read_shared_key(tmp_path / "none", "key_file")
