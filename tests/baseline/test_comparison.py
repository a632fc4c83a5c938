"""The comparison itself, without a mesh: it finds what changed, and its normal form hides only what it should."""

from pathlib import Path

import pytest
from normal_form import NormalForm
from recordings import VARIABLE, check, differences, read, write

UNARY = '{"id": "chatcmpl-0f1e2d3c4b5a697887960718", "created": 1795208385, "choices": [{"finish_reason": "stop"}]}'
STREAM = ': queued position=1\n\ndata: {"delta": "a"}\n\ndata: {"delta": "b"}\n\ndata: [DONE]\n'


def _form() -> NormalForm:
    return NormalForm({"/tmp/home": "<home>"})


def _outputs(status: int = 200, unary: str = UNARY, stream: str = STREAM) -> dict[str, str]:
    return {
        "unary": f"< {status}\n{_form().json(unary)}",
        "stream": f"< 200\n{_form().stream(stream)}",
    }


def test_identical_run_yields_no_difference() -> None:
    later = UNARY.replace("0f1e2d3c4b5a", "aaaa2d3c4b5a").replace("1795208385", "1795209999")
    assert differences(_outputs(), _outputs(unary=later, stream=STREAM.removeprefix(": queued position=1\n\n"))) == []


@pytest.mark.parametrize(
    ("changed", "name", "lines"),
    [
        (
            _outputs(unary=UNARY.replace("stop", "length")),
            "unary",
            ['-   "finish_reason": "stop"', '+   "finish_reason": "length"'],
        ),
        (_outputs(unary=UNARY.replace('"created"', '"made"')), "unary", ['- "created": "<number>",']),
        (_outputs(stream=STREAM.replace('data: {"delta": "b"}\n\n', "")), "stream", ['-data: {"delta": "b"}']),
        (_outputs(stream=STREAM.replace("data: [DONE]\n", "")), "stream", ["-data: [DONE]"]),
        (_outputs(status=500), "unary", ["-< 200", "+< 500"]),
    ],
    ids=["a field", "a name", "an event", "the end of a stream", "a status"],
)
def test_change_is_reported_with_the_name_of_its_exchange(changed: dict[str, str], name: str, lines: list[str]) -> None:
    (difference,) = differences(_outputs(), changed)
    assert difference.startswith(f"changed: {name}\n")
    assert set(lines) <= set(difference.splitlines())


def test_missing_and_new_exchanges_are_reported() -> None:
    missing, new = differences({"a": "1"}, {"b": "2"})
    assert (missing.splitlines()[0], new.splitlines()[0]) == ("missing: a", "new: b")


def test_ids_are_replaced_by_stable_placeholders() -> None:
    one, other = "0f1e2d3c4b5a697887960718", "1f1e2d3c4b5a697887960718"
    text = f'["task-{one}", "resp_{other}", "resp_{one}", "msg_{one}_0"]'
    assert _form().json(text, None) == '["task-<id 1>", "resp_<id 2>", "resp_<id 1>", "msg_<id 1>_0"]'


def test_numbers_are_masked_by_field_name_and_text_is_not_masked() -> None:
    assert _form().json('{"wait_ms": 12, "count": 12, "seconds": null, "at": "/tmp/home/x"}', None) == (
        '{"wait_ms": "<number>", "count": 12, "seconds": null, "at": "<home>/x"}'
    )


def test_table_text_is_kept_without_widths_and_durations() -> None:
    assert (
        _form().table("NAME    AGE\nm-plain  3m 12s  4.0 KiB  4 tok\n")
        == "NAME  AGE\nm-plain  <duration>  <size>  4 tok"
    )


def test_recording_round_trips_and_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    outputs = {"one": "a\n\nb", "two": ""}
    write(tmp_path / "x.txt", outputs)
    assert read(tmp_path / "x.txt") == outputs
    monkeypatch.setattr("recordings.FOLDER", tmp_path)
    check(tmp_path / "x.txt", outputs)
    with pytest.raises(AssertionError, match="changed: one"):
        check(tmp_path / "x.txt", {**outputs, "one": "a\n\nc"})
