"""The keep-alive of an idle model, by its settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.policy.keep_alive import CATEGORY_SECONDS, category_of, keep_alive
from weft.kernel.request import TEXT_OPERATIONS, Operation

CATEGORIES = [("text", 300.0), ("image", 900.0), ("vision", 60.0), ("audio", 300.0)]
WISH = st.none() | st.floats(-1.0, 1e6)
WISHES = st.tuples(WISH, WISH, WISH)


def test_model_without_devices_and_settings_never_hibernates_automatically() -> None:
    assert keep_alive(()) is None


@pytest.mark.parametrize(("category", "seconds"), CATEGORIES)
def test_model_using_devices_is_kept_by_its_category(category: str, seconds: float) -> None:
    assert keep_alive((None, None, None), category, holds_devices=True) == seconds
    assert keep_alive((None, None, 7.0), category, holds_devices=True) == 7.0


@pytest.mark.parametrize(
    ("operations", "category"),
    [
        ({Operation.IMAGE}, "image"),
        ({Operation.IMAGE, Operation.CHAT}, "image"),
        ({Operation.TRANSCRIPTION}, "audio"),
        ({Operation.SPEECH, Operation.TRANSCRIPTION}, "audio"),
        ({Operation.TRANSCRIPTION, Operation.CHAT}, "text"),
        (TEXT_OPERATIONS, "text"),
        ((), "text"),
    ],
)
def test_model_without_a_category_uses_that_of_its_operations(operations: set[Operation], category: str) -> None:
    assert category_of(operations) == category


def test_request_keep_alive_precedes_load_which_precedes_model() -> None:
    assert keep_alive((1.0, 2.0, 3.0), holds_devices=True) == 1.0
    assert keep_alive((None, 2.0, 3.0), holds_devices=True) == 2.0
    assert keep_alive((None, None, 3.0), holds_devices=True) == 3.0


def test_minus_one_means_unlimited_and_zero_means_not_kept() -> None:
    assert keep_alive((-1.0, None, 3.0)) is None
    assert keep_alive((0.0, -1.0, None)) == 0.0


@given(WISHES, st.sampled_from(sorted(CATEGORY_SECONDS)), st.booleans())
def test_pinned_model_stays_for_any_keep_alive(
    wishes: tuple[float | None, ...], category: str, holds_devices: bool
) -> None:
    assert keep_alive(wishes, category, holds_devices=holds_devices, pinned=True) is None
    limit = keep_alive(wishes, category, holds_devices=holds_devices)
    assert limit is None or limit >= 0.0
