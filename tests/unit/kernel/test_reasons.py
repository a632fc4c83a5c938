"""The reason table is complete, agrees with the contract, and keeps its promises."""

import grpc
import pytest

from weft.api.common.v1 import error_reason_pb2
from weft.kernel.errors.reasons import TRAITS, Reason


def test_domain_enum_and_contract_have_the_same_names_and_numbers() -> None:
    contract = {name.removeprefix("ERROR_REASON_"): number for name, number in error_reason_pb2.ErrorReason.items()}
    assert {reason.name: reason.value for reason in Reason} == contract


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_traits_with_a_valid_grpc_code_and_http_status(reason: Reason) -> None:
    traits = TRAITS[reason]
    assert traits.grpc_code in grpc.StatusCode.__members__
    assert traits.grpc_code != "OK"
    assert 400 <= traits.http_status <= 599


@pytest.mark.parametrize("reason", Reason)
def test_busy_reasons_are_resource_exhausted_and_never_unavailable(reason: Reason) -> None:
    """A proxy ejects a host that answers UNAVAILABLE, so a full queue must not."""
    busy = {Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT, Reason.NO_SLOT_AVAILABLE, Reason.RATE_LIMIT_EXCEEDED}
    if reason in busy:
        assert TRAITS[reason].grpc_code == "RESOURCE_EXHAUSTED"
    if TRAITS[reason].grpc_code == "UNAVAILABLE":
        assert reason not in busy
