"""When an owner of a database counts as frozen."""

from dataclasses import replace

from weft.sql.takeover import (
    PATIENCE_FACTOR,
    OwnerSigns,
    SeenSigns,
    after_reading,
    is_frozen,
)

SILENCE = 10.0
SIGNS = OwnerSigns(
    backend_pid=7, sign=("7", "1"), silent_seconds=0.0, writes_beats=True, has_begun=True, is_working=False
)


def seen_for(seconds: float, **changes: object) -> SeenSigns:
    """Signs that stand still since 0, of which the database says the same."""
    return SeenSigns(signs=replace(SIGNS, silent_seconds=seconds, **changes), since=0.0)  # type: ignore[arg-type]


def test_owner_is_frozen_after_silence_beyond_the_limit() -> None:
    assert not is_frozen(seen_for(SILENCE), SILENCE, SILENCE)
    assert is_frozen(seen_for(SILENCE + 0.1), SILENCE + 0.1, SILENCE)


def test_each_new_sign_restarts_the_silence() -> None:
    seen = after_reading(None, SIGNS, 0.0)
    assert after_reading(seen, replace(SIGNS, silent_seconds=5.0), 5.0).since == 0.0
    assert after_reading(seen, replace(SIGNS, sign=("7", "2")), 5.0).since == 5.0


def test_database_clock_set_ahead_freezes_no_owner() -> None:
    assert not is_frozen(SeenSigns(signs=replace(SIGNS, silent_seconds=3_600.0), since=0.0), 1.0, SILENCE)


def test_standby_that_was_frozen_itself_ends_no_owner() -> None:
    # Its own clock says an hour; what it has just read is from a moment ago.
    assert not is_frozen(seen_for(0.5), 3_600.0, SILENCE)


def test_owner_of_an_earlier_version_is_never_frozen() -> None:
    assert not is_frozen(seen_for(86_400.0, writes_beats=False), 86_400.0, SILENCE)


def test_starting_owner_or_one_waiting_for_the_database_has_longer() -> None:
    for change in ({"has_begun": False}, {"is_working": True}):
        long = PATIENCE_FACTOR * SILENCE
        assert not is_frozen(seen_for(long, **change), long, SILENCE)
        assert is_frozen(seen_for(long + 0.1, **change), long + 0.1, SILENCE)
