"""Endpoint pickers that break one promise each, and keep all others."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from weft.api.envoy.v1.base_pb2 import HeaderValueOption
from weft.api.envoy.v1.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from weft.kernel.lane_names import DESTINATION, DESTINATION_NAMESPACE, SUBSET, SUBSET_NAMESPACE
from weft_testing.conformance.picker_gateways import AGENTGATEWAY, LLM_D, GatewayProfile
from weft_testing.reference_picker import (
    HEALTH_SERVICES,
    TEST_SELECTION,
    TEST_SERVED,
    ReferencePicker,
    ReferenceSettings,
    RefusedError,
    Turn,
    body_answer,
    set_header,
)


class DiffersInMetadata(ReferencePicker):
    def headers_answer(self, destination: str) -> ProcessingResponse:
        answer = super().headers_answer(destination)
        inner = answer.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value
        inner.fields[DESTINATION].string_value = "127.0.0.9:1"
        return answer


class HasNoMetadata(ReferencePicker):
    def headers_answer(self, destination: str) -> ProcessingResponse:
        answer = super().headers_answer(destination)
        answer.ClearField("dynamic_metadata")
        return answer


class NamesNoPort(ReferencePicker):
    def choose(self, turn: Turn) -> str:
        return "127.0.0.1"


class NamesAHost(ReferencePicker):
    def choose(self, turn: Turn) -> str:
        return "localhost:8000"


class AppendsDestination(ReferencePicker):
    def headers_answer(self, destination: str) -> ProcessingResponse:
        answer = super().headers_answer(destination)
        for option in answer.request_headers.response.header_mutation.set_headers:
            option.append_action = HeaderValueOption.HEADER_APPEND_ACTION_UNSPECIFIED
        return answer


class ObeysItsCaller(ReferencePicker):
    def choose(self, turn: Turn) -> str:
        return turn.headers.get(DESTINATION) or super().choose(turn)


class AnswersEarly(ReferencePicker):
    async def process(self, requests: AsyncIterator[ProcessingRequest], context: Any) -> Any:
        yield self.headers_answer(self.settings.endpoints[0])
        async for answer in super().process(requests, context):
            if answer.WhichOneof("response") != "request_headers":
                yield answer


class ReturnsTheBodyTwice(ReferencePicker):
    def body_answers(self, kind: str, body: bytes, *, is_end: bool) -> Iterator[ProcessingResponse]:
        yield from super().body_answers(kind, body, is_end=False)
        yield from super().body_answers(kind, body, is_end=is_end)


class SaysTheEndTwice(ReferencePicker):
    def body_answers(self, kind: str, body: bytes, *, is_end: bool) -> Iterator[ProcessingResponse]:
        yield from super().body_answers(kind, body, is_end=is_end)
        yield body_answer(kind, b"", is_end=True)


class MarksNoEnd(ReferencePicker):
    def body_answers(self, kind: str, body: bytes, *, is_end: bool) -> Iterator[ProcessingResponse]:
        yield from super().body_answers(kind, body, is_end=False)


class ChangesTheQuestion(ReferencePicker):
    def body_answers(self, kind: str, body: bytes, *, is_end: bool) -> Iterator[ProcessingResponse]:
        yield from super().body_answers(kind, body.replace(b"river", b"RIVER"), is_end=is_end)


class DropsBrokenCharacters(ReferencePicker):
    def take_request(self, turn: Turn, request: ProcessingRequest) -> bool:
        if request.WhichOneof("request") == "request_body":
            request.request_body.body = request.request_body.body.decode(errors="ignore").encode()
        return super().take_request(turn, request)


class ReturnsOneChunk(ReferencePicker):
    def body_answers(self, kind: str, body: bytes, *, is_end: bool) -> Iterator[ProcessingResponse]:
        yield body_answer(kind, body, is_end=is_end)


class WaitsForABody(ReferencePicker):
    def take_request(self, turn: Turn, request: ProcessingRequest) -> bool:
        return request.WhichOneof("request") != "request_headers" and super().take_request(turn, request)


class RoutesAnything(ReferencePicker):
    def check_body(self, turn: Turn) -> None:
        pass


class RefusesInWords(ReferencePicker):
    def refusal(self, refused: RefusedError) -> ProcessingResponse:
        answer = super().refusal(refused)
        answer.immediate_response.body = str(refused).encode()
        return answer


class RefusesAsItsOwnFault(ReferencePicker):
    def refusal(self, refused: RefusedError) -> ProcessingResponse:
        answer = super().refusal(refused)
        answer.immediate_response.status.code = 500
        return answer


class IgnoresTrailers(ReferencePicker):
    def take_request(self, turn: Turn, request: ProcessingRequest) -> bool:
        return request.WhichOneof("request") != "request_trailers" and super().take_request(turn, request)


class EndsBeforeTrailers(ReferencePicker):
    def body_answers(self, kind: str, body: bytes, *, is_end: bool) -> Iterator[ProcessingResponse]:
        yield from super().body_answers(kind, body, is_end=True)


class ReadsRawValuesOnly(ReferencePicker):
    def read_headers(self, request: ProcessingRequest) -> Turn:
        turn = super().read_headers(request)
        raw = {each.key.lower(): each.raw_value for each in request.request_headers.headers.headers}
        turn.headers["authorization"] = raw.get("authorization", b"").decode()
        return turn

    def check_body(self, turn: Turn) -> None:
        super().check_body(turn)
        if not turn.headers["authorization"]:
            raise RefusedError(401, "no key")


class ReadsLowerCaseOnly(ReferencePicker):
    def check_body(self, turn: Turn) -> None:
        super().check_body(turn)
        if not turn.headers.get("its-case"):
            raise RefusedError(401, "no key")

    def read_headers(self, request: ProcessingRequest) -> Turn:
        turn = super().read_headers(request)
        if any(each.key == "authorization" for each in request.request_headers.headers.headers):
            turn.headers["its-case"] = "lower"
        return turn


class SetsCapitals(ReferencePicker):
    def headers_answer(self, destination: str) -> ProcessingResponse:
        answer = super().headers_answer(destination)
        set_header(answer.request_headers.response.header_mutation, "X-Pool", "one")
        return answer


class IgnoresSubsets(ReferencePicker):
    def read_subset(self, request: ProcessingRequest) -> tuple[str, ...] | None:
        return None


class ReadsListsOnly(ReferencePicker):
    def read_subset(self, request: ProcessingRequest) -> tuple[str, ...] | None:
        metadata = request.metadata_context.filter_metadata
        if SUBSET_NAMESPACE not in metadata:
            return None
        value = metadata[SUBSET_NAMESPACE].fields[SUBSET]
        return super().read_subset(request) if value.HasField("list_value") else None


class FallsBackToAll(ReferencePicker):
    def eligible(self, turn: Turn) -> list[str]:
        return super().eligible(turn) or list(self.settings.endpoints)


class TakesNoneForAll(ReferencePicker):
    def read_subset(self, request: ProcessingRequest) -> tuple[str, ...] | None:
        return super().read_subset(request) or None


class FindsNoModel(ReferencePicker):
    def refusal(self, refused: RefusedError) -> ProcessingResponse:
        return super().refusal(RefusedError(404, str(refused)))


class ShedsAsUnavailable(ReferencePicker):
    def admit(self) -> None:
        try:
            super().admit()
        except RefusedError as refused:
            raise RefusedError(503, str(refused)) from None


class StaysFull(ReferencePicker):
    """What was refused once is refused from then on, also when all others have left."""

    was_full = False

    def admit(self) -> None:
        try:
            super().admit()
        except RefusedError:
            self.was_full = True
        if self.was_full:
            raise RefusedError(429, "full")


class MixesBodies(ReferencePicker):
    last = b""

    def check_body(self, turn: Turn) -> None:
        super().check_body(turn)
        self.last, turn.body = turn.body, self.last or turn.body


class DropsTheFirstChunk(ReferencePicker):
    def answer_response(self, request: ProcessingRequest) -> Iterator[ProcessingResponse]:
        for answer in super().answer_response(request):
            streamed = answer.response_body.response.body_mutation.streamed_response
            if answer.HasField("response_body") and b'"0"' in streamed.body:
                streamed.body = b""
            yield answer


class CollectsResponses(ReferencePicker):
    def __init__(self, settings: ReferenceSettings) -> None:
        super().__init__(settings)
        self._collected = b""

    def answer_response(self, request: ProcessingRequest) -> Iterator[ProcessingResponse]:
        if request.HasField("response_body"):
            self._collected += request.response_body.body
            if not request.response_body.end_of_stream:
                return
            request.response_body.body, self._collected = self._collected, b""
        yield from super().answer_response(request)


class IgnoresResponseTrailers(ReferencePicker):
    def answer_response(self, request: ProcessingRequest) -> Iterator[ProcessingResponse]:
        if not request.HasField("response_trailers"):
            yield from super().answer_response(request)


class WaitsForAResponseBody(ReferencePicker):
    def answer_response(self, request: ProcessingRequest) -> Iterator[ProcessingResponse]:
        if not request.response_headers.end_of_stream:
            yield from super().answer_response(request)


class HidesErrors(ReferencePicker):
    def answer_response(self, request: ProcessingRequest) -> Iterator[ProcessingResponse]:
        if b"the engine is gone" in request.response_body.body:
            request.response_body.body = b'{"error":"something went wrong"}'
        yield from super().answer_response(request)


class ClosesAfterTheRequest(ReferencePicker):
    def closes_after_request(self) -> bool:
        return True


class ClosesAfterResponseHeaders(ReferencePicker):
    async def process(self, requests: AsyncIterator[ProcessingRequest], context: Any) -> Any:
        async for answer in super().process(requests, context):
            yield answer
            if answer.HasField("response_headers"):
                return


class StaysWhenAllIsSaid(ReferencePicker):
    async def process(self, requests: AsyncIterator[ProcessingRequest], context: Any) -> Any:
        async for answer in super().process(requests, context):
            yield answer
        await asyncio.Event().wait()


class TellsItsOwnChoice(ReferencePicker):
    def answer_response(self, request: ProcessingRequest) -> Iterator[ProcessingResponse]:
        for answer in super().answer_response(request):
            if answer.HasField("response_headers"):
                answer.response_headers.response.header_mutation.ClearField("set_headers")
                mutation = answer.response_headers.response.header_mutation
                set_header(mutation, TEST_SERVED, self.settings.endpoints[0])
            yield answer


class ObeysTestsAlways(ReferencePicker):
    def eligible(self, turn: Turn) -> list[str]:
        wanted = turn.headers.get(TEST_SELECTION)
        return [each for each in super().eligible(turn) if wanted is None or each in wanted]


class NeverObeysTests(ReferencePicker):
    def eligible(self, turn: Turn) -> list[str]:
        return list(self.settings.endpoints)


class ChoosesByHostOnly(ReferencePicker):
    def eligible(self, turn: Turn) -> list[str]:
        if TEST_SELECTION in turn.headers:
            hosts = [
                each.strip().rpartition(":")[0] or each.strip() for each in turn.headers[TEST_SELECTION].split(",")
            ]
            return [each for each in self.settings.endpoints if each.rpartition(":")[0] in hosts]
        return super().eligible(turn)


class CountsAtTheHeaders(ReferencePicker):
    """A place is taken by headers and given back at the end of a whole request only."""

    def read_headers(self, request: ProcessingRequest) -> Turn:
        self.running += 1
        return super().read_headers(request)

    def admit(self) -> None:
        self.running -= 1
        super().admit()


class KeepsPlaces(ReferencePicker):
    """A place is given back at the end of a response only."""

    async def process(self, requests: AsyncIterator[ProcessingRequest], context: Any) -> Any:
        # Not by the number that run: where the cancellation arrives decides whether it still counts this one.
        has_place = is_whole = False
        try:
            async for answer in super().process(requests, context):
                has_place |= answer.HasField("request_headers")
                yield answer
                is_whole = answer.response_body.response.body_mutation.streamed_response.end_of_stream
        finally:
            if has_place and not is_whole:
                self.settings = ReferenceSettings(endpoints=(), max_running=self.settings.max_running)


class AnswersAnything(ReferencePicker):
    async def process(self, requests: AsyncIterator[ProcessingRequest], context: Any) -> Any:
        async for request in requests:
            if request.HasField("request_headers"):
                yield self.headers_answer(self.settings.endpoints[0])
            else:
                yield body_answer("request_body", request.request_body.body, is_end=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saboteur:
    """A picker that breaks one promise, and the check that detects it."""

    check: str
    make: Callable[[ReferenceSettings], ReferencePicker]
    words: str
    """A pattern of the beginning of the finding."""
    gateway: GatewayProfile = LLM_D
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    healthy: tuple[str, ...] = HEALTH_SERVICES

    @property
    def name(self) -> str:
        return f"{self.check}: {getattr(self.make, '__name__', self.make)}"


RETURNED = r"\d+ bytes came back that are not the \d+ of the (body|response)"
HOOKS: dict[str, Any] = {"settings": {"hooks": True}, "options": {"hooks": True}}
KEY: dict[str, Any] = {"options": {"headers": (("authorization", "Bearer k"),)}}

SABOTEURS = (
    Saboteur(check="destination", make=DiffersInMetadata, words="header and metadata differ"),
    Saboteur(check="destination", make=HasNoMetadata, words="the destination is not in the metadata envoy.lb"),
    Saboteur(check="destination", make=NamesNoPort, words="the destination is no ip:port: '127.0.0.1'"),
    Saboteur(check="destination", make=NamesAHost, words="the destination is no ip:port: 'localhost:8000'"),
    Saboteur(
        check="one-destination",
        make=ReferencePicker,
        gateway=AGENTGATEWAY,
        settings={"fallbacks": 1},
        words="it named 2 endpoints",
    ),
    Saboteur(check="caller-destination", make=ObeysItsCaller, words="it sent the request where the caller wanted it"),
    Saboteur(check="deferred-answer", make=AnswersEarly, words="it answered the headers without having seen the body"),
    Saboteur(check="body-once", make=ReturnsTheBodyTwice, words=RETURNED),
    Saboteur(check="body-once", make=SaysTheEndTwice, words="something came after the end of the body"),
    Saboteur(check="body-once", make=MarksNoEnd, words="nothing came within"),
    Saboteur(check="body-once", make=ChangesTheQuestion, words=RETURNED),
    Saboteur(check="body-in-pieces", make=DropsBrokenCharacters, words=RETURNED),
    Saboteur(check="large-body", make=ReturnsOneChunk, words="a chunk of the request has 12000"),
    Saboteur(check="no-body", make=WaitsForABody, words="nothing came within"),
    Saboteur(check="empty-body", make=RoutesAnything, words="it did not refuse the request"),
    Saboteur(check="malformed-json", make=RoutesAnything, words="it did not refuse the request"),
    Saboteur(check="malformed-json", make=RefusesInWords, words="the refusal is no JSON with an error"),
    Saboteur(check="malformed-json", make=RefusesAsItsOwnFault, words="it answered 500"),
    Saboteur(check="request-trailers", make=IgnoresTrailers, words="nothing came within"),
    Saboteur(check="request-trailers", make=EndsBeforeTrailers, words="it ended the body of the request"),
    Saboteur(check="header-forms", make=ReadsRawValuesOnly, words="headers in value: it refused the request", **KEY),
    Saboteur(check="header-forms", make=ReadsLowerCaseOnly, words="headers in raw_value: it refused", **KEY),
    Saboteur(check="header-forms", make=SetsCapitals, words="it set headers with capitals"),
    Saboteur(check="subset-list", make=IgnoresSubsets, words="it named"),
    Saboteur(check="subset-text", make=ReadsListsOnly, words="it did not refuse the request"),
    Saboteur(check="subset-foreign", make=FallsBackToAll, words="it did not refuse the request"),
    Saboteur(check="subset-empty", make=TakesNoneForAll, words="it did not refuse the request"),
    Saboteur(check="no-endpoint", make=FindsNoModel, words="it answered 404"),
    Saboteur(check="shed", make=ShedsAsUnavailable, words="it answered 503"),
    Saboteur(check="shed", make=StaysFull, words="it still answered 429"),
    Saboteur(check="many-at-once", make=MixesBodies, words=RETURNED),
    Saboteur(check="response-echo", make=DropsTheFirstChunk, words=RETURNED),
    Saboteur(check="response-stream", make=CollectsResponses, words="nothing came within"),
    Saboteur(check="response-trailers", make=IgnoresResponseTrailers, words="nothing came within"),
    Saboteur(check="response-headers", make=WaitsForAResponseBody, words="nothing came within"),
    Saboteur(check="response-error", make=HidesErrors, words=RETURNED),
    Saboteur(check="no-early-close", make=ClosesAfterTheRequest, words="after the request came: the end of the stream"),
    Saboteur(
        check="no-early-close",
        make=ClosesAfterResponseHeaders,
        words="after the response's headers came: the end of the stream",
    ),
    Saboteur(check="clean-close", make=StaysWhenAllIsSaid, words="nothing came within"),
    Saboteur(check="served-endpoint", make=TellsItsOwnChoice, words="x-conformance-test-served-endpoint is", **HOOKS),
    Saboteur(
        check="served-endpoint",
        make=ReferencePicker,
        settings={"hooks": True},
        words="it sets x-conformance-test-served-endpoint although its hooks are off",
    ),
    Saboteur(check="test-selection", make=ObeysTestsAlways, words="a caller can steer it"),
    Saboteur(check="test-selection", make=NeverObeysTests, words="it did not refuse the request", **HOOKS),
    Saboteur(check="test-selection", make=ChoosesByHostOnly, words="127.0.0.1:", **HOOKS),
    Saboteur(check="abort-in-request", make=CountsAtTheHeaders, words="it refused the request: 429"),
    Saboteur(check="abort-in-response", make=KeepsPlaces, words="it refused the request: 503"),
    Saboteur(check="broken-order", make=AnswersAnything, words="a body without headers was answered by request_body"),
    Saboteur(
        check="health", make=ReferencePicker, healthy=HEALTH_SERVICES[1:], words="health of 'liveness': NOT_FOUND"
    ),
    Saboteur(
        check="health", make=ReferencePicker, healthy=HEALTH_SERVICES[:3], words="health of 'inference-extension'"
    ),
)
"""The certificate of the check `tls` is broken by a test of its own."""
