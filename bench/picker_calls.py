"""What the picker of the lane does for a request, without Envoy and without a transport.

`python -m bench.picker_calls [--requests N] [--functions N]`: a proxy's messages go in, CONNECTIONS requests at once;
the runner reports the end of each, and the proxy's log names all of them in one message. Printed are Python's function
calls per request by file, and the CPU time of a request in the quietest batches. The calls are the same in every run,
whatever else the machine does. `--functions N` adds the N functions that are called most. For instructions, run it with
`--only-run` and two numbers of requests under `valgrind --tool=callgrind`, and divide the differences.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.lane import BODY, CONNECTIONS
from bench.lane_processes import picker_of
from gateway.picker.service import PickerService
from weft.api.common.v1 import receipt_pb2
from weft.api.envoy.v1 import access_log_pb2, token_usage_pb2
from weft.api.envoy.v1 import external_processor_pb2 as pb
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.tickets import TICKET_HEADER, tickets_in
from weft.kernel.gc_tuning import settle_garbage_collector
from weft.kernel.lane_names import (
    ACCESS_LOG_SERVICE,
    DESTINATION_NAMESPACE,
    DESTINATION_SERVED,
    EXTERNAL_PROCESSOR,
)
from weft.kernel.telemetry import configure_logging

STUB_PORT = 2
WARM_UP_BATCHES = 20
ROOT = Path(__file__).parents[1]
_HEAD = (
    (":authority", "127.0.0.1:20202"),
    (":path", "/v1/chat/completions"),
    (":method", "POST"),
    (":scheme", "http"),
    ("accept", "*/*"),
    ("accept-encoding", "gzip, deflate"),
    ("user-agent", "Python/3.11 aiohttp/3.14.5"),
    ("content-type", "application/json"),
    ("x-forwarded-for", "127.0.0.1"),
    ("x-forwarded-proto", "http"),
    ("x-envoy-internal", "true"),
)
_USAGE = token_usage_pb2.TokenUsage(extraction_status=token_usage_pb2.TokenUsage.EXTRACTION_STATUS_COMPLETE)
_USAGE.input_tokens.value, _USAGE.output_tokens.value = 9, 1


def request_messages() -> Sequence[bytes]:
    """Returns what Envoy sends of a request: headers, body, and the empty chunk that ends it."""
    head, body, end = pb.ProcessingRequest(), pb.ProcessingRequest(), pb.ProcessingRequest()
    for key, value in _HEAD:
        head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    head.protocol_config.request_body_mode = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
    body.request_body.body = json.dumps(BODY).encode()
    end.request_body.end_of_stream = True
    return [each.SerializeToString() for each in (head, body, end)]


@dataclass(slots=True)
class ProxyCall:
    """One call of the external processor, or of the access log, as a servicer sees it."""

    decode: Any
    unread: list[bytes]
    written: list[pb.ProcessingResponse] = field(default_factory=list)

    async def read(self) -> Any:
        """Returns the next message."""
        return self.decode(self.unread.pop(0)) if self.unread else grpc.aio.EOF

    async def write(self, message: pb.ProcessingResponse) -> None:
        """Takes an answer, and encodes it as a server does."""
        message.SerializeToString()
        self.written.append(message)

    def peer(self) -> str:
        """Returns the proxy's address."""
        return "ipv4:127.0.0.1:50000"

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """Returns nothing."""
        return ()

    def claims(self) -> ticket_pb2.TicketClaims:
        """Returns the claims of the ticket in its answer."""
        headers = self.written[0].request_headers.response.header_mutation.set_headers
        text = next(each.header.raw_value for each in headers if each.header.key == TICKET_HEADER).decode()
        return ticket_pb2.TicketClaims.FromString(tickets_in(text)[0].claims)


class _Handlers:
    """Takes the handlers that the picker registers at a server."""

    def __init__(self, picker: PickerService) -> None:
        self._generic: list[Any] = []
        picker.register(self)  # type: ignore[arg-type]  # a server as far as a picker needs one

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Takes handlers."""
        self._generic += handlers

    def handler(self, path: str) -> Any:
        """Returns the handler of a method."""
        found = (each.service(_Details(path)) for each in self._generic)
        return next(each for each in found if each is not None)


@dataclass(frozen=True, slots=True)
class _Details:
    method: str
    invocation_metadata: tuple[()] = ()


class Driver:
    """A proxy and its runner in this process."""

    def __init__(self) -> None:
        self._picker = picker_of(STUB_PORT, "")
        handlers = _Handlers(self._picker)
        self._process = handlers.handler(f"/{EXTERNAL_PROCESSOR}/Process")
        self._log = handlers.handler(f"/{ACCESS_LOG_SERVICE}/StreamAccessLogs")
        self._messages = request_messages()
        self._report = lane_service_pb2.AttemptReport(receipt=receipt_pb2.Receipt(host="h"))
        self._report.receipt.usage.prompt_tokens, self._report.receipt.usage.completion_tokens = 9, 1
        self._report.time_to_first_content.nanos = 1_000_000

    async def batch(self, profile: cProfile.Profile | None = None) -> float:
        """Carries CONNECTIONS requests to their ends; returns the CPU seconds of the picker's part."""
        calls = [ProxyCall(self._process.request_deserializer, list(self._messages)) for _ in range(CONNECTIONS)]
        seconds = await _measured(profile, *(self._process.stream_stream(None, each) for each in calls))
        claims = [each.claims() for each in calls]
        seconds += await _measured(profile, self._end(claims))
        entries = ProxyCall(self._log.request_deserializer, [_log_of(each.request_id for each in claims)])
        return seconds + await _measured(profile, self._log.stream_unary(None, entries))

    async def _end(self, claims: Sequence[ticket_pb2.TicketClaims]) -> None:
        for each in claims:
            self._picker.reports.note_attempt(each, self._report)


async def _measured(profile: cProfile.Profile | None, *work: Any) -> float:
    began = time.process_time()
    if profile is not None:
        profile.enable()
    await asyncio.gather(*work)
    # What the end of a request leaves for later turns of the event loop.
    for _ in range(3):
        await asyncio.sleep(0)
    if profile is not None:
        profile.disable()
    return time.process_time() - began


def _log_of(request_ids: Any) -> bytes:
    message = access_log_pb2.StreamAccessLogsMessage()
    for request_id in request_ids:
        entry = message.http_logs.log_entry.add()
        entry.request.request_id = request_id
        entry.response.response_code.value, entry.response.response_body_bytes = 200, 110
        metadata = entry.common_properties.metadata
        usage = metadata.typed_filter_metadata["envoy.filters.http.ai_protocol_manager"]
        usage.type_url, usage.value = "type.googleapis.com/envoy.data.ai.v3.TokenUsage", _USAGE.SerializeToString()
        served = metadata.filter_metadata[DESTINATION_NAMESPACE].fields[DESTINATION_SERVED]
        served.string_value = f"127.0.0.1:{STUB_PORT}"
    return message.SerializeToString()


async def main(requests: int, functions: int, *, only_run: bool) -> None:
    """Runs and prints."""
    driver, batches = Driver(), max(1, requests // CONNECTIONS)
    for _ in range(WARM_UP_BATCHES):
        await driver.batch()
    settle_garbage_collector()
    times = sorted([await driver.batch() for _ in range(batches)])
    if only_run:
        return
    twentieth = times[: max(1, batches // 20)]
    micros = 1e6 / CONNECTIONS
    lowest, median = sum(twentieth) / len(twentieth) * micros, times[batches // 2] * micros
    print(f"CPU us per request: lowest twentieth {lowest:.0f}, median {median:.0f} of {batches} batches")
    profile = cProfile.Profile()
    for _ in range(10):
        await driver.batch(profile)
    _print_calls(pstats.Stats(profile), 10 * CONNECTIONS, functions)


def _print_calls(stats: Any, requests: int, functions: int) -> None:
    by_file: Counter[str] = Counter()
    by_function: Counter[str] = Counter()
    for (file, line, name), (_, calls, *_) in stats.stats.items():
        where = "(built-in)" if file == "~" else file.removeprefix(f"{ROOT}/")
        by_file[where] += calls
        by_function[f"{where}:{line} {name}"] += calls
    built_in, total = by_file.pop("(built-in)"), stats.total_calls
    print(
        f"calls per request: {total / requests:.0f}, of them {(total - built_in) / requests:.0f} of Python's functions"
    )
    for each in (by_file, by_function) if functions else (by_file,):
        for name, calls in each.most_common(functions or 40):
            print(f"{calls / requests:8.1f}  {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The picker of the lane without Envoy and transport.")
    parser.add_argument("--requests", type=int, default=12_800)
    parser.add_argument("--functions", type=int, default=0)
    parser.add_argument("--only-run", action="store_true")
    chosen = parser.parse_args()
    with Path(os.devnull).open("w", encoding="utf-8") as nothing:
        configure_logging("picker", file=nothing)
        uvloop.run(main(chosen.requests, chosen.functions, only_run=chosen.only_run))
