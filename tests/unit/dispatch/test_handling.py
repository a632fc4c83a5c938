"""How a request is to be handled, as messages and back."""

import math

import pytest

from weft.api.common.v1 import priority_pb2
from weft.api.router.v1 import inference_service_pb2
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.api.runner.v1 import serve_options_pb2
from weft.dispatch.parameter_checks import (
    allowed_handling,
    granted_priority_of,
    handling_of,
    priority_of,
    serve_options,
)
from weft.dispatch.request_receipt import RequestContext, RequestTrace
from weft.kernel.access.principal import Principal, parse_scope
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CacheMode, Handling, Operation, Priority
from weft.kernel.values.units import FOREVER


@pytest.mark.parametrize("mode", list(CacheMode))
@pytest.mark.parametrize("keep_alive", [None, 0.0, 0.001, 300.0, FOREVER])
def test_options_round_trip(mode: CacheMode, keep_alive: float | None) -> None:
    handling = Handling(cache_mode=mode, cache_tag="session-1", keep_alive_seconds=keep_alive)
    sent = serve_options(handling, Priority.LOW).SerializeToString()
    received = serve_options_pb2.ServeOptions.FromString(sent)
    read = handling_of(received)
    assert (read.cache_mode, read.cache_tag) == (mode, "session-1")
    assert (read.keep_alive_seconds is None) == (keep_alive is None)
    assert read.keep_alive_seconds is None or math.isclose(read.keep_alive_seconds, keep_alive or 0.0)
    assert granted_priority_of(received) is Priority.LOW


def test_unset_options_have_defaults() -> None:
    assert handling_of(serve_options_pb2.ServeOptions()) == Handling()
    assert priority_of(inference_service_pb2.RequestOptions()) is Priority.NORMAL


def test_any_negative_keep_alive_is_unlimited() -> None:
    options = serve_options_pb2.ServeOptions()
    options.keep_alive.seconds = -3600
    assert handling_of(options).keep_alive_seconds == FOREVER


@pytest.mark.parametrize(
    ("scope", "model", "counts"),
    [
        ("inference:create", "shared", False),
        ("operations:create", "shared", True),
        ("operations:create", "route/team-a", True),
        ("operations/team-*:create", "team-a", True),
        ("operations/team-*:create", "shared", False),
        ("operations/team-*:create", "route/team-a", False),
        ("operations/r*:create", "route/team-a", False),
        ("operations/a*:create", "agent/team-a", False),
        ("operations/a*:create", "auto", False),
    ],
)
def test_keep_alive_counts_only_for_callers_that_may_unload_the_model(scope: str, model: str, counts: bool) -> None:
    caller = Principal(name="key:a", access=parse_scope(scope, "scope"))
    for seconds in (0.0, FOREVER):
        asked = Handling(cache_tag="a", keep_alive_seconds=seconds)
        ignored = Handling(cache_tag="a", keep_alive_ignored=True)
        assert allowed_handling(asked, caller, model) == (asked if counts else ignored)
    assert allowed_handling(Handling(), caller, model) == Handling()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_mode", 7),
        ("cache_tag", "x" * 65),
        ("cache_tag", "two words"),
        ("cache_tag", "\u00e9"),
        ("keep_alive", 40_000_000),
    ],
)
def test_out_of_range_option_error_names_it(field: str, value: int | str) -> None:
    options = inference_service_pb2.RequestOptions()
    if field == "keep_alive":
        options.keep_alive.seconds = int(value)
    else:
        setattr(options, field, value)
    with pytest.raises(FieldError) as refused:
        handling_of(options)
    assert refused.value.field == f"options.{field}"


def test_unknown_priority_is_refused() -> None:
    options = inference_service_pb2.RequestOptions(priority=9)  # type: ignore[arg-type]  # as a newer sender might
    with pytest.raises(FieldError) as refused:
        priority_of(options)
    assert refused.value.field == "options.priority"
    granted = serve_options_pb2.ServeOptions(priority=9)  # type: ignore[arg-type]  # as a newer sender might
    with pytest.raises(FieldError):
        granted_priority_of(granted)


@pytest.mark.parametrize(
    ("band", "wire"),
    [(Priority.SYSTEM, priority_pb2.PRIORITY_SYSTEM), (Priority.DURABLE, priority_pb2.PRIORITY_DURABLE)],
)
def test_mesh_bands_are_refused_for_callers_and_accepted_for_services(
    band: Priority, wire: priority_pb2.Priority.ValueType
) -> None:
    with pytest.raises(FieldError) as refused:
        priority_of(inference_service_pb2.RequestOptions(priority=wire))
    assert refused.value.field == "options.priority"
    granted = serve_options(Handling(), band)
    assert granted.priority == wire
    assert granted_priority_of(granted) is band


def test_every_band_has_its_own_wire_number() -> None:
    assert {Priority.from_wire(band.wire) for band in Priority} == set(Priority)
    assert len({band.wire for band in Priority}) == len(Priority)
    assert set(priority_pb2.Priority.values()) == {0, *(band.wire for band in Priority)}
    assert Priority.from_wire(99) is None


@pytest.mark.parametrize(
    ("asked", "granted", "lowered"),
    [
        (Priority.HIGH, Priority.NORMAL, priority_pb2.PRIORITY_NORMAL),
        (Priority.HIGH, Priority.HIGH, 0),
        (Priority.DURABLE, Priority.DURABLE, 0),
        (None, Priority.LOW, 0),
    ],
)
def test_receipt_has_the_priority_only_if_it_is_below_the_requested_one(
    asked: Priority | None, granted: Priority, lowered: int
) -> None:
    context = RequestContext(
        request_id="r",
        tenant="t",
        model="m",
        operation=Operation.CHAT,
        traceparent="",
        priority=Priority.NORMAL if asked is None else asked,
        names_priority=asked is not None,
    )
    trace = RequestTrace(context, arrived=0.0)
    trace.note_grant(Granted(runner="a", model="m", attempt=1, priority=granted.wire), 1.0)  # type: ignore[arg-type]  # same numbers
    assert trace.receipt(Reason.UNSPECIFIED, None, 2.0).lowered_priority == lowered
