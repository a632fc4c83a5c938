"""A changed model is loaded beside the old one where memory allows both, and after it where it does not."""

import pytest

from runner_svc.policy.memory_estimate import GIBIBYTE
from runner_svc.policy.replacement import ReplacementOrder, replacement_order, replacement_words

BESIDE, DRAIN_FIRST = ReplacementOrder.BESIDE, ReplacementOrder.DRAIN_FIRST


@pytest.mark.parametrize(
    ("is_loaded", "needed", "free", "order"),
    [
        (True, 5, 6, BESIDE),
        (True, 5, 5, BESIDE),
        (True, 5, 4, DRAIN_FIRST),
        (True, 5, 0, DRAIN_FIRST),
        (False, 5, 4, BESIDE),  # the old one sleeps: there is nothing to end first
        (True, None, 4, BESIDE),
        (True, 5, None, BESIDE),
        (True, 0, 0, BESIDE),
    ],
)
def test_old_instance_ends_first_if_both_do_not_fit(
    is_loaded: bool, needed: int | None, free: int | None, order: ReplacementOrder
) -> None:
    assert replacement_order(is_loaded=is_loaded, needed_bytes=needed, free_bytes=free) is order


def test_replacement_order_is_reported_with_its_reason() -> None:
    assert replacement_words("m", BESIDE, None, None) == (
        "m is loaded beside the old one, which ends with its last request"
    )
    assert replacement_words("m", DRAIN_FIRST, 5 * GIBIBYTE, 2 * GIBIBYTE) == (
        "m is loaded once the old one has ended with its last request: it needs 5 GiB, and 2 GiB are free"
    )
