"""What `weft explain` shows of a request that a proxy carried."""

from weft.api.common.v1.receipt_pb2 import ProxyRecord, Receipt
from weft_app.cli.explain import receipt_lines


def _shown(receipt: Receipt) -> dict[str, str]:
    lines = (line.strip().partition(":") for line in receipt_lines(receipt))
    return {name: text.strip() for name, _, text in lines}


def test_what_the_proxy_saw_and_where_it_contradicts_the_runner_are_lines_of_their_own() -> None:
    proxy = ProxyRecord(status=200, answer_bytes=512, endpoint="10.0.0.7:8081", attempt_count=1)
    proxy.flags.append("downstream_connection_termination")
    proxy.disagreements.append("end: the runner says completed, the proxy that the caller left")
    shown = _shown(Receipt(proxy=proxy))
    assert shown["Proxy"] == ("status 200, 512 bytes of answer, from 10.0.0.7:8081 (downstream_connection_termination)")
    assert shown["Disagreements"] == "end: the runner says completed, the proxy that the caller left"


def test_a_request_that_was_never_served_has_no_endpoint() -> None:
    assert _shown(Receipt(proxy=ProxyRecord(status=503)))["Proxy"] == "status 503, 0 bytes of answer"


def test_a_request_that_a_dispatcher_carried_has_neither_line() -> None:
    assert not _shown(Receipt()).keys() & {"Proxy", "Disagreements"}
