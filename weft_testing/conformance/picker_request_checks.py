"""Checks of what an endpoint picker does with requests."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from weft.kernel.lane_names import DESTINATION
from weft_testing.conformance.findings import BrokenPromiseError, NotCheckedError, require
from weft_testing.conformance.picker_messages import (
    OVERWRITES,
    HeaderForm,
    Headers,
    HttpRequest,
    json_of,
    request_messages,
)
from weft_testing.conformance.picker_under_test import Answer, Exchange, PickerUnderTest, read_answer

JSON_TYPE: Headers = (("content-type", "application/json"),)
LARGE_BYTES = 1_200_000
"""More than the 1 MiB that Envoy buffers by default, which full duplex does not."""
REWRITTEN = ("model", "stream_options")
"""Fields of a request that a picker may change: the model's name behind an alias, and whether usage is counted."""
NOWHERE = "192.0.2.1:9"
"""An address for documentation: no endpoint has it."""
MANY = 16
ROUNDS = 3
PIECE_BYTES = 7
RETRY_SECONDS = 0.1
REFUSAL_SECONDS = 5.0
"""Time in which a picker that refuses a request of a crowd has done so."""


def chat_request(picker: PickerUnderTest, text: str = "Hello", **changes: Any) -> HttpRequest:
    """A question to the model, whole in one chunk; `changes` are those of HttpRequest."""
    question = {"model": picker.options.model, "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
    body = json.dumps(question, ensure_ascii=False)
    headers = (*JSON_TYPE, *picker.options.headers)
    return replace(HttpRequest(headers=headers, chunks=(body.encode(),)), **changes)


def require_same_body(request: HttpRequest, answer: Answer) -> str:
    """Requires the body of a request in its answer, byte for byte, or with a name and usage that were put in."""
    _ = answer.endpoints
    if answer.body == request.body:
        return f"{len(answer.body)} bytes in {len(answer.chunks)} chunks"
    sent, back = json_of(request.body), json_of(answer.body)
    if isinstance(sent, dict) and isinstance(back, dict) and _kept(sent) == _kept(back):
        changed = [name for name in REWRITTEN if sent.get(name) != back.get(name)]
        return (
            f"{len(answer.body)} bytes in {len(answer.chunks)} chunks, {' and '.join(changed) or 'spacing'} rewritten"
        )
    raise BrokenPromiseError(f"{len(answer.body)} bytes came back that are not the {len(request.body)} of the body")


def _kept(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in REWRITTEN}


async def destination(picker: PickerUnderTest) -> str:
    """The endpoint is in the header and in the metadata, with one value."""
    answer = await picker.ask(chat_request(picker))
    endpoints = answer.endpoints
    require(answer.metadata != "", "the destination is not in the metadata envoy.lb")
    header = answer.headers[DESTINATION]
    require(answer.metadata == header, f"header and metadata differ: {header} and {answer.metadata}")
    require(len(set(endpoints)) == len(endpoints), f"an endpoint is named twice: {header}")
    return header


async def one_destination(picker: PickerUnderTest) -> str:
    """A gateway that takes few endpoints gets no more."""
    most = picker.profile.max_destinations
    if most is None:
        raise NotCheckedError(f"{picker.profile.name} takes any number of endpoints")
    answer = await picker.ask(chat_request(picker))
    count = len(answer.endpoints)
    require(count <= most, f"it named {count} endpoints: {answer.headers[DESTINATION]}")
    return answer.headers[DESTINATION]


async def overwritten_destination(picker: PickerUnderTest) -> str:
    """A destination that the caller wrote is replaced, never used and never kept beside it."""
    request = chat_request(picker)
    answer = await picker.ask(replace(request, headers=(*request.headers, (DESTINATION, NOWHERE))))
    require(NOWHERE not in answer.endpoints, "it sent the request where the caller wanted it")
    removed = {name.lower() for name in answer.mutation.remove_headers}
    actions = {option.append_action for option in answer.mutation.set_headers if option.header.key == DESTINATION}
    if DESTINATION not in removed and not actions <= OVERWRITES:
        raise NotCheckedError("its header has no append_action, by which Envoy replaces the caller's; others may not")
    return f"sent to {answer.endpoints[0]}"


async def deferred_answer(picker: PickerUnderTest) -> str:
    """Nothing is answered before the body is there, since the model is in it."""
    request = chat_request(picker)
    messages = request_messages(request, picker.profile)
    async with picker.exchange() as exchange:
        await exchange.send(messages[0])
        await exchange.require_silence("it answered the headers without having seen the body")
        await exchange.send(*messages[1:])
        answer = await read_answer(exchange, request)
        _ = answer.endpoints
    return "headers, then the body"


async def body_once(picker: PickerUnderTest) -> str:
    """The body is returned exactly once, in order, with its end marked."""
    request = chat_request(picker, "A river, a stone, ünïcödé. " * 200)
    async with picker.exchange() as exchange:
        await exchange.send(*request_messages(request, picker.profile))
        answer = await read_answer(exchange, request)
        told = require_same_body(request, answer)
        await exchange.require_silence("something came after the end of the body")
    return told


async def body_in_pieces(picker: PickerUnderTest) -> str:
    """A body that arrives in pieces, within characters too, is put together."""
    whole = chat_request(picker, "ünïcödé 河 🪨 " * 40)
    body = whole.body
    pieces = tuple(body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))
    request = replace(whole, chunks=(*pieces, b""))
    told = require_same_body(request, await picker.ask(request))
    return f"{len(pieces) + 1} pieces; {told}"


async def large_body(picker: PickerUnderTest) -> str:
    """A body larger than a gateway buffers is returned in chunks below 64 KiB."""
    small = chat_request(picker)
    # Spaces between the fields make the body large, and not the prompt, which a model may refuse.
    request = replace(small, chunks=(small.body[:-1] + b" " * LARGE_BYTES + b"}",))
    answer = await picker.ask(request)
    if answer.refusal is not None and answer.refusal.status in {400, 413}:
        raise NotCheckedError(f"it refuses a body of {len(request.body)} bytes: {answer.refusal.words}")
    return require_same_body(request, answer)


async def no_body(picker: PickerUnderTest) -> str:
    """A request without a body is answered, by the picker itself or by an endpoint."""
    headers = picker.options.headers
    answer = await picker.ask(HttpRequest(method="GET", path="/v1/models", headers=headers))
    if answer.refusal is None:
        return f"GET /v1/models goes to {answer.endpoints[0]}"
    require(answer.refusal.status < 500, f"GET /v1/models: {answer.refusal.words}")
    return f"GET /v1/models: {answer.refusal.status} by the picker"


async def empty_body(picker: PickerUnderTest) -> str:
    """A body of no bytes is answered as any other that is no request."""
    answer = await picker.ask(replace(chat_request(picker), chunks=(b"",)))
    return _refused_by_caller(answer)


async def malformed_json(picker: PickerUnderTest) -> str:
    """A body that is no JSON is refused with 400 and a reason in JSON."""
    answer = await picker.ask(replace(chat_request(picker), chunks=(b'{"model": "m", "messages": [',)))
    return _refused_by_caller(answer)


def _refused_by_caller(answer: Answer) -> str:
    refusal = answer.refused
    require(refusal.status == 400, f"it answered {refusal.words}")
    document = json_of(refusal.body)
    require(
        isinstance(document, dict) and "error" in document, f"the refusal is no JSON with an error: {refusal.words}"
    )
    kind = refusal.headers.get("content-type", "")
    require(kind.startswith("application/json"), f"the refusal has content type {kind!r}")
    return refusal.words


async def request_trailers(picker: PickerUnderTest) -> str:
    """A request that ends with trailers gets its body back, then an answer to the trailers."""
    request = replace(chat_request(picker), trailers=(("x-checksum", "none"),))
    return require_same_body(request, await picker.ask(request))


async def header_forms(picker: PickerUnderTest) -> str:
    """Headers are read in both fields of a value and in any case, and written in lower case."""
    request = chat_request(picker)
    shouted = tuple((name.title(), value) for name, value in request.headers)
    for form in HeaderForm:
        answer = await picker.ask(replace(request, headers=shouted, header_form=form))
        try:
            _ = answer.endpoints
        except BrokenPromiseError as broken:
            raise BrokenPromiseError(f"headers in {form.value}: {broken}") from None
        keys = [option.header.key for option in answer.mutation.set_headers]
        require(all(key == key.lower() for key in keys), f"it set headers with capitals: {keys}")
    return "value, raw_value and both"


async def subset_list(picker: PickerUnderTest) -> str:
    """Of a list of endpoints one is chosen."""
    return await _chosen_of(picker, lambda endpoint: [NOWHERE, endpoint])


async def subset_text(picker: PickerUnderTest) -> str:
    """Of endpoints in one text, with commas between them, one is chosen."""
    _unavailable(await picker.ask(chat_request(picker, subset=NOWHERE)))
    return await _chosen_of(picker, lambda endpoint: f"{NOWHERE},{endpoint}")


async def _chosen_of(picker: PickerUnderTest, subset_of: Any) -> str:
    """Asks for each endpoint that it named so far; a picker that ignores subsets is found where it has several."""
    seen: dict[str, None] = {}
    for _ in range(ROUNDS):
        seen.update(dict.fromkeys((await picker.ask(chat_request(picker))).endpoints))
    for endpoint in seen:
        for _ in range(ROUNDS):  # one that ignores the subset may name the right endpoint once
            answer = await picker.ask(chat_request(picker, subset=subset_of(endpoint)))
            named = ",".join(answer.endpoints)
            require(named == endpoint, f"it named {named} where {endpoint} alone was allowed")
    return f"{len(seen)} endpoints asked for, one by one"


async def subset_without_endpoint(picker: PickerUnderTest) -> str:
    """Where none of the allowed endpoints is its own, it answers 503."""
    return _unavailable(await picker.ask(chat_request(picker, subset=[NOWHERE])))


async def subset_empty(picker: PickerUnderTest) -> str:
    """Where no endpoint is allowed, it answers 503."""
    return _unavailable(await picker.ask(chat_request(picker, subset=[])))


async def no_ready_endpoint(picker: PickerUnderTest) -> str:
    """Without a ready endpoint it answers 503."""
    model = picker.options.unready_model
    if model is None:
        raise NotCheckedError("no model without a ready endpoint was named (--unready-model)")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]}).encode()
    return _unavailable(await picker.ask(replace(chat_request(picker), chunks=(body,))))


def _unavailable(answer: Answer) -> str:
    require(answer.refused.status == 503, f"it answered {answer.refused.words}")
    return answer.refused.words


async def shed(picker: PickerUnderTest) -> str:
    """What is more than its endpoints can take is refused with 429, or with 503 where nothing is ready."""
    most = picker.options.max_filling
    if not most:
        raise NotCheckedError("no requests were to be held (--max-filling 0)")
    async with AsyncExitStack() as stack:
        answers: list[asyncio.Task[Answer]] = []
        for _ in range(most):
            exchange = await stack.enter_async_context(picker.exchange())
            answers.append(asyncio.create_task(_held(picker, exchange)))
        refused = await _first_refused(answers)
    if refused is None:
        raise NotCheckedError(f"it refused none of {most} requests at once")
    require(refused.refused.status in {429, picker.profile.shed_status}, f"it answered {refused.refused.words}")
    await _require_served_again(picker)
    return refused.refused.words


async def _require_served_again(picker: PickerUnderTest) -> None:
    """Waits until a request is routed, after those that filled the picker have left."""
    deadline = time.monotonic() + REFUSAL_SECONDS
    while (answer := await picker.ask(chat_request(picker))).refusal is not None:
        words = f"it still answered {answer.refusal.words} {REFUSAL_SECONDS:g} s after all others had left"
        require(time.monotonic() < deadline, words)
        await asyncio.sleep(RETRY_SECONDS)


async def _held(picker: PickerUnderTest, exchange: Exchange) -> Answer:
    request = chat_request(picker)
    await exchange.send(*request_messages(request, picker.profile))
    return await read_answer(exchange, request)


async def _first_refused(answers: Sequence[asyncio.Task[Answer]]) -> Answer | None:
    """Returns the first refusal of many, and ends the others."""
    try:
        for answering in asyncio.as_completed(answers, timeout=REFUSAL_SECONDS):
            answer = await answering
            if answer.refusal is not None:
                return answer
    except TimeoutError:
        pass
    finally:
        for each in answers:
            each.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    return None


async def many_at_once(picker: PickerUnderTest) -> str:
    """Requests at the same time do not mix: each gets its own body back."""
    requests = [chat_request(picker, f"question {number} " * (number * 50 + 1)) for number in range(MANY)]
    answers = await asyncio.gather(*map(picker.ask, requests))
    served = 0
    for request, answer in zip(requests, answers, strict=True):
        if answer.refusal is None:
            require_same_body(request, answer)
            served += 1
        else:
            require(answer.refusal.status in {429, 503}, f"it refused one of many: {answer.refusal.words}")
    require(served > 0, "it refused all of them")
    return f"{served} of {MANY} were routed"
