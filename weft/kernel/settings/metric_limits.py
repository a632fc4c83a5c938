"""Limits of the metrics of a process."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le, MaxLen, MinLen

from weft.kernel.settings.setting_annotations import PUBLIC, Constant

TenantName = Annotated[str, MinLen(1), MaxLen(128)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLimits:
    """The settings of `/metrics`."""

    tenants: Annotated[tuple[TenantName, ...], MaxLen(1000), PUBLIC] = ()
    """Tenants that appear by name in the metrics of fair share. Default: none."""
    max_engine_series: Annotated[int, Ge(0), Le(100_000), PUBLIC] = 2000
    """Maximum number of an engine's own metric series that its runner exports; 0: none. Metric families beyond it are
    dropped and counted."""
    max_label_sets: Constant[int] = 100
    """Label sets of one histogram, such as its models; counters and gauges have twenty times as many. What comes beyond
    them is counted with `_other` in place of its model. A label set that was not used for `idle_seconds` makes room."""
    idle_seconds: Constant[float] = 3600.0
    """Time without use after which a label set may be replaced by a new one."""

    @property
    def max_single_series(self) -> int:
        """Maximum label sets of one counter or gauge, which has one series for each; a histogram has some twenty."""
        return 20 * self.max_label_sets
