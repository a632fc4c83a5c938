"""The gate itself: what it is set up with, and what it says of itself."""

import pytest
from governance_stage import AUDIENCE, LIFETIME, POLICY, Stage, b64, config, load, public_bytes

from registry_svc.config import GovernanceMode, Signer
from registry_svc.operations.governance import GovernanceMarks, build_gate
from registry_svc.operations.policy.governance import Refused
from weft.api.operations.v1.operation_service_pb2 import GetGovernanceResponse
from weft.kernel.errors import FieldError
from weft_testing.fake_clock import FakeClock


@pytest.fixture
def stage() -> Stage:
    return Stage(GovernanceMode.SIGNATURES)


def test_a_gate_that_knows_nothing_of_earlier_lives_admits_nothing() -> None:
    gate = build_gate(config(GovernanceMode.SIGNATURES), FakeClock())
    stage = Stage(GovernanceMode.SIGNATURES)
    stage.gate = gate
    with pytest.raises(Refused, match="earlier runs"):
        stage.admit(load(), stage.signed(load()))


def test_the_rules_are_told_to_those_who_sign(stage: Stage) -> None:
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
def test_a_configuration_that_cannot_be_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as wrong:
        build_gate(config(GovernanceMode.SIGNATURES, **changes), FakeClock())
    assert wrong.value.field == field


def test_tokens_are_made_out_to_the_id_that_the_registry_keeps(stage: Stage) -> None:
    token = stage.signed(load())
    stage.gate.recall(GovernanceMarks(audience="reg-another"))
    with pytest.raises(Refused, match="another registry"):
        stage.admit(load(), token)
    assert stage.gate.describe().audience == "reg-another"
    stage.gate.recall(GovernanceMarks(audience=AUDIENCE))
    assert stage.admit(load(), token).signers


def test_an_audience_of_the_configuration_comes_first() -> None:
    stage = Stage(GovernanceMode.SIGNATURES, {"audience": "reg-configured"})
    assert stage.gate.describe().audience == "reg-configured"
    with pytest.raises(Refused, match="another registry"):
        stage.admit(load(), stage.signed(load()))
    assert stage.admit(load(), stage.signed(load(), aud="reg-configured")).signers
