"""Checks of what an endpoint picker does with responses, with the ends of streams, and beside its requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from cryptography import x509
from grpc_health.v1.health_pb2 import HealthCheckResponse

from weft.kernel.lane_names import EXTERNAL_PROCESSOR
from weft_testing.conformance.findings import BrokenPromiseError, NotCheckedError, require
from weft_testing.conformance.picker_messages import HttpResponse, request_messages, response_messages
from weft_testing.conformance.picker_request_checks import NOWHERE, ROUNDS, chat_request
from weft_testing.conformance.picker_under_test import (
    Answer,
    Exchange,
    PickerUnderTest,
    StreamFailedError,
    echoed,
    read_answer,
    read_response_headers,
)

TEST_SELECTION = "test-epp-endpoint-selection"
"""Header of a request in the conformance tests of gateways: addresses, or addresses with ports, to choose from."""
TEST_SERVED = "x-conformance-test-served-endpoint"
"""Header of a response in the conformance tests of gateways: the endpoint that the gateway named as serving."""
TOKENS = 40
LEFT = 24
"""Requests whose callers leave; a picker that kept the place of each would soon have none."""
LEAVES_AFTER_SECONDS = 0.05
LIMIT_SECONDS = 5.0
HEALTH_SERVICES = ("liveness", "readiness", EXTERNAL_PROCESSOR, "inference-extension")


@asynccontextmanager
async def _routed(picker: PickerUnderTest) -> AsyncIterator[tuple[Exchange, Answer]]:
    """Yields a stream after the answer to its request."""
    if not picker.profile.sees_responses:
        raise NotCheckedError(f"no response goes through the picker of {picker.profile.name}")
    request = chat_request(picker)
    async with picker.exchange() as exchange:
        await exchange.send(*request_messages(request, picker.profile))
        answer = await read_answer(exchange, request)
        _ = answer.endpoints
        yield exchange, answer


async def response_echo(picker: PickerUnderTest) -> str:
    """Every chunk of a response comes back, none changed, the end marked."""
    chunks = tuple(f'data: {{"choices":[{{"delta":{{"content":"{n}"}}}}]}}\n\n'.encode() for n in range(TOKENS))
    async with _routed(picker) as (exchange, answer):
        response = HttpResponse(chunks=chunks, served=picker.served_of(answer))
        await echoed(exchange, response)
        await exchange.close()
    large = HttpResponse(headers=(("content-type", "application/json"),), chunks=(b"x" * 300_000,))
    async with _routed(picker) as (exchange, _):
        await echoed(exchange, large)
        await exchange.close()
    return f"{TOKENS} chunks, and 300000 bytes"


async def response_stream(picker: PickerUnderTest) -> str:
    """A chunk comes back before the next one is there: nothing is collected."""
    chunks = tuple(f"data: {number}\n\n".encode() for number in range(TOKENS))
    async with _routed(picker) as (exchange, answer):
        served = HttpResponse(chunks=chunks, served=picker.served_of(answer))
        first, *bodies = response_messages(served, picker.profile)
        await exchange.send(first)
        await read_response_headers(exchange)
        for body in bodies:
            await exchange.send(body)
            if not body.response_body.body:
                continue
            back = (await exchange.next("the chunk that was sent")).response_body.response.body_mutation
            require(
                back.streamed_response.body == body.response_body.body,
                "a chunk came back changed, or with another one",
            )
    return f"{TOKENS} chunks, one by one"


async def response_trailers(picker: PickerUnderTest) -> str:
    """A response that ends with trailers comes back, and they are answered."""
    async with _routed(picker) as (exchange, answer):
        trailers = (("x-usage", "17"),)
        await echoed(exchange, HttpResponse(trailers=trailers, served=picker.served_of(answer)))
        await exchange.close()
    return "body, then trailers"


async def response_without_body(picker: PickerUnderTest) -> str:
    """A response of headers alone is answered."""
    async with _routed(picker) as (exchange, _):
        await echoed(exchange, HttpResponse(status=204, headers=(), chunks=()))
        await exchange.close()
    return "204"


async def response_error(picker: PickerUnderTest) -> str:
    """An error of an endpoint goes to the caller as it is."""
    body = b'{"error":{"message":"the engine is gone"}}'
    async with _routed(picker) as (exchange, answer):
        failed = HttpResponse(status=503, headers=(("content-type", "application/json"),), chunks=(body,))
        await echoed(exchange, replace(failed, served=picker.served_of(answer)))
        await exchange.close()
    return "503 of the endpoint"


async def no_early_close(picker: PickerUnderTest) -> str:
    """The stream stays open until the gateway ends it: a gateway loses tokens otherwise."""
    async with _routed(picker) as (exchange, answer):
        await exchange.require_silence("after the request came")
        response = HttpResponse(served=picker.served_of(answer))
        messages = response_messages(response, picker.profile)
        await exchange.send(messages[0])
        await read_response_headers(exchange)
        await exchange.require_silence("after the response's headers came")
        await exchange.send(messages[1])
        await exchange.next("a chunk of the response")
        await exchange.require_silence("after a chunk of the response came")
    return "open until the gateway closed it"


async def clean_close(picker: PickerUnderTest) -> str:
    """Once the gateway has ended the stream, the picker ends it too, without an error."""
    answer = await picker.ask(chat_request(picker))
    return f"sent to {answer.endpoints[0]}, ended without an error"


async def served_endpoint(picker: PickerUnderTest) -> str:
    """The picker reads which endpoint served; with the hooks of conformance tests on, it adds a header for it."""
    async with _routed(picker) as (exchange, answer):
        served = answer.endpoints[0]
        headers = await echoed(exchange, HttpResponse(served=served))
        await exchange.close()
    async with _routed(picker) as (exchange, _):
        silent = await echoed(exchange, HttpResponse(served=None))
        await exchange.close()
    if not picker.options.hooks:
        require(TEST_SERVED not in headers, f"it sets {TEST_SERVED} although its hooks are off")
        return "with and without it, and not told: the hooks are off (--hooks)"
    require(headers.get(TEST_SERVED) == served, f"{TEST_SERVED} is {headers.get(TEST_SERVED)}, not {served}")
    told = silent.get(TEST_SERVED, "fail")
    require(told.startswith("fail"), f"{TEST_SERVED} is {told} although the gateway named no endpoint")
    return f"{served}, and {told!r} where the gateway names none"


async def chosen_endpoint(picker: PickerUnderTest) -> str:
    """The header by which conformance tests choose endpoints counts with the hooks on, and never otherwise."""
    endpoint = (await picker.ask(chat_request(picker))).endpoints[0]
    plain = chat_request(picker)

    async def choosing(value: str) -> Answer:
        return await picker.ask(replace(plain, headers=(*plain.headers, (TEST_SELECTION, value))))

    elsewhere = await choosing(NOWHERE)
    if not picker.options.hooks:
        require(elsewhere.refusal is None, f"a caller can steer it by {TEST_SELECTION}, its hooks are off")
        return "ignored: the hooks are off (--hooks)"
    require(elsewhere.refused.status == 503, f"it answered {elsewhere.refused.words}")
    host = endpoint.rpartition(":")[0]
    by_host = (await choosing(f"{NOWHERE}, {host}")).endpoints
    require(all(each.rpartition(":")[0] == host for each in by_host), f"{host} was chosen, it named {by_host}")
    for _ in range(ROUNDS):
        by_port = ",".join((await choosing(endpoint)).endpoints)
        require(by_port == endpoint, f"{endpoint} was chosen, it named {by_port}")
    return f"{host}, {endpoint}, and 503 for another"


async def abort_in_request(picker: PickerUnderTest) -> str:
    """Callers that leave before their request is whole cost nothing."""
    messages = request_messages(chat_request(picker), picker.profile)
    for number in range(LEFT):
        async with picker.exchange() as exchange:
            await exchange.send(messages[0])
            if number % 4:
                await asyncio.sleep(LEAVES_AFTER_SECONDS)  # time in which the headers arrive; nothing answers them
    return await _serves_on(picker)


async def abort_in_response(picker: PickerUnderTest) -> str:
    """Callers that leave in the middle of an answer free their places."""
    request = chat_request(picker)
    for _ in range(LEFT):
        async with picker.exchange() as exchange:
            await exchange.send(*request_messages(request, picker.profile))
            answer = await read_answer(exchange, request)
            _ = answer.endpoints
            if picker.profile.sees_responses:
                await exchange.send(*response_messages(HttpResponse(), picker.profile)[:2])
                await read_response_headers(exchange)
    return await _serves_on(picker)


async def _serves_on(picker: PickerUnderTest) -> str:
    endpoint = (await picker.ask(chat_request(picker))).endpoints[0]
    return f"after {LEFT} callers had left, it names {endpoint}"


async def broken_order(picker: PickerUnderTest) -> str:
    """A stream whose messages make no sense ends, and no other suffers."""
    body = request_messages(chat_request(picker), picker.profile)[1]
    kind = None
    async with picker.exchange() as exchange:
        await exchange.send(body)
        with contextlib.suppress(StreamFailedError):
            message = await exchange.next_or_end("the end of the stream", LIMIT_SECONDS)
            kind = None if message is None else message.WhichOneof("response")
    require(kind in {None, "immediate_response"}, f"a body without headers was answered by {kind}")
    return f"the next request goes to {(await picker.ask(chat_request(picker))).endpoints[0]}"


async def health(picker: PickerUnderTest) -> str:
    """The health services of the protocol, and the one that conformance manifests probe, say SERVING."""
    for service in HEALTH_SERVICES:
        status = await picker.health(service)
        require(status == HealthCheckResponse.SERVING, f"health of {service}: status {status}")
    with contextlib.suppress(BrokenPromiseError):
        status = await picker.health("no-such-service")
        if status == HealthCheckResponse.SERVING:
            raise NotCheckedError("its health service says SERVING to every name")
    return ", ".join(HEALTH_SERVICES)


async def secure_port(picker: PickerUnderTest) -> str:
    """TLS with a certificate that gateways can use without verifying it."""
    if picker.certificate is None:
        raise NotCheckedError("it was reached without TLS (https://HOST:PORT is for TLS)")
    certificate = x509.load_der_x509_certificate(picker.certificate)
    made = "self-signed" if certificate.issuer == certificate.subject else "issued by another"
    _ = (await picker.ask(chat_request(picker))).endpoints
    return f"{made}, until {certificate.not_valid_after_utc:%Y-%m-%d}"
