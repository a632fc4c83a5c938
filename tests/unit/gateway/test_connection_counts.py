import resource

import pytest
import structlog

from gateway.gateway_config import ConnectionLimits
from gateway.http.protocol import ConnectionCounts, behind_proxy, network_of, within_open_files
from weft.kernel.errors.reasons import Reason

FEW = ConnectionLimits(max_connections=5, max_connections_per_address=2)


def reason_of(counts: ConnectionCounts, address: str) -> Reason | None:
    refusal = counts.admit(network_of(address))
    return None if refusal is None else refusal.reason


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1", "::ffff:192.0.2.1"),
        ("2001:db8::1", "2001:db8::2"),
        ("fe80::1%eth0", "fe80::2%eth0"),
    ],
)
def test_address_has_a_connection_limit_and_released_connections_are_reusable(first: str, again: str) -> None:
    counts = ConnectionCounts(FEW)
    assert [reason_of(counts, first), reason_of(counts, again)] == [None, None]
    assert reason_of(counts, again) is Reason.TOO_MANY_RESOURCES
    counts.release(network_of(again))
    counts.release(network_of(first))
    assert reason_of(counts, again) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "", "unix"])
def test_local_connections_are_subject_only_to_the_total_limit(address: str) -> None:
    counts = ConnectionCounts(FEW)
    assert [reason_of(counts, address) for _ in range(6)] == [None] * 5 + [Reason.QUEUE_FULL]


def test_callers_behind_a_declared_proxy_have_one_limit_together() -> None:
    counts = ConnectionCounts(behind_proxy(ConnectionLimits(max_connections=400)))
    assert [reason_of(counts, "10.9.8.7") for _ in range(401)] == [None] * 400 + [Reason.QUEUE_FULL]


def test_limit_per_address_that_is_set_applies_to_a_declared_proxy() -> None:
    assert behind_proxy(FEW) == FEW


def test_refused_connection_names_the_setting_and_its_value() -> None:
    counts = ConnectionCounts(ConnectionLimits())
    refusals = [counts.admit("192.0.2.1") for _ in range(257)]
    assert str(refusals[256]).endswith(
        "more than 256 connections from this address (gateway.connections.max_connections_per_address)"
    )


def test_addresses_without_connections_are_forgotten() -> None:
    counts = ConnectionCounts(ConnectionLimits())
    for number in range(200):
        counts.admit(f"192.0.2.{number}")
        counts.release(f"192.0.2.{number}")
    assert not counts._by_network


def test_half_of_the_open_files_are_reserved_for_the_process_and_this_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 4096))
    with structlog.testing.capture_logs() as lines:
        limits = within_open_files(ConnectionLimits(max_connections=501, idle_seconds=3))
    assert (limits.max_connections, limits.idle_seconds) == (500, 3)
    assert [(line["log_level"], line["configured"], line["most"]) for line in lines] == [("warning", 501, 500)]


@pytest.mark.parametrize("soft", [1002, resource.RLIM_INFINITY])
def test_limits_are_unchanged_if_there_are_enough_files(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    limits = ConnectionLimits(max_connections=501)
    with structlog.testing.capture_logs() as lines:
        assert within_open_files(limits) is limits
    assert not lines
