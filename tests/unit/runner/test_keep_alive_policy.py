"""The keep-alive of an idle model, by its settings."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.policy.keep_alive import CATEGORY_SECONDS, KeepAliveSettings, category_of, keep_alive
from weft.kernel.request import TEXT_OPERATIONS, Operation

NOTHING = KeepAliveSettings()
CATEGORIES = [("text", 300.0), ("image", 900.0), ("vision", 60.0), ("audio", 300.0)]
WISH = st.none() | st.floats(-1.0, 1e6)
WISHES = st.builds(
    KeepAliveSettings,
    request_seconds=WISH,
    load_seconds=WISH,
    model_seconds=WISH,
    category=st.sampled_from(sorted(CATEGORY_SECONDS)),
    holds_devices=st.booleans(),
    pinned=st.booleans(),
)


def test_model_without_devices_and_settings_never_hibernates_automatically() -> None:
    assert keep_alive(NOTHING) is None


@pytest.mark.parametrize(("category", "seconds"), CATEGORIES)
def test_model_using_devices_is_kept_by_its_category(category: str, seconds: float) -> None:
    wishes = KeepAliveSettings(category=category, holds_devices=True)
    assert keep_alive(wishes) == seconds
    assert keep_alive(replace(wishes, model_seconds=7.0)) == 7.0


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


def test_every_category_of_operations_has_a_time() -> None:
    assert {category_of({operation}) for operation in Operation} <= CATEGORY_SECONDS.keys()


def test_request_keep_alive_precedes_load_which_precedes_model() -> None:
    wishes = KeepAliveSettings(request_seconds=1.0, load_seconds=2.0, model_seconds=3.0, holds_devices=True)
    assert keep_alive(wishes) == 1.0
    assert keep_alive(replace(wishes, request_seconds=None)) == 2.0
    assert keep_alive(replace(wishes, request_seconds=None, load_seconds=None)) == 3.0


def test_minus_one_means_unlimited_and_zero_means_not_kept() -> None:
    assert keep_alive(KeepAliveSettings(request_seconds=-1.0, model_seconds=3.0)) is None
    assert keep_alive(KeepAliveSettings(request_seconds=0.0, load_seconds=-1.0)) == 0.0


@given(WISHES)
def test_pinned_model_stays_for_any_keep_alive(wishes: KeepAliveSettings) -> None:
    assert keep_alive(replace(wishes, pinned=True)) is None
    limit = keep_alive(replace(wishes, pinned=False))
    assert limit is None or limit >= 0.0
