"""The state machine of one external processor stream."""

import pytest

from gateway.picker.session import MAX_CHUNK_BYTES, DirectAnswer, PickerSession, Route, State, metadata_text
from weft.api.envoy.v1 import external_processor_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import DESTINATION, DESTINATION_NAMESPACE
from weft.kernel.reasons import Reason

LIMIT = 1_000_000
ROUTE = Route(destinations=("10.0.0.1:8081", "10.0.0.2:8081"), set_headers=(("x-weft-ticket", "a.b,c.d"),))


def head(
    *, ends: bool = False, mode: "pb.BodySendMode.ValueType" = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = mode
    found = message.request_headers
    for name, value in (
        (":method", b"POST"),
        (":path", b"/v1/chat/completions"),
        ("content-type", b"application/json"),
    ):
        found.headers.headers.add(key=name, raw_value=value)
    found.end_of_stream = ends
    return message


def chunk(body: bytes, *, ends: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=ends))


def answers_to(session: PickerSession, route: Route = ROUTE) -> list[pb.ProcessingResponse]:
    return list(session.routed(route))


def body_of(answers: list[pb.ProcessingResponse]) -> bytes:
    return b"".join(each.request_body.response.body_mutation.streamed_response.body for each in answers[1:])


def test_nothing_is_answered_before_the_whole_request_has_arrived() -> None:
    session = PickerSession(LIMIT)
    assert session.take(head()) == ([], None)
    assert session.take(chunk(b"ab")) == ([], None)
    _, request = session.take(chunk(b"cd", ends=True))
    assert request is not None
    assert request.body == b"abcd"
    assert (b":path", b"/v1/chat/completions") in request.headers


def test_the_destination_is_in_header_and_metadata_and_the_body_comes_again() -> None:
    session = PickerSession(LIMIT)
    session.take(head())
    session.take(chunk(b"ab"))
    session.take(chunk(b"cd", ends=True))
    answers = answers_to(session)
    listed = "10.0.0.1:8081,10.0.0.2:8081"
    mutation = answers[0].request_headers.response.header_mutation
    assert {each.header.key: each.header.raw_value for each in mutation.set_headers} == {
        DESTINATION: listed.encode(),
        "x-weft-ticket": b"a.b,c.d",
    }
    assert metadata_text(answers[0].dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value, DESTINATION) == listed
    assert body_of(answers) == b"abcd"
    ends = [each.request_body.response.body_mutation.streamed_response.end_of_stream for each in answers[1:]]
    assert ends == [False, True]


def test_no_chunk_of_a_large_body_reaches_the_size_that_the_protocol_forbids() -> None:
    session, body = PickerSession(LIMIT), bytes(range(256)) * 1024
    session.take(head())
    session.take(chunk(body, ends=True))
    answers = answers_to(session)
    sizes = [len(each.request_body.response.body_mutation.streamed_response.body) for each in answers[1:]]
    assert max(sizes) <= MAX_CHUNK_BYTES < 64 * 1024
    assert body_of(answers) == body


def test_another_body_takes_the_place_of_the_one_that_arrived() -> None:
    session = PickerSession(LIMIT)
    session.take(head())
    session.take(chunk(b"old", ends=True))
    assert body_of(answers_to(session, Route(destinations=("10.0.0.1:1",), body=b"new"))) == b"new"


def test_a_request_without_a_body_gets_none() -> None:
    session = PickerSession(LIMIT)
    _, request = session.take(head(ends=True))
    assert request is not None
    assert len(answers_to(session)) == 1


def test_trailers_end_a_body_and_are_answered_last() -> None:
    session = PickerSession(LIMIT)
    session.take(head())
    session.take(chunk(b"ab"))
    _, request = session.take(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    assert request is not None
    answers = answers_to(session)
    assert answers[-1].WhichOneof("response") == "request_trailers"
    assert not answers[1].request_body.response.body_mutation.streamed_response.end_of_stream


def test_the_end_of_a_body_that_comes_twice_is_ignored() -> None:
    session = PickerSession(LIMIT)
    session.take(head())
    session.take(chunk(b"ab", ends=True))
    assert session.take(chunk(b"ab", ends=True)) == ([], None)
    assert body_of(answers_to(session)) == b"ab"


def test_a_body_above_the_limit_is_refused_while_it_arrives() -> None:
    session = PickerSession(3)
    session.take(head())
    session.take(chunk(b"abc"))
    with pytest.raises(WeftError) as caught:
        session.take(chunk(b"d"))
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


@pytest.mark.parametrize(
    "mode", [pb.BODY_SEND_MODE_UNSPECIFIED, pb.BODY_SEND_MODE_BUFFERED, pb.BODY_SEND_MODE_STREAMED]
)
def test_another_mode_of_bodies_is_refused_with_the_setting_to_change(mode: "pb.BodySendMode.ValueType") -> None:
    with pytest.raises(WeftError, match="FULL_DUPLEX_STREAMED"):
        PickerSession(LIMIT).take(head(mode=mode))


@pytest.mark.parametrize(
    "messages", [[chunk(b"a")], [head(), head()], [pb.ProcessingRequest()]], ids=["body first", "head twice", "empty"]
)
def test_messages_out_of_order_are_refused(messages: list[pb.ProcessingRequest]) -> None:
    session = PickerSession(LIMIT)
    for message in messages[:-1]:
        session.take(message)
    with pytest.raises(WeftError) as caught:
        session.take(messages[-1])
    assert caught.value.reason is Reason.MALFORMED_REQUEST


def test_an_answer_for_the_caller_has_its_status_headers_and_body() -> None:
    session = PickerSession(LIMIT)
    session.take(head(ends=True))
    headers = ((b"retry-after", b"3"),)
    immediate = session.answered(
        DirectAnswer(status=429, headers=headers, body=b"{}", details="why")
    ).immediate_response
    assert (immediate.status.code, immediate.body, immediate.details) == (429, b"{}", "why")
    assert [(each.header.key, each.header.raw_value) for each in immediate.headers.set_headers] == [
        ("retry-after", b"3")
    ]
    assert session.state is State.ANSWERED


def test_a_response_is_passed_on_chunk_by_chunk() -> None:
    session = PickerSession(LIMIT)
    session.take(head(ends=True))
    answers_to(session)
    (first,), _ = session.take(pb.ProcessingRequest(response_headers=pb.HttpHeaders()))
    assert first.WhichOneof("response") == "response_headers"
    (echo,), _ = session.take(pb.ProcessingRequest(response_body=pb.HttpBody(body=b"token", end_of_stream=True)))
    streamed = echo.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"token", True)
