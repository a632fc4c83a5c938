"""An open-loop generator of several tenants' chats, which writes down how each one ended. A process of its own.

    echo '{"port": 8080, "model": "m", "tenants": [{"name": "a", "key": "..."}], ...}' | python -m bench.lane_offer

Loopback only. Requests are sent at their times, whatever becomes of those before; every second one is a stream.
Answers are kept, and judged after the last one, so that judging takes no processor time of what is measured.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.lane_ends import ClientEnd, SeenEnd
from bench.load import Connection, Job, request_bytes
from weft_testing.torture.history import expected_text

PATH = "/v1/chat/completions"


class TenantOffer(msgspec.Struct, kw_only=True, frozen=True):
    """What one tenant sends."""

    name: str
    key: str
    """Its Authorization header."""
    rate: float
    """Requests per second, evenly spaced."""


class LaneOffer(msgspec.Struct, kw_only=True, frozen=True):
    """What is sent."""

    port: int
    model: str
    tenants: list[TenantOffer]
    tokens: int
    seconds: float
    run: str
    """Begins the ids of its requests."""
    file: str
    """Where the ends of requests are written: a `SeenEnd` as JSON per line."""
    answer_seconds: float = 60.0
    """Longest time of one request."""


class OfferSummary(msgspec.Struct, kw_only=True, frozen=True):
    """How the sending went."""

    sent: int
    began: float
    """UTC seconds since the epoch."""
    ended: float
    """When the last request was sent."""
    drained_seconds: float
    """From then until the last answer."""
    largest_lag: float
    """How many seconds behind its time a request was sent, at most: above a few tenths the rate was not that rate."""


class Outcome(msgspec.Struct, kw_only=True):
    """One request, before it is judged."""

    request_id: str
    tenant: str
    is_stream: bool
    sent_at: float
    ended_at: float = 0.0
    status: int = 0
    body: bytes = b""
    fault: str = ""
    """What broke the connection; empty: the answer came to its end."""


class LaneOffering:
    """Sends one offer."""

    def __init__(self, offer: LaneOffer) -> None:
        self._offer = offer
        self._idle: list[Connection] = []
        self.outcomes: list[Outcome] = []
        self._lag = 0.0

    async def run(self) -> OfferSummary:
        """Send everything at its time, and wait for the rest."""
        offer = self._offer
        began, clock = time.time(), time.perf_counter()
        asking = []
        for at, tenant, number in _schedule(offer):
            pause = clock + at - time.perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            self._lag = max(self._lag, -pause)
            asking.append(asyncio.create_task(self._ask(tenant, number)))
        ended = time.time()
        await asyncio.gather(*asking)
        for connection in self._idle:
            connection.close()
        return OfferSummary(
            sent=len(asking),
            began=began,
            ended=ended,
            drained_seconds=time.time() - ended,
            largest_lag=self._lag,
        )

    async def _ask(self, tenant: TenantOffer, number: int) -> None:
        offer, is_stream = self._offer, number % 2 == 1
        outcome = Outcome(
            request_id=f"{offer.run}-{tenant.name}-{number}",
            tenant=tenant.name,
            is_stream=is_stream,
            sent_at=time.time(),
        )
        self.outcomes.append(outcome)
        connection: Connection | None = None
        try:
            async with asyncio.timeout(offer.answer_seconds):
                connection = await self._connection()
                await connection.ask(_request(offer, tenant, outcome))
        except (OSError, TimeoutError) as error:
            outcome.fault = str(error) or type(error).__name__
        outcome.ended_at = time.time()
        if connection is not None:
            outcome.status, outcome.body = connection.status, bytes(connection.body)
            if outcome.fault or not connection.is_open:
                connection.close()
            else:
                self._idle.append(connection)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._offer.port)
        return connection


def _schedule(offer: LaneOffer) -> list[tuple[float, TenantOffer, int]]:
    """Returns when which tenant sends its which request; tenants of one rate do not all send at the same moment."""
    found = [
        ((number + place / len(offer.tenants)) / tenant.rate, tenant, number)
        for place, tenant in enumerate(offer.tenants)
        for number in range(int(tenant.rate * offer.seconds))
    ]
    return sorted(found, key=lambda each: each[0])


def _request(offer: LaneOffer, tenant: TenantOffer, outcome: Outcome) -> bytes:
    body: dict[str, Any] = {
        "model": offer.model,
        "messages": [{"role": "user", "content": outcome.request_id}],
        "max_tokens": offer.tokens,
    }
    if outcome.is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": tenant.key, "X-Request-Id": outcome.request_id}
    return request_bytes(Job(port=offer.port, path=PATH, body=body, headers=headers))


def judged(outcome: Outcome, tokens: int) -> SeenEnd:
    """Returns how a request ended for its client, who knows which answer is whole."""
    end, counted, note = _verdict(outcome, tokens)
    return SeenEnd(
        request_id=outcome.request_id,
        tenant=outcome.tenant,
        sent_at=outcome.sent_at,
        ended_at=outcome.ended_at,
        end=end,
        tokens=counted,
        note=note[:300],
    )


def _verdict(outcome: Outcome, tokens: int) -> tuple[ClientEnd, int, str]:
    if outcome.fault:
        return ClientEnd.BROKEN, 0, f"connection broken after status {outcome.status}: {outcome.fault}"
    if outcome.status != 200:
        return ClientEnd.REFUSED, 0, f"{outcome.status} {_refusal(outcome.body)}"
    try:
        answer = _stream_answer(outcome.body) if outcome.is_stream else _unary_answer(outcome.body)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return ClientEnd.BROKEN, 0, f"no answer of its kind: {type(error).__name__}: {error}"
    wrong = answer.wrong_with(tokens)
    return (ClientEnd.BROKEN, 0, wrong) if wrong else (ClientEnd.COMPLETE, answer.counted, "")


def _refusal(body: bytes) -> str:
    """Returns code and words of an error envelope; the body where it is none."""
    try:
        error = json.loads(body)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"without an envelope: {body.decode(errors='replace')}"


class _Answer(msgspec.Struct, kw_only=True):
    text: str = ""
    finish: str | None = None
    counted: int = 0
    fault: str = ""
    is_done: bool = False

    def wrong_with(self, tokens: int) -> str:
        """Returns what is wrong with it; empty: nothing."""
        if self.fault or not self.is_done or self.finish is None:
            return self.fault or f"it ended without an end after {len(self.text)} characters"
        if self.text != expected_text(tokens) or self.counted != tokens:
            return f"{tokens} tokens were asked for, {self.counted} counted: {self.text[:200]!r}"
        return ""


def _unary_answer(body: bytes) -> _Answer:
    document = json.loads(body)
    (choice,) = document["choices"]
    return _Answer(
        text=choice["message"]["content"],
        finish=choice["finish_reason"],
        counted=document["usage"]["completion_tokens"],
        is_done=True,
    )


def _stream_answer(body: bytes) -> _Answer:
    found = _Answer()
    for data in _events(body):
        if data == b"[DONE]":
            found.is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            found.fault = f"error event: {json.dumps(event['error'])}"
            continue
        for choice in event["choices"]:
            found.text += choice["delta"].get("content") or ""
            found.finish = choice.get("finish_reason") or found.finish
        if event.get("usage"):
            found.counted = event["usage"]["completion_tokens"]
    return found


def _events(body: bytes) -> list[bytes]:
    """Returns the data of a stream's events. The body has the marks of its chunks between them."""
    return [line.removeprefix(b"data:").strip() for line in unchunked(body).split(b"\n") if line.startswith(b"data:")]


def unchunked(body: bytes) -> bytes:
    """Returns a body without the marks of its chunks. Raises ValueError where it has none, or ends early."""
    found, place = bytearray(), 0
    while True:
        head = body.index(b"\r\n", place)
        size = int(body[place:head].partition(b";")[0], 16)
        if not size:
            return bytes(found)
        place = head + 2 + size
        if body[place : place + 2] != b"\r\n":
            raise ValueError("a chunk is not whole")
        found += body[head + 2 : place]
        place += 2


def main() -> None:
    """Read an offer from stdin, write the ends of its requests to its file and the summary to stdout."""
    offer = msgspec.json.decode(sys.stdin.buffer.read(), type=LaneOffer)
    offering = LaneOffering(offer)
    summary = uvloop.run(offering.run())
    lines = (msgspec.json.encode(judged(outcome, offer.tokens)) for outcome in offering.outcomes)
    Path(offer.file).write_bytes(b"".join(line + b"\n" for line in lines))
    sys.stdout.buffer.write(msgspec.json.encode(summary))


if __name__ == "__main__":
    main()
