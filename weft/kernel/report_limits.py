"""Bounds of the reports of ends to routers, which `weft.dispatch.end_reporter` keeps until they are answered."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from weft.kernel.settings import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLimits:
    """Bounds of reports that are repeated until a router has answered them."""

    max_held: Annotated[int, Ge(1), Le(1_000_000)] = 4_096
    """Reports that wait for routers; one more is dropped."""
    call_timeout_seconds: Seconds = 5.0
    """Longest time of one call to a router."""
    give_up_seconds: Seconds = 120.0
    """How long a report is repeated to a router that does not answer; then it is dropped."""
    retry_seconds: Seconds = 0.2
    """First pause before a report is repeated; it doubles up to 5 seconds."""
