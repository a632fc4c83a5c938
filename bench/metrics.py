"""What metrics cost: `python -m bench.metrics`. Prints a table; asserts nothing.

A scrape of a mesh with 1,000 models that all have served requests, in processor time and bytes; the memory of a day in
which 1,000 models come and go every hour; and the processor time that counting adds to one unary request.
"""

import asyncio
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from prometheus_client import ProcessCollector

from bench.machine import describe_machine
from gateway.metrics import GatewayMetrics
from gateway.request_facts import RequestFacts
from registry_svc.figures import RegistryFigures
from registry_svc.metrics import add_registry_metrics
from router_svc.metrics import RouterMetrics
from router_svc.observer import RouterState, SchedulingObserver
from router_svc.policy.decisions import Placed, WaitKind
from router_svc.policy.endpoints.candidates import HostMemory, MemoryHolder
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.api.registry.v1 import lease_pb2
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.dispatch.fleet import FleetView, ModelView
from weft.dispatch.placement import PoolQueue
from weft.kernel.metrics import MetricsPage
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

ROOT = Path(__file__).resolve().parent.parent
MODELS = 1_000
HOSTS = 125
DEVICES = 8
SCRAPES = 15
HOURS = 24
REQUESTS = 5_000
REPETITIONS = 9
MAX_SCRAPE_MS = 500.0
MAX_PAGE_MB = 5.0
MAX_GROWTH_MB = 1.0
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
UNSAMPLED = f"00-{'ab' * 16}-{'cd' * 8}-00"


@dataclass(frozen=True, slots=True)
class Mesh:
    """A page with everything that `weft up` has on it, and its models."""

    page: MetricsPage
    gateway: GatewayMetrics
    router: RouterMetrics
    view: FleetView

    def serve(self, model: str, reason: Reason = Reason.UNSPECIFIED) -> None:
        """Counts one chat from its head to its receipt."""
        count_request(self.router, self.gateway, self.view, model, reason)


class Registry:
    """A registry whose ledger has `HOSTS` hosts."""

    def __init__(self) -> None:
        self._hosts = [self._host(number) for number in range(HOSTS)]

    def figures(self) -> RegistryFigures:
        """See `registry_svc.metrics.HasFigures`."""
        return RegistryFigures(
            hosts=self._hosts,
            active_sessions=HOSTS,
            inactive_sessions=0,
            revision=1,
            watchers=2,
            evictions={"given_up": 1, "refused": 0, "unreachable": 0},
        )

    @staticmethod
    def _host(number: int) -> pb.HostMemory:
        host = pb.HostMemory(host=f"host-{number}")
        for index in range(DEVICES):
            device = lease_pb2.Device(index=index, total_bytes=80_000_000_000, used_bytes=70_000_000_000)
            host.devices.add(device=device, booked_bytes=70_000_000_000, foreign_bytes=0, free_bytes=10_000_000_000)
            host.leases.add(state=lease_pb2.Lease.STATE_HELD)
        return host


def view_of(names: list[str]) -> FleetView:
    """Returns a mesh with these models."""
    models = {
        name: ModelView(
            name=name,
            pool=name,
            runner="titan",
            operations=frozenset({Operation.CHAT}),
            remote=False,
            active=True,
            context_tokens=0,
            created_at_seconds=0,
        )
        for name in names
    }
    return FleetView(1, {}, models)


def new_mesh(names: list[str]) -> Mesh:
    """Returns a mesh with these models, none of which has served a request."""
    page = MetricsPage()
    ProcessCollector(registry=page.registry)
    router, gateway = RouterMetrics(page), GatewayMetrics(page)
    add_registry_metrics(Registry(), page)
    queues = [PoolQueue(pool=name, waiting=1, max_waiting=64, running=2) for name in names]
    hosts = {
        f"host-{number}": HostMemory(
            host=f"host-{number}",
            total_bytes=640_000_000_000,
            free_bytes=80_000_000_000,
            holders=tuple(
                MemoryHolder(name=name, is_model=True, held_bytes=70_000_000_000) for name in names[number::HOSTS]
            ),
        )
        for number in range(HOSTS)
    }
    router.show(RouterState(queues=lambda: queues, hosts=lambda: hosts, memory_age_seconds=lambda: 0.5))
    return Mesh(page, gateway, router, view_of(names))


def count_request(
    observer: SchedulingObserver, gateway: GatewayMetrics | None, view: FleetView, model: str, reason: Reason
) -> None:
    """Everything that counts one unary chat: a grant, an end with its receipt, the HTTP request and its tokens."""
    request = PlacementRequest(request_id="r", tenant="t", model=model, operation=Operation.CHAT, traceparent=UNSAMPLED)
    observer.note_wait(request, WaitKind.SLOT, view)
    observer.note_decision(GRANTED, request, view)
    receipt = RECEIPTS[reason]
    receipt.model = model
    observer.note_end(request, reason, receipt, view)
    if gateway is not None:
        facts = RequestFacts("r", 0.0, surface="chat", model=gateway.model_label(model, view), status=200)
        gateway.tokens_used(facts, receipt.usage)
        gateway.request_ended(facts, 0.5)


def _receipt(reason: Reason) -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(
        outcome=receipt_pb2.OUTCOME_COMPLETED if reason is Reason.UNSPECIFIED else receipt_pb2.OUTCOME_FAILED,
        usage=usage_pb2.Usage(prompt_tokens=700, completion_tokens=160, cached_prompt_tokens=512),
        reason=reason.value,  # type: ignore[arg-type]  # same numbers
    )
    receipt.attempts.add(runner="titan")
    receipt.queue_wait.FromMilliseconds(20)
    receipt.load_wait.FromMilliseconds(30)
    receipt.time_to_first_token.FromMilliseconds(100)
    receipt.total_time.FromMilliseconds(900)
    return receipt


RECEIPTS = {reason: _receipt(reason) for reason in (Reason.UNSPECIFIED, Reason.SERVER_DIED)}
GRANTED = Placed(key=1, candidate=None, attempt=1)  # type: ignore[arg-type]  # nothing that counts reads it


def scrapes(mesh: Mesh, accept: str) -> tuple[float, float]:
    """Returns the processor time of one scrape in milliseconds (a median), and the size of the page in megabytes."""
    found, size = [], 0
    for _ in range(SCRAPES):
        began = time.process_time()
        size = len(asyncio.run(mesh.page.render(accept)).body)
        found.append((time.process_time() - began) * 1e3)
    return median(found), size / 1e6


def churned() -> tuple[float, float, int, int]:
    """A day of models that come and go: megabytes and series after the second hour, and after the last one."""
    mesh = new_mesh([])
    found: list[tuple[float, int]] = []
    tracemalloc.start()
    for hour in range(HOURS):
        names = [f"model-{hour}-{number}" for number in range(MODELS)]
        view = view_of(names)
        for name in names:
            count_request(mesh.router, mesh.gateway, view, name, Reason.UNSPECIFIED)
        mesh.page.note_idle()
        gc.collect()
        series = sum(len(family.samples) for family in mesh.page.collect())
        found.append((tracemalloc.get_traced_memory()[0] / 1e6, series))
    tracemalloc.stop()
    return found[1][0], found[-1][0], found[1][1], found[-1][1]


def microseconds(count: Callable[[], None]) -> float:
    """Processor time of one request."""
    began = time.process_time()
    for _ in range(REQUESTS):
        count()
    return (time.process_time() - began) * 1e6 / REQUESTS


def counted() -> tuple[float, float]:
    """Processor time of one request without counters, and what they add."""
    mesh = new_mesh(["qwen"])
    nothing, view = SchedulingObserver(), mesh.view
    off, more = [], []
    for _ in range(REPETITIONS):
        before = microseconds(lambda: count_request(nothing, None, view, "qwen", Reason.UNSPECIFIED))
        after = microseconds(lambda: mesh.serve("qwen"))
        off.append(before)
        more.append(after - before)
    return median(off), median(more)


def main() -> None:
    """Measure and print."""
    machine = describe_machine(ROOT)
    names = [f"model-{number}" for number in range(MODELS)]
    mesh = new_mesh(names)
    for name in names:
        mesh.serve(name)
        mesh.serve(name, Reason.SERVER_DIED)
    plain_ms, plain_mb = scrapes(mesh, "")
    open_ms, open_mb = scrapes(mesh, OPENMETRICS)
    first_mb, last_mb, first_series, last_series = churned()
    off_us, more_us = counted()
    lines = [
        "# What metrics cost",
        "",
        f"- commit: {machine.commit}",
        f"- machine: {machine.cpu}, {machine.cores} cores; {machine.kernel}; {machine.python}",
        f"- measured at {machine.date}; load average before the run: {machine.load_average:.2f}",
        f"- {MODELS} models that have served, each a pool, on {HOSTS} hosts with {DEVICES} devices; default bounds",
        "",
        "| what | measured | goal |",
        "| --- | --- | --- |",
        f"| scrape, processor time | {plain_ms:.0f} ms | at most {MAX_SCRAPE_MS:g} ms |",
        f"| scrape, page | {plain_mb:.2f} MB | at most {MAX_PAGE_MB:g} MB |",
        f"| scrape as OpenMetrics, processor time | {open_ms:.0f} ms | at most {MAX_SCRAPE_MS:g} ms |",
        f"| scrape as OpenMetrics, page | {open_mb:.2f} MB | at most {MAX_PAGE_MB:g} MB |",
        f"| {MODELS} new models an hour, after 2 h | {first_mb:.2f} MB, {first_series} series | - |",
        f"| after {HOURS} h | {last_mb:.2f} MB, {last_series} series | at most {MAX_GROWTH_MB:g} MB more |",
        f"| one unary request, without counters | {off_us:.1f} us | - |",
        f"| what counting it adds | {more_us:.1f} us | - |",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
