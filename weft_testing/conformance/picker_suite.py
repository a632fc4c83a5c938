"""The suite of endpoint pickers.

It checks the endpoint-picker protocol of the Gateway API Inference Extension (proposal 004), as gateways use it. The
suite plays the gateway: it opens a stream for each request, as `picker_gateways` says of each gateway, and makes up the
responses of endpoints itself. No endpoint is asked.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from weft_testing.conformance import picker_request_checks as requests
from weft_testing.conformance import picker_response_checks as responses
from weft_testing.conformance.findings import BrokenPromiseError, Finding, NotCheckedError, Verdict
from weft_testing.conformance.picker_under_test import PickerUnderTest

CHECK_SECONDS = 120.0
"""Time limit of one check, for pickers that never answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerCheck:
    """One promise of a picker."""

    name: str
    promise: str
    """The promise as a sentence about the picker."""
    run: Callable[[PickerUnderTest], Awaitable[str]]
    """Runs the check and returns its observation. Raises BrokenPromiseError or NotCheckedError."""


REQUEST_CHECKS = (
    PickerCheck(
        name="destination",
        promise="names ip:port, or several, with one value in header and metadata",
        run=requests.destination,
    ),
    PickerCheck(
        name="one-destination", promise="names no more endpoints than the gateway takes", run=requests.one_destination
    ),
    PickerCheck(
        name="caller-destination",
        promise="replaces a destination that the caller wrote",
        run=requests.overwritten_destination,
    ),
    PickerCheck(
        name="deferred-answer", promise="answers the headers when it has the body", run=requests.deferred_answer
    ),
    PickerCheck(name="body-once", promise="returns the body exactly once", run=requests.body_once),
    PickerCheck(name="body-in-pieces", promise="takes a body in any pieces", run=requests.body_in_pieces),
    PickerCheck(name="large-body", promise="returns 1.2 MB in chunks below 64 KiB", run=requests.large_body),
    PickerCheck(name="no-body", promise="answers a request without a body", run=requests.no_body),
    PickerCheck(name="empty-body", promise="refuses an empty body with 400", run=requests.empty_body),
    PickerCheck(name="malformed-json", promise="refuses what is no JSON with 400", run=requests.malformed_json),
    PickerCheck(name="request-trailers", promise="answers a request's trailers", run=requests.request_trailers),
    PickerCheck(
        name="header-forms", promise="reads headers in any field and case, sets lower case", run=requests.header_forms
    ),
    PickerCheck(name="subset-list", promise="chooses from a list of endpoints", run=requests.subset_list),
    PickerCheck(name="subset-text", promise="chooses from endpoints in a text", run=requests.subset_text),
    PickerCheck(
        name="subset-foreign", promise="answers 503 to a subset of others", run=requests.subset_without_endpoint
    ),
    PickerCheck(name="subset-empty", promise="answers 503 to an empty subset", run=requests.subset_empty),
    PickerCheck(name="no-endpoint", promise="answers 503 without a ready endpoint", run=requests.no_ready_endpoint),
    PickerCheck(name="shed", promise="answers 429 to what it drops", run=requests.shed),
    PickerCheck(name="many-at-once", promise="mixes no requests", run=requests.many_at_once),
)
RESPONSE_CHECKS = (
    PickerCheck(name="response-echo", promise="returns every chunk of a response", run=responses.response_echo),
    PickerCheck(name="response-stream", promise="returns each chunk at once", run=responses.response_stream),
    PickerCheck(name="response-trailers", promise="answers a response's trailers", run=responses.response_trailers),
    PickerCheck(
        name="response-headers", promise="answers a response of headers alone", run=responses.response_without_body
    ),
    PickerCheck(name="response-error", promise="returns an endpoint's error unchanged", run=responses.response_error),
    PickerCheck(name="no-early-close", promise="closes no stream before the gateway", run=responses.no_early_close),
    PickerCheck(name="clean-close", promise="ends a stream that the gateway ended", run=responses.clean_close),
    PickerCheck(name="served-endpoint", promise="reads which endpoint served", run=responses.served_endpoint),
)
OTHER_CHECKS = (
    PickerCheck(
        name="test-selection",
        promise="obeys the header of conformance tests by a flag only",
        run=responses.chosen_endpoint,
    ),
    PickerCheck(
        name="abort-in-request", promise="survives callers that leave while they ask", run=responses.abort_in_request
    ),
    PickerCheck(
        name="abort-in-response", promise="frees the places of callers that leave", run=responses.abort_in_response
    ),
    PickerCheck(name="broken-order", promise="ends a stream that makes no sense", run=responses.broken_order),
    PickerCheck(name="health", promise="answers the health services of the protocol", run=responses.health),
    PickerCheck(name="tls", promise="offers TLS that gateways can use", run=responses.secure_port),
)
PICKER_CHECKS: tuple[PickerCheck, ...] = (*REQUEST_CHECKS, *RESPONSE_CHECKS, *OTHER_CHECKS)
"""All checks."""


async def examine_picker(
    picker: PickerUnderTest, checks: tuple[PickerCheck, ...] = PICKER_CHECKS
) -> AsyncGenerator[Finding]:
    """Runs the checks one after the other. A wrong answer of the picker is a finding, never an exception."""
    for check in checks:
        began = time.monotonic()
        verdict, detail = await _verdict(picker, check)
        seconds = round(time.monotonic() - began, 3)
        yield Finding(check=check.name, promise=check.promise, verdict=verdict, detail=detail, seconds=seconds)


async def _verdict(picker: PickerUnderTest, check: PickerCheck) -> tuple[Verdict, str]:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return Verdict.HONOURED, await check.run(picker)
    except NotCheckedError as why:
        return Verdict.NOT_CHECKED, str(why)
    except BrokenPromiseError as broken:
        return Verdict.BROKEN, str(broken)
    except TimeoutError:
        return Verdict.BROKEN, f"it did not come to an end within {CHECK_SECONDS:g} s"
