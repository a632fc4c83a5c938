"""Generates an answer: prefill, then token by token, with the faults of the behavior."""

import asyncio
import math
import signal
import time
from collections.abc import Callable, Sequence
from typing import Never

from aiohttp import web

from weft_testing.fake_backend import openai_shapes as shapes
from weft_testing.fake_backend.answers import Piece, PieceKind, answer
from weft_testing.fake_backend.behaviour import Behaviour
from weft_testing.fake_backend.process_faults import crash, run_out_of_memory
from weft_testing.fake_backend.requests import MAX_TOKENS_PER_CHOICE, GenerationRequest
from weft_testing.fake_backend.sinks import Sink
from weft_testing.fake_backend.slots import Slot
from weft_testing.fake_backend.state import FakeState, Outcome


class StopFilter:
    """Passes text up to the first stop string; holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """Returns the text that can be sent now."""
        pending = self._held + text
        found = [place for place in (pending.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.has_stopped = True
            self._held = ""
            return pending[: min(found)]
        keep = self._possible_start(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """Returns the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


_PREFILL_SLICE_SECONDS = 0.02
_PREFILL_BURN_SECONDS = 0.003
_STALL_SLICE_SECONDS = 3600.0
_COMMENT_SECONDS = 0.1
_FLUSH_POLL_SECONDS = 0.001
_FLUSH_POLLS = 1000
_HOLD_POLL_SECONDS = 0.02


class Choice:
    """A running choice."""

    def __init__(self, index: int, slot: Slot, request: GenerationRequest, behaviour: Behaviour, context: int) -> None:
        prompt = request.prompts[index // request.choices_per_prompt]
        self.index = index
        self.slot = slot
        self.pieces = answer(request, behaviour)
        room = context - len(prompt)
        self.limit = min(room, MAX_TOKENS_PER_CHOICE if request.max_tokens is None else request.max_tokens)
        self.stops = StopFilter(request.stops) if request.stops else None
        self.called_tools = False
        cached = min(slot.prompt_tokens_cached, max(0, len(prompt) - 1))
        self.tally = shapes.ChoiceTally(prompt_tokens=len(prompt), cached_tokens=cached)


class Generation:
    """A request in its slots."""

    def __init__(
        self,
        http: web.BaseRequest,
        request: GenerationRequest,
        behaviour: Behaviour,
        sink: Sink,
        state: FakeState,
        outcome: Outcome,
        newest: Callable[[], Behaviour],
    ) -> None:
        """`newest`: returns the current switches, for those that affect running requests."""
        self._http = http
        self._request = request
        self._behaviour = behaviour
        self._sink = sink
        self._state = state
        self._outcome = outcome
        self._newest = newest
        self._tokens_sent = 0
        self._next_fault = _next_fault(behaviour, 0)
        self._decode_started = 0.0

    async def run(self, slots: list[Slot], slot_context_tokens: int) -> web.StreamResponse:
        """Generates every choice and completes the answer; ends early only with the connection or the process."""
        count = len(self._request.prompts) * self._request.choices_per_prompt
        choices = [
            Choice(index, slots[index % len(slots)], self._request, self._behaviour, slot_context_tokens)
            for index in range(count)
        ]
        await self._prefill(choices)
        await self._decode(choices)
        answer = await self._sink.end()
        if self._behaviour.close_after_stream and answer.prepared and self._http.transport is not None:
            self._http.transport.close()
        return answer

    async def _prefill(self, choices: list[Choice]) -> None:
        first = choices[0]
        started = time.perf_counter()
        reports = self._behaviour.prefill_progress if self._request.return_progress else 0
        seconds = self._behaviour.prefill_seconds
        for number in range(reports):
            share = number / max(1, reports - 1)
            await self._compute(seconds / max(1, reports - 1) if number else 0.0)
            self._report_progress(first, share, started)
            await self._sink.flush()
        if reports < 2:
            await self._compute(seconds)
        while self._newest().prefill_held:
            await self._silence(_HOLD_POLL_SECONDS)
        self._decode_started = time.perf_counter()
        for choice in choices:
            choice.tally.prompt_ms = 1000.0 * (self._decode_started - started)
            self._state.prompt_tokens += choice.tally.prompt_tokens
            self._state.cached_prompt_tokens += choice.tally.cached_tokens

    def _report_progress(self, choice: Choice, share: float, started: float) -> None:
        total, cached = choice.tally.prompt_tokens, choice.tally.cached_tokens
        processed = cached + math.floor(share * (total - cached))
        elapsed_ms = round(1000.0 * (time.perf_counter() - started))
        self._sink.progress({"total": total, "cache": cached, "processed": processed, "time_ms": elapsed_ms})

    async def _compute(self, seconds: float) -> None:
        """Simulates computation: no output, and a little CPU unless `prefill_idle`."""
        if self._behaviour.prefill_idle:
            await self._silence(seconds)
            return
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            pause = min(left, _PREFILL_SLICE_SECONDS)
            burn_until = time.perf_counter() + min(_PREFILL_BURN_SECONDS, pause)
            while time.perf_counter() < burn_until:
                pass
            await self._silence(pause)

    async def _decode(self, choices: list[Choice]) -> None:
        for choice in choices:
            self._sink.start(choice.index)
        live = choices
        while live:
            live = [choice for choice in live if await self._step(choice)]

    async def _step(self, choice: Choice) -> bool:
        """Generates a choice's next token or its end; returns whether the choice continues."""
        if self._tokens_sent == self._next_fault:
            await self._apply_faults()
        if choice.tally.completion_tokens >= choice.limit:
            return self._finish(choice, "length")
        piece = next(choice.pieces, None)
        if piece is None:
            return self._finish(choice, "tool_calls" if choice.called_tools else "stop")
        if self._behaviour.tokens_per_second and not self._newest().hurries:
            await self._pace()
        self._count_token(choice)
        if not self._emit(choice, piece):
            return self._finish(choice, "stop")
        await self._sink.flush_when_full()
        return True

    def _emit(self, choice: Choice, piece: Piece) -> bool:
        """Sends a token; returns False if a stop string ended the choice."""
        logprobs = None
        if self._request.top_logprobs is not None and piece.kind is PieceKind.CONTENT:
            position = choice.tally.completion_tokens - 1
            logprobs = shapes.logprob_content(piece.text, position, self._request.top_logprobs)
        if piece.kind is PieceKind.CALL_START:
            choice.called_tools = True
        elif piece.kind is PieceKind.CONTENT and choice.stops is not None:
            piece = Piece(PieceKind.CONTENT, choice.stops.feed(piece.text))
            if not piece.text:
                return not choice.stops.has_stopped
        self._sink.piece(choice.index, piece, logprobs)
        return choice.stops is None or not choice.stops.has_stopped

    def _count_token(self, choice: Choice) -> None:
        choice.tally.completion_tokens += 1
        choice.slot.tokens_decoded += 1
        self._tokens_sent += 1
        self._state.tokens_sent += 1

    def _finish(self, choice: Choice, reason: str) -> bool:
        held_back = choice.stops.flush() if choice.stops is not None else ""
        if held_back:
            self._sink.piece(choice.index, Piece(PieceKind.CONTENT, held_back), None)
        choice.tally.predicted_ms = 1000.0 * (time.perf_counter() - self._decode_started)
        self._sink.finish(choice.index, reason, choice.tally)
        return False

    async def _pace(self) -> None:
        due = self._decode_started + (self._tokens_sent + 1) / self._behaviour.tokens_per_second
        delay = due - time.perf_counter()
        if delay > 0:
            await self._sink.flush()
            await self._silence(delay)

    async def _silence(self, seconds: float) -> None:
        if not self._behaviour.keepalive_comments:
            await asyncio.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            await self._sink.keepalive()
            await asyncio.sleep(min(left, _COMMENT_SECONDS))

    async def _apply_faults(self) -> None:
        place, behaviour = self._tokens_sent, self._behaviour
        if place in _last_places(behaviour):
            if place > 0:
                await self._sink.flush()
            await self._stop_or_stall(place)
        self._next_fault = _next_fault(behaviour, place + 1)

    async def _stop_or_stall(self, index: int) -> Never:
        """Crashes, closes the socket or stalls; returns only by cancellation when the connection is closed."""
        if index == self._behaviour.crash_after_tokens:
            await self._wait_until_sent()
            crash(signal.Signals[self._behaviour.crash_signal])
        if index == self._behaviour.out_of_memory_after_tokens:
            await self._wait_until_sent()
            run_out_of_memory()
        if index == self._behaviour.close_after_tokens:
            self._outcome.broken_by_fake = True
            if self._http.transport is not None:
                self._http.transport.close()
        while True:
            await self._silence(_STALL_SLICE_SECONDS)

    async def _wait_until_sent(self) -> None:
        """Waits until the kernel has all bytes, at most a second, because a dead process sends no buffered bytes."""
        transport = self._http.transport
        for _ in range(_FLUSH_POLLS):
            if transport is None or not transport.get_write_buffer_size():
                break
            await asyncio.sleep(_FLUSH_POLL_SECONDS)


def _next_fault(behaviour: Behaviour, from_token: int) -> int:
    """Returns the next token count with a fault; -1: there is none."""
    return min((place for place in _last_places(behaviour) if place is not None and place >= from_token), default=-1)


def _last_places(behaviour: Behaviour) -> tuple[int | None, ...]:
    """Returns the token counts of faults that end the answer."""
    return (
        behaviour.close_after_tokens,
        behaviour.crash_after_tokens,
        behaviour.out_of_memory_after_tokens,
        behaviour.stall_after_tokens,
    )
