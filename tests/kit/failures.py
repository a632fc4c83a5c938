"""Expects a failure by its reason, message and field."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason


@contextmanager
def fails(
    reason: Reason | None = None, *, match: str | None = None, field: str = ""
) -> Iterator[pytest.ExceptionInfo[WeftError]]:
    """Expects the block to raise a WeftError with this reason and text; with `field`, a FieldError of that field."""
    with pytest.raises(FieldError if field else WeftError, match=match) as caught:
        yield caught
    assert reason is None or caught.value.reason is reason, caught.value
    assert not field or caught.value.metadata["field"] == field, caught.value
