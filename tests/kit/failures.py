"""Expects a failure by its reason, message and field."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason


@contextmanager
def fails(
    reason: Reason | None = None, *says: str, match: str | None = None, field: str = ""
) -> Iterator[pytest.ExceptionInfo[WeftError]]:
    """Expects the block to raise a WeftError with this reason and texts; with `field`, a FieldError of that field."""
    with pytest.raises(FieldError if field else WeftError, match=match) as caught:
        yield caught
    expect_failure(caught.value, reason, *says)
    assert not field or caught.value.metadata["field"] == field, caught.value


def expect_failure(error: WeftError | None, reason: Reason | None, *says: str) -> None:
    """Checks that there is an error with this reason, whose message has these texts."""
    assert error is not None
    assert reason is None or error.reason is reason, error
    for text in says:
        assert text in error.message
