"""The bad-input catalogue: each case against endpoints that it concerns, in a gateway of its own process.

Each endpoint has the first case of every group that concerns it, and a share of the others.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

import bad_inputs_auth
import bad_inputs_http
import bad_inputs_json
import bad_inputs_names
import bad_inputs_uploads
import psutil
import pytest
from bad_inputs_stage import ENDPOINTS, SECRET, Case, Victim, judge, places_of, request, settle, share_of, victim

pytestmark = pytest.mark.slow("sends a thousand bad requests to a process")

MEBIBYTE = 1024 * 1024
FAMILIES = (bad_inputs_http, bad_inputs_json, bad_inputs_names, bad_inputs_uploads)
CASES = tuple(case for family in FAMILIES for case in family.CASES)
PLACES = places_of((*CASES, *bad_inputs_auth.CASES))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with victim(tmp_path_factory.mktemp("victim")) as found:
        yield found


@pytest.fixture(scope="module")
def guarded_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with victim(tmp_path_factory.mktemp("guarded"), headers=bad_inputs_auth.GOOD, keys=True) as found:
        yield found


def test_catalogue_contains_every_gateway_route(gateway: Victim) -> None:
    of_the_workbench = {("GET", "/ui"), ("GET", "/ui/{}")}
    refused = {("GET", "/v1/responses"), ("POST", "/v1/responses/compact"), ("POST", "/v1/responses/input_tokens")}
    assert {route for route in gateway.routes if route[0] != "HEAD"} - {
        endpoint.route for endpoint in ENDPOINTS
    } == of_the_workbench | refused


def test_every_case_has_a_unique_name_and_an_endpoint(gateway: Victim) -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
    assert [case.name for case in CASES if not gateway.endpoints(case)] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_rejected_as_expected_and_harms_nothing(case: Case, gateway: Victim) -> None:
    assert gateway.faults_at(case, share_of(PLACES[case.name], gateway.endpoints(case))) == []


@pytest.mark.parametrize("case", bad_inputs_auth.CASES, ids=lambda case: case.name)
def test_requests_without_a_valid_key_are_rejected_at_every_endpoint(case: Case, guarded_gateway: Victim) -> None:
    endpoints = guarded_gateway.endpoints(case)
    assert len(endpoints) > 40
    assert guarded_gateway.faults_at(case, share_of(PLACES[case.name], endpoints)) == []


def test_each_bad_request_is_counted_once(gateway: Victim) -> None:
    before, sent = gateway.counted(), 0
    for family in FAMILIES:
        for case in family.CASES[:8]:
            for endpoint in gateway.endpoints(case)[:3]:
                gateway.exchange(case.send(endpoint))
                sent += 1
    assert sent > 80
    # The request for the counts is counted after its own answer.
    assert gateway.counted() - before == sent + 1


@pytest.mark.slow("floods a service")
def test_memory_is_freed_after_the_largest_inputs(gateway: Victim) -> None:
    large = [case for case in CASES if any(mark in case.name for mark in (" MB", ",000", "10^6"))]
    assert len(large) > 15
    for case in large:
        for endpoint in gateway.endpoints(case)[:1]:
            gateway.exchange(case.send(endpoint))
    most = gateway.resident_at_start + 64 * MEBIBYTE
    assert settle(gateway, most) <= most


def test_log_contains_no_sent_key(gateway: Victim, guarded_gateway: Victim) -> None:
    for endpoint in ENDPOINTS[:4]:
        gateway.exchange(request(endpoint, b"{"))
    text = gateway.log.read_text() + guarded_gateway.log.read_text()
    assert "refused" in text
    assert SECRET not in text
    assert bad_inputs_auth.GOOD_SECRET not in text


GOOD_HEAD = b"HTTP/1.1 400 \r\ncontent-type: application/json\r\nx-request-id: r-1\r\n\r\n"
GOOD_ERROR = b'"message":"m","type":"t","param":null,"code":"c"'


def answered(error: bytes = GOOD_ERROR, head: bytes = GOOD_HEAD, request_id: bytes = b"r-1") -> bytes:
    return head + b'{"error":{' + error + b'},"request_id":"' + request_id + b'"}'


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"", "no answer"),
        (answered(head=GOOD_HEAD.replace(b"400", b"200")), "status 200"),
        (answered(head=GOOD_HEAD.replace(b"400", b"500")), "status 500"),
        (GOOD_HEAD + b'{"detail":[]}', "no envelope"),
        (GOOD_HEAD + b"<html>", "no envelope"),
        (answered(b'"message":"m"'), "envelope is of another surface"),
        (answered(GOOD_ERROR.replace(b'"m"', b'"n: Field required"')), "a library's words: 'Field required'"),
        (answered(request_id=b"r-2"), "request id of the body"),
        (answered(head=GOOD_HEAD.replace(b"x-request-id: r-1\r\n", b"")), "no request id"),
        (answered(head=GOOD_HEAD.replace(b"application/json", b"text/plain")), "not declared"),
        (answered(GOOD_ERROR.replace(b'"m"', b'"Traceback (most"')), "leaks"),
        (answered(GOOD_ERROR.replace(b'"m"', b'"no file /work/main/x"')), "leaks"),
        (answered(GOOD_ERROR.replace(b'"m"', f'"{SECRET}"'.encode())), "leaks"),
    ],
)
def test_judge_detects_each_fault(answer: bytes, fault: str) -> None:
    found = judge(answer, CASES[0], ENDPOINTS[0])
    assert any(fault in one for one in found), found


def test_judge_accepts_a_correct_error() -> None:
    assert judge(answered(), CASES[0], ENDPOINTS[0]) == []


@contextmanager
def broken_server(answer: bytes, folder: Path) -> Iterator[Victim]:
    """A server with one answer for every request."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1_000_000)
            self.request.sendall(answer)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        log = folder / "log"
        log.write_text("")
        routes = frozenset(endpoint.route for endpoint in ENDPOINTS)
        yield Victim(psutil.Process(), server.server_address[1], routes, log)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "faults"),
    [
        (b"HTTP/1.1 200 \r\nx-request-id: r-1\r\n\r\n{}", ["status 200", "no envelope", "0 log lines"]),
        (b"HTTP/1.1 500 \r\nx-request-id: r-1\r\n\r\nTraceback", ["status 500", "leaks", "next good request"]),
        (b"", ["no answer", "next good request"]),
    ],
)
def test_permissive_server_fails_the_catalogue(answer: bytes, faults: list[str], tmp_path: Path) -> None:
    with broken_server(answer, tmp_path) as broken:
        for case in bad_inputs_json.CASES[:3]:
            found = broken.faults_at(case, broken.endpoints(case)[:2])
            assert [fault for fault in faults if not any(fault in one for one in found)] == []
