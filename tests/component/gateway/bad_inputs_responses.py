"""Impossible background responses, and streams from impossible positions."""

from bad_inputs_stage import Case, Endpoint, Send, of_kind, request, with_fields

_RESPONSES = of_kind("responses")
_REFUSED = frozenset({400})
_REFERENCE = {"type": "item_reference", "id": "msg_1"}
_LONG = "9" * 10_000
_NO_FLAGS: tuple[object, ...] = (1, 0, "true", [], {}, 1.5)


def _one(endpoint: Endpoint) -> bool:
    return endpoint.route == ("GET", "/v1/responses/{}")


def _asking(query: str) -> Send:
    return lambda endpoint: request(endpoint, path=f"{endpoint.address}?{query}")


CASES = (
    *(
        Case(f"R1 background {value!r}", with_fields({"background": value}), _REFUSED, _RESPONSES)
        for value in _NO_FLAGS
    ),
    Case("R1 background and not kept", with_fields({"background": True, "store": False}), _REFUSED, _RESPONSES),
    Case(
        "R1 background and waited for",
        with_fields({"background": True, "durable": "wait"}, without=("store",)),
        _REFUSED,
        _RESPONSES,
    ),
    Case(
        "R1 background after nothing",
        with_fields({"background": True, "previous_response_id": "resp_" + "0" * 24}, without=("store",)),
        frozenset({404}),
        _RESPONSES,
    ),
    Case(
        "R1 background of 10,000 items of nothing",
        with_fields(
            {"background": True, "input": [{"type": "item_reference", "id": "msg_1"}] * 10_000}, without=("store",)
        ),
        _REFUSED,
        _RESPONSES,
    ),
    *(
        Case(
            f"R2 starting_after {value[:20]!r} {place}",
            _asking(f"stream=true&starting_after={value}"),
            _REFUSED,
            _one,
        )
        for place, value in enumerate(
            ("-1", "1.5", "1e3", "NaN", "", "x", "%00", "%EF%BC%91", "%2B1", "0x10", "9007199254740993", _LONG)
        )
    ),
    Case("R2 starting_after without a stream", _asking("starting_after=1"), _REFUSED, _one),
    *(
        Case(f"R2 stream {value!r}", _asking(f"stream={value}"), _REFUSED, _one)
        for value in ("yes", "2", "", "%00", "null")
    ),
    Case("R2 the largest number", _asking(f"stream=true&starting_after={2**53}"), frozenset({404}), _one),
)
