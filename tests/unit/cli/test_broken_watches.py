"""Which ends of a watch are outlived by a command that follows the mesh."""

import time

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.follow import RETRY_PAUSE_SECONDS, Breaks


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = list[float]()
    monkeypatch.setattr(time, "sleep", found.append)
    return found


@pytest.mark.parametrize("reason", [Reason.SERVICE_UNAVAILABLE, Reason.REGISTRY_STANDBY, Reason.SHUTTING_DOWN])
def test_started_watch_restarts_after_a_takeover(reason: Reason, pauses: list[float]) -> None:
    breaks = Breaks(60.0)
    breaks.none()
    breaks.survive(WeftError(reason, "away"))
    assert pauses == [RETRY_PAUSE_SECONDS]


def test_watch_ends_if_it_never_started_or_is_refused(pauses: list[float]) -> None:
    breaks = Breaks(60.0)
    with pytest.raises(WeftError):
        breaks.survive(WeftError(Reason.REGISTRY_STANDBY, "away"))
    breaks.none()
    with pytest.raises(WeftError):
        breaks.survive(WeftError(Reason.PERMISSION_DENIED, "no"))
    assert pauses == []
