"""The parts of Prometheus' library that keep metrics, without its HTTP servers and pushes, which need 2 MB.

What writes a page (`prometheus_client.exposition`) is imported with the first scrape.
"""

# ruff: noqa: E402, TID251
from weft.kernel.bare_package import place_bare

place_bare("prometheus_client")

from prometheus_client.metrics import Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

__all__ = [
    "Collector",
    "CollectorRegistry",
    "CounterMetricFamily",
    "Exemplar",
    "Gauge",
    "GaugeMetricFamily",
    "Histogram",
    "Metric",
    "ProcessCollector",
    "Sample",
    "disable_created_metrics",
    "floatToGoString",
    "text_string_to_metric_families",
]
