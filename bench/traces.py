"""CPU time that tracing adds to one request: `python -m bench.traces`. Prints a table; asserts nothing.

All that tracing does for a unary chat with one attempt, in one process: the edge begins and ends its span, the
dispatcher decides, makes and records the other ones. Recorded requests are exported in full to a collector in another
process, so encoding and sending count. The same steps without tracing are measured beside them, in turns.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from bench.machine import describe_machine
from gateway.http.server_span import ServerSpans
from gateway.openai.endpoints import OPENAI
from gateway.request_facts import RequestFacts
from gateway.routing import routes_of
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.dispatch.dispatcher import CallDeps
from weft.dispatch.placement import Grant
from weft.dispatch.reconnecting_placement import ReconnectConfig
from weft.dispatch.request_trace import RequestContext, RequestTrace
from weft.kernel.clock import SystemClock
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.span_export import SpanExport
from weft.kernel.tracing import NO_TRACING, Sampling, ServiceName, Tracing, begin_trace

ROOT = Path(__file__).resolve().parent.parent
REQUESTS = 2_000
REPETITIONS = 9
GOALS = {"not recorded": 10.0, "recorded": 250.0}
"""Microseconds of CPU time more than without tracing."""
MAX_QUEUED = 50_000
COLLECTOR = """
import time
from weft_testing.otlp_receiver import running_receiver
with running_receiver() as receiver:
    print(receiver.url, flush=True)
    time.sleep(3600)
"""
GRANT = Grant(
    claims=b"", mac=b"", runner="laptop", runner_incarnation="1", address="x", host="laptop", model="qwen", attempt=1
)


@contextmanager
def running_collector() -> Iterator[str]:
    """A collector in a process of its own; its address."""
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def request(tracing: Tracing) -> None:
    """What a request does with its trace, from its head to the end of its answer."""
    clock = SystemClock()
    scope: dict[str, Any] = {"method": "POST", "path": "/v1/chat/completions", "headers": [], "scheme": "http"}
    scope["route"] = next(route for route in routes_of([OPENAI]) if route.path == scope["path"])
    spans = ServerSpans(tracing, clock)
    deps: Any = CallDeps(None, None, None, clock, ReconnectConfig(), None, tracing, ServiceName.GATEWAY)  # type: ignore[arg-type]
    facts = RequestFacts("req-1", clock.monotonic(), status=200, was_dispatched=True)
    spans.begin(scope, facts)
    traceparent = begin_trace(NO_TRACING, None)[0] if facts.trace is None else facts.trace.traceparent
    context = RequestContext(
        request_id="req-1", tenant="default", model="qwen", operation=Operation.CHAT, traceparent=traceparent
    )
    trace = RequestTrace(context, clock.monotonic())
    trace.note_grant(GRANT, clock.monotonic())
    trace.note_first_content(clock.monotonic())
    part = receipt_pb2.Receipt(usage=usage_pb2.Usage(prompt_tokens=7, completion_tokens=16), host="laptop")
    part.engine_timings.wall_time.FromMilliseconds(1)
    ended = clock.monotonic()
    receipt = trace.receipt(Reason.UNSPECIFIED, part, ended)
    deps.record(trace, receipt, ended)
    spans.end(scope, facts, clock.monotonic())


def microseconds(tracing: Tracing, finish: Callable[[], None] = lambda: None) -> float:
    """CPU time of all threads for one request."""
    began = time.process_time()
    for _ in range(REQUESTS):
        request(tracing)
    finish()
    return (time.process_time() - began) * 1e6 / REQUESTS


def main() -> None:
    """Measure and print."""
    machine = describe_machine(ROOT)
    with running_collector() as url:
        exporter = OTLPSpanExporter(f"{url}/v1/traces")
        never = SpanExport(exporter, Sampling(ratio=0.0), max_queued=MAX_QUEUED)
        always = SpanExport(exporter, Sampling(ratio=1.0), max_queued=MAX_QUEUED)
        runs: dict[str, list[float]] = {"off": [], "not recorded": [], "recorded": []}
        for _ in range(REPETITIONS):
            runs["off"].append(microseconds(NO_TRACING))
            runs["not recorded"].append(microseconds(never))
            runs["recorded"].append(microseconds(always, always.flush))
        counts = always.counts
        always.close()
        never.close()
    lines = [
        "# CPU time of tracing for one request",
        "",
        f"- commit: {machine.commit}",
        f"- machine: {machine.cpu}, {machine.cores} cores; {machine.kernel}; {machine.python}",
        f"- measured at {machine.date}; load average before the run: {machine.load_average:.2f}",
        f"- median of {REPETITIONS} runs of {REQUESTS} requests, in turns; `more`: median of the differences to `off`",
        f"- spans of the recorded ones: {counts.exported} exported, {counts.dropped} dropped, {counts.failed} failed",
        "",
        "| tracing | CPU | more | goal |",
        "| --- | --- | --- | --- |",
    ]
    for name, found in runs.items():
        more = median(own - off for own, off in zip(found, runs["off"], strict=True))
        goal = f"at most {GOALS[name]:g} us" if name in GOALS else "-"
        lines.append(f"| {name} | {median(found):.1f} us | {more:+.1f} us | {goal} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
