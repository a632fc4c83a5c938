"""The processor time of a check by a JSON schema."""

import time
from typing import Any

from weft.kernel.schemas.value_check import ValueCheck

LIMIT_SECONDS = 0.05


class SlowlyImported(ValueCheck):
    """A check whose library takes longer to import than a check may."""

    def _compiled(self) -> Any:
        end = time.thread_time() + LIMIT_SECONDS
        while time.thread_time() <= end:
            pass
        return super()._compiled()


def test_import_of_the_library_is_not_counted_to_the_first_check() -> None:
    """The first pair of a trial counted as an answer that breaks its schema, for good."""
    assert SlowlyImported({"type": "object"}, max_cpu_seconds=LIMIT_SECONDS).problem({}) == ""
