"""Errors of a library's host program that name a field of the request."""

import pytest

from runner_svc.engine_host.channel import EngineChannel
from runner_svc.engine_host.messages import Failed
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason


async def _failure(failed: Failed) -> WeftError:
    channel = EngineChannel()
    try:
        return channel._failure(failed)
    finally:
        await channel.close()


@pytest.mark.parametrize(
    ("message", "field"), [("file: is no recording", "file"), ("images[0]: has 9 pixels", "images[0]")]
)
async def test_an_invalid_field_is_told_by_its_name(message: str, field: str) -> None:
    error = await _failure(Failed(1, "INVALID_ARGUMENT", message))
    assert isinstance(error, FieldError)
    assert (error.field, error.message) == (field, message)


@pytest.mark.parametrize(
    ("reason", "message"),
    [("BACKEND_ERROR", "file: is no recording"), ("INVALID_ARGUMENT", "The prompt is empty: try again")],
)
async def test_other_errors_name_no_field(reason: str, message: str) -> None:
    error = await _failure(Failed(1, reason, message))
    assert not isinstance(error, FieldError)
    assert (error.reason, error.message) == (Reason[reason], message)
