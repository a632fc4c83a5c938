"""Operations between documents and messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from weft.api.common.v1 import error_reason_pb2
from weft.api.operations.v1 import operation_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.api.runner.v1 import load_pb2
from weft.documents.codec import document_of
from weft.documents.computed import MAX_LOAD_PARAMETERS
from weft.documents.operation_actions import (
    LoadSettings,
    flush_action,
    load_action,
    load_options,
    unload_action,
)
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import Priority
from weft_app.cli.operations import has_ended

VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(min_size=1, max_size=16),
)
SETTINGS = st.builds(
    LoadSettings,
    context_tokens=st.none() | st.integers(16, 16_777_216),
    quantization=st.none() | st.sampled_from(["q8_0", "q4_k_m"]),
    memory_budget_mb=st.none() | st.integers(1, 16_777_216),
    keep_alive=st.none() | st.sampled_from([-1.0, 0.0, 0.25, 300.0]),
    pin=st.booleans(),
    parameters=st.dictionaries(st.sampled_from(["a", "b", "cache_type_k"]), VALUES, max_size=3),
)


@given(SETTINGS)
def test_load_settings_round_trip(settings: LoadSettings) -> None:
    assert LoadSettings.model_validate(document_of(load_options(settings))) == settings


def test_duration_is_read_in_either_form() -> None:
    assert load_options(LoadSettings(keep_alive="5m")) == load_options(LoadSettings(keep_alive=300))
    assert load_options(LoadSettings(keep_alive="-1")).keep_alive.seconds == -1
    assert not load_options(LoadSettings()).HasField("keep_alive"), "nothing said is not zero"


@pytest.mark.parametrize(
    "given_settings",
    [
        {"context_tokens": 15},
        {"context_tokens": True},
        {"memory_budget_mb": 0},
        {"pin": "yes"},
        {"parameters": {"x": float("nan")}},
        {"parameters": {"x": ""}},
        {"parameters": {"x": "y" * 129}},
        {"parameters": {"x": [1]}},
        {"parameters": {f"p{n}": n for n in range(MAX_LOAD_PARAMETERS + 1)}},
        {"keep_alive": True},
        {"keep_alive": None, "ctx": 5},
    ],
)
def test_invalid_load_settings_are_refused(given_settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LoadSettings.model_validate(given_settings)


def test_flush_needs_the_fields_of_its_scope() -> None:
    for scope in ("model", "tenant", "tag"):
        with pytest.raises(FieldError) as refusal:
            flush_action(scope)
        assert refusal.value.field == scope
    assert flush_action("all").flush_cache.scope


def test_operation_document_has_its_outcome_and_no_unrelated_fields() -> None:
    failed = operation_pb2.Operation(
        name="operations/x",
        state=operation_pb2.Operation.STATE_FAILED,
        reason=error_reason_pb2.ERROR_REASON_INSUFFICIENT_MEMORY,
        action=unload_action("qwen"),
        request_id="r",
    )
    document = document_of(failed)
    assert (document["state"], document["reason"], has_ended(document)) == ("failed", "insufficient_memory", True)
    assert not {"result", "progress", "etaSeconds"} & document.keys()


def test_enum_value_of_another_version_is_unknown_and_not_an_error() -> None:
    strange = operation_pb2.Operation(name="operations/x", state=99, reason=999, request_id="r")  # type: ignore[arg-type]
    document = document_of(strange)
    assert (document["state"], document["reason"], document["action"]["type"]) == ("unknown", "unknown", "unknown")


def test_load_action_is_shown_with_its_settings() -> None:
    action = load_action("qwen", LoadSettings(context_tokens=8192), evict_model="llama", replicas=2)
    document = document_of(operation_pb2.Operation(name="operations/x", action=action, request_id="r"))["action"]
    assert (document["type"], document["model"], document["evictModel"], document["replicas"]) == (
        "load",
        "qwen",
        "llama",
        2,
    )
    assert document["settings"] == {"contextTokens": 8192, "pin": False, "parameters": {}}


@pytest.mark.parametrize(
    ("parameter", "kind"),
    [
        (load_pb2.LoadParameter(name="a", words=["x"]), "word"),
        (load_pb2.LoadParameter(name="a", flag=True), "flag"),
        (load_pb2.LoadParameter(name="a", integer=True, minimum=0), "integer"),
        (load_pb2.LoadParameter(name="a", maximum=1), "number"),
    ],
)
def test_parameter_shows_its_value_type(parameter: load_pb2.LoadParameter, kind: str) -> None:
    document = document_of(parameter)
    assert (document["type"], "default" in document) == (kind, False)
    assert ("minimum" in document) == parameter.HasField("minimum")


def test_unmeasurable_memory_is_unknown_and_not_zero() -> None:
    device = lease_service_pb2.DeviceMemory(device=lease_pb2.Device(index=0, total_bytes=8), free_bytes=4)
    lease = lease_pb2.Lease(lease_id="l", holder=lease_pb2.LeaseHolder(name="r"), shares=[{"bytes": 4}])  # type: ignore[list-item]  # a mapping is taken too
    document = document_of(
        lease_service_pb2.HostMemory(
            host="h", source=lease_pb2.HostSighting.SOURCE_DECLARED, devices=[device], leases=[lease]
        )
    )
    assert document["source"] == "declared"
    assert not {"usedBytes", "foreignBytes"} & document["devices"][0].keys()
    assert ("seenBytes" in document["leases"][0], document["leases"][0]["priority"]) == (False, "normal")
    assert document["leases"][0]["bytesByDevice"] == {"0": 4}


@pytest.mark.parametrize("band", list(Priority))
def test_leases_of_every_band_including_mesh_bands_can_be_shown(band: Priority) -> None:
    lease = lease_pb2.Lease(lease_id="l", priority=band.wire)  # type: ignore[arg-type]  # same numbers
    (told,) = document_of(lease_service_pb2.HostMemory(host="h", leases=[lease]))["leases"]
    assert told["priority"] == band.name.lower()
