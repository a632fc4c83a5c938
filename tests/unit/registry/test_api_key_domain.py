"""A key's rotation, end and forgetting, as values."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from registry_svc.keys.api_keys import ApiKey
from weft.kernel.time.clock import CLOCK_MARGIN_SECONDS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
KEY = ApiKey(id="k", description="", tenant="t", scopes=(), digest=b"first", created_at=NOW - HOUR)


def test_rotation_keeps_the_previous_secret_only_for_its_grace_period() -> None:
    once = KEY.rotated(b"second", NOW, HOUR)
    assert (once.digest, once.previous_digest, once.previous_expires_at) == (b"second", b"first", NOW + HOUR)
    assert once.rotated_at == NOW
    assert once.rotated(b"third", NOW, HOUR).previous_digest == b"second"


def test_old_secret_is_dropped_without_a_grace_period_or_after_revocation() -> None:
    once = KEY.rotated(b"second", NOW, timedelta())
    assert (once.previous_digest, once.previous_expires_at) == (b"", None)
    gone = KEY.rotated(b"second", NOW, HOUR).revoked(NOW)
    assert (gone.previous_digest, gone.previous_expires_at, gone.revoked_at) == (b"", None, NOW)


def test_key_is_valid_until_its_earliest_end() -> None:
    assert KEY.ended_at_or_will() is None
    assert KEY.is_good(NOW + timedelta(days=10_000))
    expiring = replace(KEY, expires_at=NOW)
    assert (expiring.is_good(NOW - HOUR), expiring.is_good(NOW)) == (True, False)
    assert replace(expiring, revoked_at=NOW - HOUR).ended_at_or_will() == NOW - HOUR
    assert replace(expiring, revoked_at=NOW + HOUR).ended_at_or_will() == NOW


def test_revoked_key_stays_invalid_if_the_clock_is_set_back() -> None:
    assert not KEY.revoked(NOW).is_good(NOW - timedelta(days=10_000))


def test_key_created_with_a_fast_clock_lives_no_longer_than_its_lifetime() -> None:
    key = replace(KEY, created_at=NOW + HOUR, expires_at=NOW + 2 * HOUR)
    assert key.clamped_to_now(NOW) == replace(key, created_at=NOW, expires_at=NOW + HOUR)
    assert replace(key, expires_at=None).clamped_to_now(NOW).expires_at is None
    assert KEY.clamped_to_now(NOW) is KEY
    assert KEY.clamped_to_now(KEY.created_at - timedelta(seconds=CLOCK_MARGIN_SECONDS)) is KEY


def test_secret_replaced_with_a_fast_clock_is_valid_only_for_its_grace_period() -> None:
    rotated = KEY.rotated(b"second", NOW + 2 * HOUR, HOUR).clamped_to_now(NOW)
    assert (rotated.rotated_at, rotated.previous_expires_at) == (NOW, NOW + HOUR)


def test_digests_are_not_shown() -> None:
    assert "first" not in repr(KEY)
    assert "first" not in repr(KEY.rotated(b"second", NOW, HOUR))
