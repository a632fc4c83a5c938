"""Governance with signatures: what passes the gate, and every way that has been thought of to pass it without leave."""

import base64
import errno
import hmac
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from governance_stage import (
    AUDIENCE,
    LIFETIME,
    POLICY,
    SKEW,
    Scope,
    Stage,
    b64,
    envelope,
    flush,
    from_b64,
    load,
    public_bytes,
    signature_of,
    unload,
)
from joserfc import jws
from joserfc.jwk import OKPKey

from registry_svc.config import GovernanceMode, Signer
from registry_svc.operations.policy.governance import Refused
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_service_pb2 import GetGovernanceResponse
from weft.api.runner.v1 import load_pb2
from weft.kernel.errors import WeftError
from weft.signing.signatures import new_key_file, read_private_key, sign
from weft.signing.tokens import make_payload


@pytest.fixture
def stage() -> Stage:
    return Stage(GovernanceMode.SIGNATURES)


def test_signature_that_a_token_cannot_hold_is_not_made(tmp_path: Path) -> None:
    """Regression: only the registry refused such a token."""
    new_key_file(tmp_path / "key.pem", "--out")
    key = read_private_key(tmp_path / "key.pem", "--key")
    short, long = (sign(b"{}", key, key_id).signatures for key_id in ("bob", "b" * 128))
    for beside in (short * 64, long * 50):
        with pytest.raises(WeftError, match=f"cannot hold {len(beside) + 1}: it has at most 64 signatures") as refused:
            sign(b"{}", key, "alice", beside=beside)
        assert refused.value.metadata["field"] == "signatures"


@pytest.mark.parametrize(
    "action",
    [
        load(context_tokens=8192, slots=2, gpu_layers=99),
        unload(),
        flush(Scope.SCOPE_TENANT, tenant="acme"),
        flush(Scope.SCOPE_ALL),
    ],
    ids=["load", "unload", "flush", "flush all"],
)
def test_two_signatures_over_the_same_bytes_are_accepted(stage: Stage, action: operation_pb2.OperationAction) -> None:
    admission = stage.admit(action, stage.signed(action))
    assert admission.signers == ("alice", "bob")
    assert len(from_b64(admission.nonce)) == 16
    assert admission.issued_at is not None
    assert admission.issued_at.timestamp() == stage.now
    assert admission.mark == admission.issued_at
    assert admission.nonce_kept_until is not None
    assert admission.nonce_kept_until.timestamp() >= stage.now + LIFETIME + 2 * SKEW


def test_token_can_be_base64url_encoded(stage: Stage) -> None:
    assert stage.admit(load(), b64(stage.signed(load()).encode())).signers == ("alice", "bob")


def test_tokens_created_by_this_library_are_accepted(stage: Stage, tmp_path: Path) -> None:
    texts = [new_key_file(tmp_path / name, "--out") for name in ("a.pem", "b.pem")]
    signers = tuple(Signer(id=name, public_key=text) for name, text in zip("ab", texts, strict=True))
    stage = Stage(GovernanceMode.SIGNATURES, {"signers": signers})
    terms = GetGovernanceResponse(audience=AUDIENCE, token_lifetime=Duration(seconds=LIFETIME), policy_version=POLICY)
    payload = make_payload(load(context_tokens=512), terms, now=stage.now)
    signed = sign(payload, read_private_key(tmp_path / "a.pem", "--key"), "a")
    signed = sign(payload, read_private_key(tmp_path / "b.pem", "--key"), "b", beside=signed.signatures)
    assert stage.admit(load(context_tokens=512), signed.as_text()).signers == ("a", "b")


def test_failed_write_of_a_new_key_leaves_no_part_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second try was told that the key exists and is never overwritten."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.pem"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WeftError, match=f"{path} cannot be written: No space left"):
            new_key_file(path, "--out")
    new_key_file(path, "--out")
    assert read_private_key(path, "--key")


def test_tokens_created_by_this_library_are_valid_jws(stage: Stage) -> None:
    """The checker of joserfc as it comes, with its own rules."""
    found = json.loads(stage.signed(load(), by=["alice"]))
    key = OKPKey.import_key({"kty": "OKP", "crv": "Ed25519", "x": b64(public_bytes("alice"))})
    with pytest.warns(match="RFC 9864"):
        assert jws.deserialize_json(found, key, algorithms=["EdDSA"]).payload == from_b64(found["payload"])


def test_parameter_order_does_not_matter(stage: Stage) -> None:
    """Maps have no order on the wire: two serializations of one action allow the same."""
    forwards, backwards = load(a=1, b=2), load(b=2, a=1)
    pairs = [_one_entry("a", 1), _one_entry("b", 2)]
    model = b"\x0a\x04qwen"
    for entries in (pairs, pairs[::-1]):
        options = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in entries)
        inner = model + b"\x12" + bytes([len(options)]) + options
        raw = b"\x0a" + bytes([len(inner)]) + inner
        assert operation_pb2.OperationAction.FromString(raw) == forwards == backwards
        assert stage.admit(forwards, stage.signed(forwards, action=b64(raw))).signers


def _one_entry(name: str, value: int) -> bytes:
    inner = load_pb2.LoadValue(integer=value).SerializeToString()
    return b"\x0a\x01" + name.encode() + b"\x12" + bytes([len(inner)]) + inner


def test_too_few_signers_are_rejected(stage: Stage) -> None:
    with pytest.raises(Refused) as refused:
        stage.admit(load(), stage.signed(load(), by=["alice"]))
    assert refused.value.why == "1 of 2 signers agreed"
    assert refused.value.actors == ("alice",)


@pytest.mark.parametrize(("name", "why"), [("mallory", "unknown: 1"), ("eve", "revoked: eve")])
def test_unknown_and_revoked_signers_do_not_count(stage: Stage, name: str, why: str) -> None:
    assert why in stage.why_refused(load(), stage.signed(load(), by=["alice", name]))
    assert stage.admit(load(), stage.signed(load(), by=["alice", name, "bob"])).signers == ("alice", "bob")


def test_payload_is_not_parsed_without_a_valid_signer(stage: Stage) -> None:
    token = envelope(b"not even JSON", [signature_of("mallory"), signature_of("eve")])
    assert "none of its 2 signers counts" in stage.why_refused(load(), token)


def test_invalid_signature_of_a_known_signer_rejects_the_token(stage: Stage) -> None:
    payload = stage.payload(load())
    good = [signature_of("alice"), signature_of("bob")]
    assert stage.admit(load(), envelope(payload, good)).signers == ("alice", "bob")
    forged = envelope(stage.payload(load()), [*good, signature_of("carol", key_of="mallory")])
    assert stage.why_refused(load(), forged) == "the signature of carol is not over these bytes"


def test_swapped_payload_is_rejected(stage: Stage) -> None:
    mine = json.loads(stage.signed(load()))
    mine["payload"] = b64(stage.payload(load("other")))
    assert "not over these bytes" in stage.why_refused(load("other"), json.dumps(mine))


def test_signatures_of_two_tokens_cannot_be_combined(stage: Stage) -> None:
    """Alice agreed to one nonce, Bob to another."""
    one = json.loads(stage.signed(load(), by=["alice"]))
    other = json.loads(stage.signed(load(), by=["bob"]))
    one["signatures"] += other["signatures"]
    assert stage.why_refused(load(), json.dumps(one)) == "the signature of bob is not over these bytes"


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "ES256", "Ed448", "RS256", "eddsa", ""])
def test_algorithm_is_never_taken_from_the_token(stage: Stage, algorithm: str) -> None:
    payload = stage.payload(load())
    token = envelope(payload, [signature_of("alice", alg=algorithm), signature_of("bob")])
    assert "is not EdDSA" in stage.why_refused(load(), token)
    unsigned = json.loads(token)
    for signature in unsigned["signatures"]:
        signature["signature"] = ""
    assert "is not EdDSA" in stage.why_refused(load(), json.dumps(unsigned))


def test_public_key_is_rejected_as_a_shared_secret(stage: Stage) -> None:
    """The old trick: HS256 with the bytes of the public key, which everybody knows."""
    payload = b64(stage.payload(load()))
    made = []
    for name in ("alice", "bob"):
        protected = b64(json.dumps({"alg": "HS256", "kid": name, "typ": "weft-op+json"}).encode())
        code = hmac.digest(public_bytes(name), f"{protected}.{payload}".encode(), "sha256")
        made.append({"protected": protected, "signature": b64(code)})
    assert "is not EdDSA" in stage.why_refused(load(), json.dumps({"payload": payload, "signatures": made}))


@pytest.mark.parametrize("header", ["jwk", "jku", "x5c", "x5u", "b64", "crit", "nonsense"])
def test_keys_and_rules_supplied_by_a_token_are_rejected(stage: Stage, header: str) -> None:
    values = {
        "jwk": {"kty": "OKP", "crv": "Ed25519", "x": b64(public_bytes("mallory"))},
        "x5c": ["AAAA"],
        "b64": False,
        "crit": ["b64"],
    }
    brought = signature_of("alice", key_of="mallory", **{header: values.get(header, "https://example.com/k")})
    assert "is not EdDSA" in stage.why_refused(load(), envelope(stage.payload(load()), [brought, signature_of("bob")]))


def test_unsigned_headers_are_rejected(stage: Stage) -> None:
    token = json.loads(stage.signed(load()))
    token["signatures"][0]["header"] = {"kid": "carol"}
    assert "more or less" in stage.why_refused(load(), json.dumps(token))


@pytest.mark.parametrize("kind", ["JWT", "weft-op", "application/weft-op+json", None])
def test_another_document_type_is_rejected(stage: Stage, kind: str | None) -> None:
    """What somebody signed for another purpose does not allow an operation."""
    token = envelope(stage.payload(load()), [signature_of("alice", typ=kind), signature_of("bob", typ=kind)])
    assert "of type weft-op+json" in stage.why_refused(load(), token)


@pytest.mark.parametrize("kid", [None, "", 5, ["alice"], "x" * 129])
def test_key_id_must_be_text(stage: Stage, kid: object) -> None:
    assert stage.why_refused(load(), envelope(stage.payload(load()), [signature_of("alice", kid=kid)]))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"aud": "reg-other"}, "it is issued for another registry"),
        ({"policy": "6"}, "another version of the policy"),
        ({"op": "model-unload"}, "another kind"),
        ({"only_on": "runner-1"}, "says more"),
        *(
            ({name: None}, "does not say what has to be signed")
            for name in ("aud", "op", "action", "readable", "nonce", "nbf", "exp", "iat", "policy")
        ),
        *(({"iat": moment}, "whole seconds") for moment in ("soon", 1.5, True, -1, 10**30, [1])),
        *(({"nonce": nonce}, "nonce") for nonce in ("", "short", "x" * 129, "with spaces in it, and 22", 7)),
    ],
)
def test_token_with_a_wrong_claim_is_rejected(stage: Stage, changes: dict[str, Any], why: str) -> None:
    assert why in stage.why_refused(load(), stage.signed(load(), **changes))


@pytest.mark.parametrize(
    "wanted",
    [load("other"), load(context_tokens=4096), load(context_tokens=8192, slots=4), load(), unload()],
    ids=["model", "value", "more options", "fewer options", "kind"],
)
def test_token_is_valid_for_exactly_one_action(stage: Stage, wanted: operation_pb2.OperationAction) -> None:
    token = stage.signed(load(context_tokens=8192))
    assert stage.why_refused(wanted, token) == "it is for another action, or for other options"


def test_readable_form_must_match_the_action(stage: Stage) -> None:
    """A signer may have looked at that alone."""
    lie = stage.signed(load("huge"), readable={"loadModel": {"model": "small", "options": {}}})
    assert "readable form" in stage.why_refused(load("huge"), lie)
    others: tuple[object, ...] = ({}, [], "qwen", {"loadModel": 5}, {"whatever": 1}, None)
    for nonsense in others:
        assert stage.why_refused(load(), stage.signed(load(), readable=nonsense))


def test_unknown_part_of_the_action_is_rejected(stage: Stage) -> None:
    """It might be a condition, made by a newer signer."""
    newer = load().SerializeToString()
    model = b"\x0a\x04qwen" + b"\x52\x04only"
    for raw in (newer + b"\xf2\x03\x01x", b"\x0a" + bytes([len(model)]) + model):
        assert operation_pb2.OperationAction.FromString(raw).load_model.model == "qwen"
        assert "does not know" in stage.why_refused(load(), stage.signed(load(), action=b64(raw)))


def test_duplicate_field_is_rejected(stage: Stage) -> None:
    """One reader takes the first of them, another one the last."""
    payload = stage.payload(load()).replace(b'{"aud"', b'{"aud": "reg-other", "aud"')
    token = envelope(payload, [signature_of("alice"), signature_of("bob")])
    assert "a name twice" in stage.why_refused(load(), token)


def test_token_size_is_limited_before_parsing(stage: Stage) -> None:
    token = json.loads(stage.signed(load()))
    token["signatures"] *= 60
    assert "larger than 16 KiB" in stage.why_refused(load(), json.dumps(token))
    crowd = {"payload": token["payload"], "signatures": [{}] * 65}
    assert "1 to 64 signatures" in stage.why_refused(load(), json.dumps(crowd))


@pytest.mark.parametrize("tamper", [lambda text: text + "=", lambda text: text + "\n", lambda text: text[:-1] + "+"])
def test_base64url_must_be_canonical(stage: Stage, tamper: Callable[[str], str]) -> None:
    token = json.loads(stage.signed(load()))
    token["signatures"][0]["signature"] = tamper(token["signatures"][0]["signature"])
    assert stage.why_refused(load(), json.dumps(token))
    standard = base64.b64encode(b"\xff\xef" * 32).decode()
    token["signatures"][0]["signature"] = standard
    assert stage.why_refused(load(), json.dumps(token))
