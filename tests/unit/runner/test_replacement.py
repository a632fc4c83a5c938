"""A changed model is loaded beside the old one where memory allows both, and after it where it does not."""

import pytest

from runner_svc.policy.memory_estimate import GIBIBYTE
from runner_svc.policy.replacement import must_drain_first, replacement_words


@pytest.mark.parametrize(
    ("is_loaded", "needed", "free", "drains_first"),
    [
        (True, 5, 6, False),
        (True, 5, 5, False),
        (True, 5, 4, True),
        (True, 5, 0, True),
        (False, 5, 4, False),  # the old one sleeps: there is nothing to end first
        (True, None, 4, False),
        (True, 5, None, False),
        (True, 0, 0, False),
    ],
)
def test_old_instance_ends_first_if_both_do_not_fit(
    is_loaded: bool, needed: int | None, free: int | None, drains_first: bool
) -> None:
    assert must_drain_first(is_loaded=is_loaded, needed_bytes=needed, free_bytes=free) is drains_first


def test_replacement_order_is_reported_with_its_reason() -> None:
    assert replacement_words("m", drains_first=False, needed_bytes=None, free_bytes=None) == (
        "m is loaded beside the old one, which ends with its last request"
    )
    assert replacement_words("m", drains_first=True, needed_bytes=5 * GIBIBYTE, free_bytes=2 * GIBIBYTE) == (
        "m is loaded once the old one has ended with its last request: it needs 5 GiB, and 2 GiB are free"
    )
