"""Runners that break one promise each: a real runner, with one answer changed on the way to the checks."""

import asyncio
import functools
import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from weft.api.common.v1 import event_pb2
from weft.api.runner.v1 import permit_pb2, ticket_pb2
from weft.api.runner.v1.runner_service_pb2 import CLAIM_STATE_BROKEN, EngineClaim, RequestRecord
from weft.dispatch.frames import has_content
from weft.dispatch.tickets import Action
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.conformance.runner_suite import FORGED
from weft_testing.conformance.runner_under_test import Events, RunnerUnderTest


class HangingRunner(RunnerUnderTest):
    async def frames(self, *_arguments: Any, **_names: Any) -> AsyncGenerator[Events]:
        await asyncio.Event().wait()
        yield []


class BusyRunner(RunnerUnderTest):
    async def run(self, *_arguments: Any, **_names: Any) -> list[Events]:
        raise WeftError(Reason.NO_SLOT_AVAILABLE, "full")


class HangsWhenFull(RunnerUnderTest):
    async def run(self, *_arguments: Any, **_names: Any) -> list[Events]:
        await asyncio.Event().wait()
        raise AssertionError


def _changes(method: str, change: Callable[[Any, Any], Any]) -> type[RunnerUnderTest]:
    """A runner whose method returns what `change(runner, returned)` makes of it."""
    original = getattr(RunnerUnderTest, method)

    async def changed(self: RunnerUnderTest, *arguments: Any, **names: Any) -> Any:
        return change(self, await original(self, *arguments, **names))

    return type("Changed", (RunnerUnderTest,), {method: changed})


def _sets(method: str, path: str, value: Any = None) -> type[RunnerUnderTest]:
    """A runner with one field of a response changed."""
    return _changes(method, lambda _runner, response: _set(response, path, value))


def _set(message: Any, path: str, value: Any) -> Any:
    """Sets a field; None clears it."""
    *parents, field = path.split(".")
    parent = functools.reduce(getattr, parents, message)
    parent.ClearField(field)
    if value is not None:
        setattr(parent, field, value)
    return message


def _bends(bend: Callable[[Events], Any]) -> type[RunnerUnderTest]:
    """A runner that changes the frames of every answer in place."""

    class Bending(RunnerUnderTest):
        async def frames(self, *arguments: Any, **names: Any) -> AsyncGenerator[Events]:
            async for frame in RunnerUnderTest.frames(self, *arguments, **names):
                bend(frame)
                yield frame

    return Bending


def _bends_receipts(path: str, value: Any = None) -> type[RunnerUnderTest]:
    return _bends(lambda frame: [_set(end.finished.receipt, path, value) for end in _ends(frame)])


def _ends(frame: Events) -> Events:
    return [event for event in frame if event.HasField("finished")]


def _bends_reasons(reason: event_pb2.FinishReason.ValueType) -> type[RunnerUnderTest]:
    finished = "delta.finish_reason"
    return _bends(lambda frame: [_set(event, finished, reason) for event in frame if event.delta.finish_reason])


def _crowd_first_content(frame: Events) -> None:
    if has_content(frame):
        frame.insert(-1, event_pb2.InferenceEvent(delta=event_pb2.Delta(text="more")))


def _drop_start(frame: Events) -> None:
    frame[:] = [event for event in frame if not event.HasField("started")]


def _admits_tickets(is_admitted: Callable[[ticket_pb2.Ticket, ticket_pb2.TicketClaims], bool]) -> type[RunnerUnderTest]:
    """A ticket gate that admits some invalid tickets."""

    class Lenient(RunnerUnderTest):
        async def frames(
            self, payload: Any, request_id: str = "", ticket: ticket_pb2.Ticket | None = None
        ) -> AsyncGenerator[Events]:
            if ticket is not None and is_admitted(ticket, ticket_pb2.TicketClaims.FromString(ticket.claims)):
                ticket = None
            async for frame in super().frames(payload, request_id, ticket):
                yield frame

    return Lenient


def _admits_permits(is_admitted: Callable[[bool, int, str], bool]) -> type[RunnerUnderTest]:
    """A permit gate that admits permits by `is_admitted(is_signed, action, model)`."""

    class Lenient(RunnerUnderTest):
        async def unload_with(self, permit: permit_pb2.OperationPermit | None) -> None:
            if permit is not None:
                mac = hmac.digest(self.runner.ticket_key, b"weft-operation-permit-v1\0" + permit.claims, hashlib.sha256)
                claims = permit_pb2.PermitClaims.FromString(permit.claims)
                if is_admitted(permit.mac == mac, claims.action, claims.model):
                    permit = self.permit(Action.UNLOAD, self.model)
            await super().unload_with(permit)

    return Lenient


class NeedsNoPermit(RunnerUnderTest):
    async def unload_with(self, permit: permit_pb2.OperationPermit | None) -> None:
        await super().unload_with(permit or self.permit(Action.UNLOAD, self.model))


class LoadsWithoutPermit(RunnerUnderTest):
    async def load_with(self, permit: permit_pb2.OperationPermit | None, model: str = "") -> None:
        await super().load_with(permit or self.permit(Action.LOAD, model or self.model), model)


class TakesWorkWithoutPayload(RunnerUnderTest):
    async def run(self, payload: Any, ticket: Any = None) -> list[Events]:
        return [] if payload is None else await super().run(payload, ticket)


class LoadsWhatIsNotThere(RunnerUnderTest):
    async def load(self, model: str = "") -> None:
        if not model:
            await super().load()


def _hides(reason: Reason) -> type[RunnerUnderTest]:
    """A runner that hides its refusals for this reason."""

    class Hiding(RunnerUnderTest):
        async def run(self, *arguments: Any, **names: Any) -> list[Events]:
            try:
                return await super().run(*arguments, **names)
            except WeftError as error:
                if error.reason is reason:
                    return []
                raise

    return Hiding


def _swap_vectors(_runner: Any, response: Any) -> Any:
    response.embeddings[0].index, response.embeddings[1].index = 1, 0
    return response


def _empty_vectors(_runner: Any, response: Any) -> Any:
    for vector in response.embeddings:
        vector.ClearField("values")
    return response


class DoesNotServe(RunnerUnderTest):
    async def serving(self) -> bool:
        return False


class TellsAllItsLog(RunnerUnderTest):
    async def log_tail(self, line_count: int) -> list[str]:
        return ["line"] * (line_count + 1)


class KnowsEveryRequest(RunnerUnderTest):
    async def find_request(self, request_id: str) -> Any:
        known = request_id if request_id in self.own_requests else next(iter(self.own_requests))
        return await super().find_request(known)


class DoesNotUnload(RunnerUnderTest):
    async def unload(self) -> None:
        pass


class FailsToLoad(RunnerUnderTest):
    async def load(self, model: str = "") -> None:
        raise WeftError(Reason.WAKE_FAILED, f"cannot load {model}")


class ClaimsTokensThatAreNotCounted(RunnerUnderTest):
    frames = _bends_receipts("usage.prompt_tokens").frames

    async def engine_claims(self) -> list[EngineClaim]:
        return [EngineClaim(name="usage_in_streams", claim="yes", source="its page")]


class ClaimsMetricsThatAreNotThere(RunnerUnderTest):
    async def engine_claims(self) -> list[EngineClaim]:
        missing = EngineClaim(name="metrics_path", claim="/m", source="its page", state=CLAIM_STATE_BROKEN, seen="404")
        return [missing, EngineClaim(name="sleep", claim="/sleep")]


FreesNoSlots = _changes("slot_holders", lambda runner, _holders: frozenset(runner.own_requests))
NeverFinishesItsChoice = _bends_reasons(event_pb2.FINISH_REASON_UNSPECIFIED)
SaysStopForLength = _bends_reasons(event_pb2.FINISH_REASON_STOP)
TakesForged = _admits_tickets(lambda ticket, _claims: ticket.mac == FORGED)
TakesForeign = _admits_tickets(lambda _ticket, claims: claims.runner_incarnation == "another-life")
TakesExpired = _admits_tickets(lambda _ticket, claims: claims.request_id == "req-old")
TakesTwice = _admits_tickets(lambda _ticket, claims: claims.request_id == "req-once")
TakesForgedPermits = _admits_permits(lambda is_signed, _action, _model: not is_signed)
TakesAnyAction = _admits_permits(lambda _is_signed, action, _model: action == Action.LOAD.value)
TakesPermitsOfOthers = _admits_permits(lambda _is_signed, _action, model: model != "m")
TakesPermitsTwice = _admits_permits(
    lambda is_signed, action, model: is_signed and (action, model) == (Action.UNLOAD.value, "m")
)


class Saboteur(NamedTuple):
    """A runner that breaks one promise, and the start of the finding of the check that detects it."""

    check: str
    kind: type[RunnerUnderTest]
    words: str


SABOTEURS = (
    Saboteur(
        "description",
        _sets("describe_runner", "runner.incarnation", "another-life"),
        "its incarnation is not the one that the mesh knows",
    ),
    Saboteur("description", DoesNotServe, "its health service says that it does not serve"),
    Saboteur(
        "description",
        _sets("describe_runner", "runner.capability.instances"),
        "the runner reports no state of its model m",
    ),
    Saboteur("tickets", TakesForged, "expected TICKET_INVALID, but it succeeded"),
    Saboteur("tickets", TakesForeign, "expected TICKET_INVALID, but it succeeded"),
    Saboteur("tickets", TakesExpired, "expected TICKET_EXPIRED, but it succeeded"),
    Saboteur("tickets", TakesTwice, "expected TICKET_INVALID, but it succeeded"),
    Saboteur("typed-errors", TakesWorkWithoutPayload, "expected INVALID_ARGUMENT, but it succeeded"),
    Saboteur("typed-errors", LoadsWhatIsNotThere, "expected MODEL_NOT_FOUND, but it succeeded"),
    Saboteur(
        "typed-errors", _hides(Reason.CONTEXT_LENGTH_EXCEEDED), "expected CONTEXT_LENGTH_EXCEEDED, but it succeeded"
    ),
    Saboteur(
        "event-order", _bends(lambda frame: frame.extend(_ends(frame))), "the last event must be the only `finished`"
    ),
    Saboteur("event-order", _bends(_drop_start), "the first event was ['delta']"),
    Saboteur("event-order", _bends(_crowd_first_content), "the first content came together with 1 more"),
    Saboteur("event-order", NeverFinishesItsChoice, "0 finish reasons for one choice"),
    Saboteur("usage-counts", NeverFinishesItsChoice, "an answer cut by its limit must end with"),
    Saboteur("usage-counts", SaysStopForLength, "an answer cut by its limit must end with LENGTH"),
    Saboteur("usage-counts", _bends_receipts("usage.prompt_tokens", 7), "prompts counted 7 and 7 tokens"),
    Saboteur("usage-counts", _bends_receipts("usage.completion_tokens", 9), "9 tokens of answer, the limit was 8"),
    Saboteur("usage-counts", _bends_receipts("host"), "the receipt lacks request id, model or host"),
    Saboteur("disconnect", FreesNoSlots, "the slot was still held"),
    Saboteur("slots", _hides(Reason.NO_SLOT_AVAILABLE), "expected NO_SLOT_AVAILABLE, but it succeeded"),
    Saboteur("slots", FreesNoSlots, "slots were still held after all callers had left"),
    Saboteur("embeddings", _changes("embed", _swap_vectors), "three inputs gave vectors [1, 0, 2]"),
    Saboteur("embeddings", _changes("embed", _empty_vectors), "vectors of lengths [0]"),
    Saboteur("embeddings", _sets("embed", "receipt.usage.prompt_tokens"), "the receipt counts no tokens"),
    Saboteur("health-in-prefill", DoesNotServe, "its health service said that it does not serve"),
    Saboteur("request-record", _sets("find_request", "output"), "its output so far is missing"),
    Saboteur("request-record", _sets("find_request", "record.last_progress_time"), "its times are missing"),
    Saboteur("request-record", KnowsEveryRequest, "expected NOT_FOUND, but it succeeded"),
    Saboteur(
        "request-record",
        _sets("find_request", "record.state", RequestRecord.STATE_GENERATING),
        "a request whose caller left is not told as",
    ),
    Saboteur(
        "engine-claims",
        ClaimsTokensThatAreNotCounted,
        "usage_in_streams: claimed yes (its page), but a stream ended without token counts",
    ),
    Saboteur("engine-claims", ClaimsMetricsThatAreNotThere, "metrics_path: claimed /m (its page), but 404"),
    Saboteur("logs", TellsAllItsLog, "21 lines came, 20 were asked for"),
    Saboteur("permits", NeedsNoPermit, "expected PERMIT_INVALID, but it succeeded"),
    Saboteur("permits", LoadsWithoutPermit, "expected PERMIT_INVALID, but it succeeded"),
    Saboteur("permits", TakesForgedPermits, "expected PERMIT_INVALID, but it succeeded"),
    Saboteur("permits", TakesAnyAction, "expected PERMIT_INVALID, but it succeeded"),
    Saboteur("permits", TakesPermitsOfOthers, "expected PERMIT_INVALID, but it succeeded"),
    Saboteur("permits", TakesPermitsTwice, "expected PERMIT_INVALID, but it succeeded"),
    Saboteur("load-then-unload", DoesNotUnload, "after the unload the model is not asleep"),
    Saboteur("load-then-unload", FailsToLoad, "WAKE_FAILED: cannot load"),
    Saboteur("load-then-unload", _changes("run", lambda _runner, _frames: []), "loaded again, it gave no text"),
    Saboteur("teardown", DoesNotUnload, "processes of the engine are left"),
)
