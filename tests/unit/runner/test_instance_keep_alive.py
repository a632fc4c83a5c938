"""The unload timer of a model: by request, by load, by settings."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instance_stage import Stage, living
from kit.presence import present
from stepped_ledger import SteppedLedger

from runner_svc.policy.keep_alive import CATEGORY_SECONDS, category_of, keep_alive
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.load_options import LoadSpec
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import TEXT_OPERATIONS, Operation

LONG_SECONDS = 1_000.0
"""Longer than any model here is kept."""


async def _served(stage: Stage, keep_alive_seconds: float | None = None) -> None:
    request = await stage.request(keep_alive_seconds=keep_alive_seconds)
    await stage.leave(request)


async def _phase_after(stage: Stage, seconds: float) -> Phase:
    await stage.settle()
    await stage.advance(seconds)
    return stage.instance.phase


@pytest.mark.parametrize(("category", "seconds"), [("text", 300.0), ("image", 900.0), ("vision", 60.0)])
async def test_model_using_devices_hibernates_after_the_time_of_its_category(category: str, seconds: float) -> None:
    async with living(SteppedLedger(), category=category) as stage:
        assert stage.instance.unload_at == stage.clock.utc_now() + timedelta(seconds=seconds)
        assert await _phase_after(stage, seconds - 1.0) is Phase.READY
        assert await _phase_after(stage, 1.0) is Phase.HIBERNATING
        assert stage.instance.unload_at is None


async def test_request_keep_alive_applies_until_a_request_without_one() -> None:
    async with living(SteppedLedger()) as stage:
        await _served(stage, 10.0)
        assert stage.instance.unload_at == stage.clock.utc_now() + timedelta(seconds=10)
        await _served(stage)
        assert await _phase_after(stage, 299.0) is Phase.READY
        await _served(stage, -1.0)
        assert await _phase_after(stage, LONG_SECONDS) is Phase.READY
        await _served(stage, 5.0)
        assert await _phase_after(stage, 5.0) is Phase.HIBERNATING
        await stage.instance.wake()
        assert await _phase_after(stage, 299.0) is Phase.READY, "what requests said ended with that life"


async def test_request_without_a_free_slot_does_not_change_the_shown_keep_alive() -> None:
    async with living() as stage:
        running = [await stage.request(str(number), keep_alive_seconds=2.0) for number in range(2)]
        refused = await stage.request("refused", keep_alive_seconds=-1.0)
        assert present(await refused).reason is Reason.NO_SLOT_AVAILABLE
        assert stage.instance.keep_alive_seconds == 2.0
        for request in running:
            await stage.leave(request)


async def test_busy_model_has_the_keep_alive_of_the_last_started_request() -> None:
    """It was shown as "never" with a keep-alive of 2 s."""
    async with living() as stage:
        before = stage.instance.keep_alive_seconds
        request = await stage.request(keep_alive_seconds=2.0)
        assert before is None
        assert (stage.instance.keep_alive_seconds, stage.instance.unload_at) == (2.0, None)
        await stage.leave(request)
        assert stage.instance.keep_alive_seconds == 2.0
        assert stage.instance.unload_at == stage.clock.utc_now() + timedelta(seconds=2)


async def test_zero_keep_alive_hibernates_when_the_last_request_ends() -> None:
    async with living() as stage:
        other = await stage.request("other")
        await _served(stage, 0.0)
        assert stage.instance.phase is Phase.READY
        last = await stage.request("last", keep_alive_seconds=0.0)
        other.cancel()
        assert await _phase_after(stage, 0.0) is Phase.READY
        last.cancel()
        assert await _phase_after(stage, 0.0) is Phase.HIBERNATING


async def test_model_with_zero_keep_alive_waits_for_its_first_request() -> None:
    async with living(keep_alive_seconds=0.0) as stage:
        assert await _phase_after(stage, 9.0) is Phase.READY
        await _served(stage)
        assert stage.instance.phase is Phase.HIBERNATING
        await stage.instance.wake()
        assert await _phase_after(stage, 10.0) is Phase.HIBERNATING, "the request never came"


async def test_load_sets_its_keep_alive() -> None:
    async with living(SteppedLedger(), keep_alive_seconds=50.0) as stage:
        await stage.instance.load(LoadSpec(keep_alive_seconds=7.0))
        assert await _phase_after(stage, 7.0) is Phase.HIBERNATING
        await stage.instance.load()
        assert await _phase_after(stage, LONG_SECONDS) is Phase.READY


async def test_pinned_model_stays_loaded_until_unloaded() -> None:
    async with living(SteppedLedger(), keep_alive_seconds=5.0, pinned=True) as stage:
        await _served(stage, 0.0)
        assert await _phase_after(stage, LONG_SECONDS) is Phase.READY
        await stage.instance.unload()
        assert stage.instance.phase is Phase.HIBERNATING
        assert stage.instance.memory.pinned


async def test_pin_of_a_load_ends_with_its_unload() -> None:
    async with living(SteppedLedger()) as stage:
        await stage.instance.load(LoadSpec(pin=True, keep_alive_seconds=5.0))
        assert await _phase_after(stage, LONG_SECONDS) is Phase.READY
        await stage.instance.unload()
        await stage.instance.wake()
        assert not stage.instance.memory.pinned
        assert await _phase_after(stage, 300.0) is Phase.HIBERNATING


async def test_refused_request_does_not_change_the_keep_alive() -> None:
    async with living() as stage:
        running = [await stage.request(f"r{number}") for number in range(2)]
        assert await (await stage.request("one-too-many", keep_alive_seconds=0.0)) is not None
        for request in running:
            request.cancel()
        assert await _phase_after(stage, 1000.0) is Phase.READY


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
