"""The metrics page of a process, and the admin port that serves it.

Imports the metrics library only when a process has a page: most starts of a runner or registry have none.
"""

from typing import TYPE_CHECKING

from weft.kernel.services.health import HealthSource
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.time.clock import SystemClock
from weft_app.compose.certificate_expiry import CertificateExpiry
from weft_app.compose.security import KeyCheck
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from runner_svc.runner_service import RunnerService
    from weft.kernel.telemetry.metrics_page import MetricsPage


def metrics_page(config: WeftConfig) -> "MetricsPage":
    """Returns the page of a process, to which its parts add their metrics."""
    from prometheus_client import ProcessCollector  # noqa: PLC0415

    from weft.kernel.telemetry.metrics_page import MetricsPage  # noqa: PLC0415

    page = MetricsPage(config.metrics)
    CertificateExpiry(config).add_metrics(page)
    page.add(ProcessCollector(registry=None).collect)
    return page


def page_if_served(config: WeftConfig) -> "MetricsPage | None":
    """Returns the page of a process that serves it only on the admin port; None: there is no port."""
    return None if config.metrics.listen is None else metrics_page(config)


def runner_page(config: WeftConfig, runner: "RunnerService", name: str) -> "MetricsPage":
    """Returns the page of a runner's process, with its metrics."""
    from runner_svc.runner_metrics import add_runner_metrics  # noqa: PLC0415

    page = metrics_page(config)
    add_runner_metrics(page, name, runner.describe, runner.engine_pages)
    return page


def metrics_services(
    config: WeftConfig, page: "MetricsPage | None", service: str, health: HealthSource, keys: KeyCheck | None
) -> tuple[Service, ...]:
    """Returns the services of a page: the loop delay samples, and the admin port, if any.

    The port's probes report `health`; `keys` admit its callers beyond loopback.
    """
    if page is None:
        return ()
    from weft_app.compose.loop_delay import LoopDelay  # noqa: PLC0415

    delay = LoopDelay(page, SystemClock(), service)
    if config.metrics.listen is None:
        return (delay,)
    from weft_app.compose.metrics_server import MetricsAccess, MetricsServer  # noqa: PLC0415

    tls = config.gateway.tls if config.gateway.tls.is_set else config.tls
    files = None if tls.certificate_file is None else tls.files
    access = MetricsAccess(tls=files, keys=keys, is_insecure=config.metrics.insecure)
    return (delay, MetricsServer(page, config.metrics.listen, health, access))
