"""The gate itself: what it is set up with, and what it says of itself."""

import pytest
from governance_stage import AUDIENCE, LIFETIME, POLICY, Stage, b64, config, load, public_bytes
from kit.refusals import refused

from registry_svc.config import GovernanceMode, Signer
from registry_svc.operations.governance import GovernanceMarks, build_gate
from registry_svc.operations.policy.governance import Refused
from weft.api.operations.v1.operation_service_pb2 import GetGovernanceResponse
from weft_testing.fake_clock import FakeClock


@pytest.fixture
def stage() -> Stage:
    return Stage(GovernanceMode.SIGNATURES)


def test_gate_without_previous_marks_admits_nothing() -> None:
    gate = build_gate(config(GovernanceMode.SIGNATURES), FakeClock())
    stage = Stage(GovernanceMode.SIGNATURES)
    stage.gate = gate
    with pytest.raises(Refused, match="earlier runs"):
        stage.admit(load(), stage.signed(load()))


def test_governance_rules_are_published_to_signers(stage: Stage) -> None:
    rules = stage.gate.describe()
    assert (rules.mode, rules.required_signers, list(rules.signers)) == (
        GetGovernanceResponse.MODE_SIGNATURES,
        2,
        ["alice", "bob", "carol"],
    )
    assert (rules.audience, rules.token_lifetime.ToSeconds(), rules.policy_version) == (AUDIENCE, LIFETIME, POLICY)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"required_signers": 4}, "required_signers"),
        ({"required_signers": 0}, "required_signers"),
        ({"signers": (Signer(id="a", public_key="AAAA"), Signer(id="b", public_key=""))}, "signers[0].public_key"),
        (
            {"signers": tuple(Signer(id=name, public_key=b64(public_bytes("x"))) for name in "ab")},
            "signers[1].public_key",
        ),
        (
            {
                "signers": (
                    Signer(id="old", public_key=b64(public_bytes("x")), revoked=True),
                    Signer(id="new", public_key=b64(public_bytes("x"))),
                ),
                "required_signers": 1,
            },
            "signers[1].public_key",
        ),
    ],
    ids=["too many", "none", "no key", "one key for two", "a revoked key again"],
)
def test_invalid_configuration_is_rejected(changes: dict[str, object], field: str) -> None:
    with refused(field=field):
        build_gate(config(GovernanceMode.SIGNATURES, **changes), FakeClock())


def test_token_audience_is_the_stored_registry_id(stage: Stage) -> None:
    token = stage.signed(load())
    stage.gate.recall(GovernanceMarks(audience="reg-another"))
    with pytest.raises(Refused, match="another registry"):
        stage.admit(load(), token)
    assert stage.gate.describe().audience == "reg-another"
    stage.gate.recall(GovernanceMarks(audience=AUDIENCE))
    assert stage.admit(load(), token).signers


def test_configured_audience_overrides_the_stored_id() -> None:
    stage = Stage(GovernanceMode.SIGNATURES, {"audience": "reg-configured"})
    assert stage.gate.describe().audience == "reg-configured"
    with pytest.raises(Refused, match="another registry"):
        stage.admit(load(), stage.signed(load()))
    assert stage.admit(load(), stage.signed(load(), aud="reg-configured")).signers
