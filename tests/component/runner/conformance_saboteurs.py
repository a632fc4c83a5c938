"""Runners that break one promise each: a real runner, with one answer changed on the way to the checks."""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from weft.api.common.v1 import event_pb2
from weft.api.runner.v1 import permit_pb2, ticket_pb2
from weft.api.runner.v1.runner_service_pb2 import CLAIM_STATE_BROKEN, EngineClaim
from weft.dispatch.frames import has_content
from weft.dispatch.tickets import Action
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
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


class _Lenient(RunnerUnderTest):
    """A ticket gate that admits invalid tickets."""

    def is_taken(self, ticket: ticket_pb2.Ticket) -> bool:
        raise NotImplementedError

    async def frames(
        self, payload: Any, request_id: str = "", ticket: ticket_pb2.Ticket | None = None
    ) -> AsyncGenerator[Events]:
        kept = None if ticket is not None and self.is_taken(ticket) else ticket
        async for frame in super().frames(payload, request_id, kept):
            yield frame


class TakesForged(_Lenient):
    def is_taken(self, ticket: ticket_pb2.Ticket) -> bool:
        return ticket.mac == FORGED


class TakesForeign(_Lenient):
    def is_taken(self, ticket: ticket_pb2.Ticket) -> bool:
        return ticket_pb2.TicketClaims.FromString(ticket.claims).runner_incarnation == "another-life"


class TakesExpired(_Lenient):
    def is_taken(self, ticket: ticket_pb2.Ticket) -> bool:
        return ticket_pb2.TicketClaims.FromString(ticket.claims).request_id == "req-old"


class TakesTwice(_Lenient):
    def is_taken(self, ticket: ticket_pb2.Ticket) -> bool:
        return ticket_pb2.TicketClaims.FromString(ticket.claims).request_id == "req-once"


class _Bending(RunnerUnderTest):
    """Changes the frames of every answer."""

    def bend(self, frame: Events) -> list[Events]:
        raise NotImplementedError

    async def frames(self, *arguments: Any, **names: Any) -> AsyncGenerator[Events]:
        async for frame in super().frames(*arguments, **names):
            for bent in self.bend(frame):
                yield bent


def _receipt_of(frame: Events) -> Any:
    return frame[-1].finished.receipt if frame and frame[-1].WhichOneof("event") == "finished" else None


class EndsTwice(_Bending):
    def bend(self, frame: Events) -> list[Events]:
        return [frame, [frame[-1]]] if _receipt_of(frame) is not None else [frame]


class DoesNotStart(_Bending):
    def bend(self, frame: Events) -> list[Events]:
        return [[event for event in frame if event.WhichOneof("event") != "started"]]


class CrowdsFirstContent(_Bending):
    def bend(self, frame: Events) -> list[Events]:
        more = [event_pb2.InferenceEvent(delta=event_pb2.Delta(text="more"))] if has_content(frame) else []
        return [[*frame[:-1], *more, frame[-1]]]


class NeverFinishesItsChoice(_Bending):
    def bend(self, frame: Events) -> list[Events]:
        for event in frame:
            if event.HasField("delta"):
                event.delta.finish_reason = event_pb2.FINISH_REASON_UNSPECIFIED
        return [frame]


class SaysStopForLength(_Bending):
    def bend(self, frame: Events) -> list[Events]:
        for event in frame:
            if event.delta.finish_reason:
                event.delta.finish_reason = event_pb2.FINISH_REASON_STOP
        return [frame]


class CountsNoPrompt(_Bending):
    def bend(self, frame: Events) -> list[Events]:
        if (receipt := _receipt_of(frame)) is not None:
            receipt.usage.prompt_tokens = 7
        return [frame]


class ExceedsTheLimit(_Bending):
    def bend(self, frame: Events) -> list[Events]:
        if (receipt := _receipt_of(frame)) is not None:
            receipt.usage.completion_tokens = 9
        return [frame]


class NamesNoHost(_Bending):
    def bend(self, frame: Events) -> list[Events]:
        if (receipt := _receipt_of(frame)) is not None:
            receipt.host = ""
        return [frame]


class TakesWorkWithoutPayload(RunnerUnderTest):
    async def run(self, payload: Any, ticket: Any = None) -> list[Events]:
        return [] if payload is None else await super().run(payload, ticket)


class LoadsWhatIsNotThere(RunnerUnderTest):
    async def load(self, model: str = "") -> None:
        if not model:
            await super().load()


class CutsLongPrompts(RunnerUnderTest):
    async def run(self, *arguments: Any, **names: Any) -> list[Events]:
        try:
            return await super().run(*arguments, **names)
        except WeftError as error:
            if error.reason is Reason.CONTEXT_LENGTH_EXCEEDED:
                return []
            raise


class QueuesInsteadOfRefusing(RunnerUnderTest):
    async def run(self, *arguments: Any, **names: Any) -> list[Events]:
        try:
            return await super().run(*arguments, **names)
        except WeftError as error:
            if error.reason is Reason.NO_SLOT_AVAILABLE:
                return []
            raise


class FreesNoSlots(RunnerUnderTest):
    async def slot_holders(self) -> frozenset[str]:
        return frozenset(self.own_requests)


class AnotherLife(RunnerUnderTest):
    async def describe_runner(self, log_lines: int = 0) -> Any:
        described = await super().describe_runner(log_lines)
        described.runner.incarnation = "another-life"
        return described


class DoesNotServe(RunnerUnderTest):
    async def serving(self) -> bool:
        return False


class ForgetsItsModel(RunnerUnderTest):
    async def describe_runner(self, log_lines: int = 0) -> Any:
        described = await super().describe_runner(log_lines)
        described.runner.capability.ClearField("instances")
        return described


class TellsAllItsLog(RunnerUnderTest):
    async def log_tail(self, line_count: int) -> list[str]:
        return ["line"] * (line_count + 1)


class MixesVectors(RunnerUnderTest):
    async def embed(self, texts: list[str]) -> Any:
        response = await super().embed(texts)
        response.embeddings[0].index, response.embeddings[1].index = 1, 0
        return response


class GivesEmptyVectors(RunnerUnderTest):
    async def embed(self, texts: list[str]) -> Any:
        response = await super().embed(texts)
        for vector in response.embeddings:
            vector.ClearField("values")
        return response


class CountsNoInputs(RunnerUnderTest):
    async def embed(self, texts: list[str]) -> Any:
        response = await super().embed(texts)
        response.receipt.usage.prompt_tokens = 0
        return response


class _BendingRecords(RunnerUnderTest):
    """Changes the request records."""

    def bend(self, found: Any) -> None:
        raise NotImplementedError

    async def find_request(self, request_id: str) -> Any:
        found = await super().find_request(request_id)
        self.bend(found)
        return found


class TellsNoOutput(_BendingRecords):
    def bend(self, found: Any) -> None:
        found.output = ""


class TellsNoTimes(_BendingRecords):
    def bend(self, found: Any) -> None:
        found.record.ClearField("last_progress_time")


class SaysThatAllIsWell(_BendingRecords):
    def bend(self, found: Any) -> None:
        found.record.state = found.record.STATE_GENERATING


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


class _LenientWithPermits(RunnerUnderTest):
    """A permit gate that admits invalid permits."""

    def is_taken(self, permit: permit_pb2.OperationPermit | None) -> bool:
        raise NotImplementedError

    async def unload_with(self, permit: permit_pb2.OperationPermit | None) -> None:
        taken = self.permit(Action.UNLOAD, self.model) if self.is_taken(permit) else permit
        await super().unload_with(taken)


class NeedsNoPermit(_LenientWithPermits):
    def is_taken(self, permit: permit_pb2.OperationPermit | None) -> bool:
        return permit is None


class LoadsWithoutPermit(RunnerUnderTest):
    async def load_with(self, permit: permit_pb2.OperationPermit | None, model: str = "") -> None:
        await super().load_with(permit or self.permit(Action.LOAD, model or self.model), model)


class TakesForgedPermits(_LenientWithPermits):
    def is_taken(self, permit: permit_pb2.OperationPermit | None) -> bool:
        return permit is not None and permit.mac != hmac_of(permit.claims, self.runner.ticket_key)


class TakesAnyAction(_LenientWithPermits):
    def is_taken(self, permit: permit_pb2.OperationPermit | None) -> bool:
        return permit is not None and permit_pb2.PermitClaims.FromString(permit.claims).action == Action.LOAD.value


class TakesPermitsOfOthers(_LenientWithPermits):
    def is_taken(self, permit: permit_pb2.OperationPermit | None) -> bool:
        return permit is not None and permit_pb2.PermitClaims.FromString(permit.claims).model != self.model


class TakesPermitsTwice(_LenientWithPermits):
    def is_taken(self, permit: permit_pb2.OperationPermit | None) -> bool:
        if permit is None:
            return False
        claims = permit_pb2.PermitClaims.FromString(permit.claims)
        is_good = permit.mac == hmac_of(permit.claims, self.runner.ticket_key)
        return is_good and (claims.action, claims.model) == (Action.UNLOAD.value, self.model)


def hmac_of(claims: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"weft-operation-permit-v1\0" + claims, hashlib.sha256)


class IsMuteAfterALoad(RunnerUnderTest):
    async def run(self, *arguments: Any, **names: Any) -> list[Events]:
        await super().run(*arguments, **names)
        return []


class ClaimsTokensThatAreNotCounted(_Bending):
    def bend(self, frame: Events) -> list[Events]:
        if (receipt := _receipt_of(frame)) is not None:
            receipt.usage.prompt_tokens = 0
        return [frame]

    async def engine_claims(self) -> list[EngineClaim]:
        return [EngineClaim(name="usage_in_streams", claim="yes", source="its page")]


class ClaimsMetricsThatAreNotThere(RunnerUnderTest):
    async def engine_claims(self) -> list[EngineClaim]:
        missing = EngineClaim(name="metrics_path", claim="/m", source="its page", state=CLAIM_STATE_BROKEN, seen="404")
        return [missing, EngineClaim(name="sleep", claim="/sleep")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saboteur:
    """A runner that breaks one promise, and the check that detects it."""

    check: str
    kind: type[RunnerUnderTest]
    words: str

    @property
    def name(self) -> str:
        return self.kind.__name__


SABOTEURS = (
    Saboteur(check="description", kind=AnotherLife, words="its incarnation is not the one that the mesh knows"),
    Saboteur(check="description", kind=DoesNotServe, words="its health service says that it does not serve"),
    Saboteur(check="description", kind=ForgetsItsModel, words="the runner reports no state of its model m"),
    Saboteur(check="tickets", kind=TakesForged, words="expected TICKET_INVALID, but it succeeded"),
    Saboteur(check="tickets", kind=TakesForeign, words="expected TICKET_INVALID, but it succeeded"),
    Saboteur(check="tickets", kind=TakesExpired, words="expected TICKET_EXPIRED, but it succeeded"),
    Saboteur(check="tickets", kind=TakesTwice, words="expected TICKET_INVALID, but it succeeded"),
    Saboteur(check="typed-errors", kind=TakesWorkWithoutPayload, words="expected INVALID_ARGUMENT, but it succeeded"),
    Saboteur(check="typed-errors", kind=LoadsWhatIsNotThere, words="expected MODEL_NOT_FOUND, but it succeeded"),
    Saboteur(check="typed-errors", kind=CutsLongPrompts, words="expected CONTEXT_LENGTH_EXCEEDED, but it succeeded"),
    Saboteur(check="event-order", kind=EndsTwice, words="the last event must be the only `finished`"),
    Saboteur(check="event-order", kind=DoesNotStart, words="the first event was ['delta']"),
    Saboteur(check="event-order", kind=CrowdsFirstContent, words="the first content came together with 1 more"),
    Saboteur(check="event-order", kind=NeverFinishesItsChoice, words="0 finish reasons for one choice"),
    Saboteur(check="usage-counts", kind=NeverFinishesItsChoice, words="an answer cut by its limit must end with"),
    Saboteur(check="usage-counts", kind=SaysStopForLength, words="an answer cut by its limit must end with LENGTH"),
    Saboteur(check="usage-counts", kind=CountsNoPrompt, words="prompts counted 7 and 7 tokens"),
    Saboteur(check="usage-counts", kind=ExceedsTheLimit, words="9 tokens of answer, the limit was 8"),
    Saboteur(check="usage-counts", kind=NamesNoHost, words="the receipt lacks request id, model or host"),
    Saboteur(check="disconnect", kind=FreesNoSlots, words="the slot was still held"),
    Saboteur(check="slots", kind=QueuesInsteadOfRefusing, words="expected NO_SLOT_AVAILABLE, but it succeeded"),
    Saboteur(check="slots", kind=FreesNoSlots, words="slots were still held after all callers had left"),
    Saboteur(check="embeddings", kind=MixesVectors, words="three inputs gave vectors [1, 0, 2]"),
    Saboteur(check="embeddings", kind=GivesEmptyVectors, words="vectors of lengths [0]"),
    Saboteur(check="embeddings", kind=CountsNoInputs, words="the receipt counts no tokens"),
    Saboteur(check="health-in-prefill", kind=DoesNotServe, words="its health service said that it does not serve"),
    Saboteur(check="request-record", kind=TellsNoOutput, words="its output so far is missing"),
    Saboteur(check="request-record", kind=TellsNoTimes, words="its times are missing"),
    Saboteur(check="request-record", kind=KnowsEveryRequest, words="expected NOT_FOUND, but it succeeded"),
    Saboteur(check="request-record", kind=SaysThatAllIsWell, words="a request whose caller left is not told as"),
    Saboteur(
        check="engine-claims",
        kind=ClaimsTokensThatAreNotCounted,
        words="usage_in_streams: claimed yes (its page), but a stream ended without token counts",
    ),
    Saboteur(
        check="engine-claims",
        kind=ClaimsMetricsThatAreNotThere,
        words="metrics_path: claimed /m (its page), but 404",
    ),
    Saboteur(check="logs", kind=TellsAllItsLog, words="21 lines came, 20 were asked for"),
    Saboteur(check="permits", kind=NeedsNoPermit, words="expected PERMIT_INVALID, but it succeeded"),
    Saboteur(check="permits", kind=LoadsWithoutPermit, words="expected PERMIT_INVALID, but it succeeded"),
    Saboteur(check="permits", kind=TakesForgedPermits, words="expected PERMIT_INVALID, but it succeeded"),
    Saboteur(check="permits", kind=TakesAnyAction, words="expected PERMIT_INVALID, but it succeeded"),
    Saboteur(check="permits", kind=TakesPermitsOfOthers, words="expected PERMIT_INVALID, but it succeeded"),
    Saboteur(check="permits", kind=TakesPermitsTwice, words="expected PERMIT_INVALID, but it succeeded"),
    Saboteur(check="load-then-unload", kind=DoesNotUnload, words="after the unload the model is not asleep"),
    Saboteur(check="load-then-unload", kind=FailsToLoad, words="WAKE_FAILED: cannot load"),
    Saboteur(check="load-then-unload", kind=IsMuteAfterALoad, words="loaded again, it gave no text"),
    Saboteur(check="teardown", kind=DoesNotUnload, words="processes of the engine are left"),
)
