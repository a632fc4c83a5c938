"""Expects a failure by its reason, message and field."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason


@contextmanager
def fails(
    reason: Reason | None = None, *says: str, match: str | None = None, field: str = ""
) -> Iterator[pytest.ExceptionInfo[WeftError]]:
    """Expects the block to raise a WeftError with this reason and texts; with `field`, a FieldError of that field.

    `match` is searched in reason and message, as callers get them; `str(error)` has no words of an engine.
    """
    with pytest.raises(FieldError if field else WeftError) as caught:
        yield caught
    expect_failure(caught.value, reason, *says)
    error = caught.value
    assert match is None or re.search(match, f"{error.reason.name}: {error.message}"), error.message
    assert not field or caught.value.metadata["field"] == field, caught.value


def expect_failure(error: WeftError | None, reason: Reason | None, *says: str) -> None:
    """Checks that there is an error with this reason, whose message has these texts."""
    assert error is not None
    assert reason is None or error.reason is reason, error
    for text in says:
        assert text in error.message
