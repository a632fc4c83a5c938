"""Tables of the commands that list most, as terminals of 80, 120 and 200 columns show them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from weft.documents.resource_kinds import ResourceKind
from weft_app.cli.columns import listing_of
from weft_app.cli.output import Listing, TextTable
from weft_app.cli.ps import _PROCESSES
from weft_app.cli.records import _ENDED, _REQUESTS

RECORDED = Path(__file__).with_suffix(".txt")
WIDTHS = (80, 120, 200)
GIB = 1024**3
LONG = "qwen3-coder-30b-a3b-instruct-q4"
LONGEST = "a-model-with-a-name-of-ninety-seven-characters-that-somebody-has-made-from-all-parts-of-its-matrix-v2.1"[
    -97:
]
HUB = "unsloth/Mistral-Small-3.2-24B-Instruct-2506-GGUF:UD-Q4_K_XL"


def _process(model: str, **fields: Any) -> dict[str, Any]:
    known = {"model": model, "runner": "gpu-0", "host": "titan.lab.example.org", "runtime": "llama_server"}
    counted = {"slotsUsed": 1, "slotsTotal": 4, "memoryBytes": 19 * GIB, "contextTokens": 32768, "pid": 4711}
    return known | counted | {"state": "ready", "until": "4m", "restarts": 0, "cache": None} | fields


def _model(name: str, **fields: Any) -> dict[str, Any]:
    instance = {"phase": "ready", "slotsUsed": 0, "slotsTotal": 4, "contextTokens": 32768}
    status = {"kind": "runner", "state": "active", "type": "llama_server", "runner": "gpu-0", "instance": instance}
    return {"name": name, "poolName": name, "operations": ["chat", "completion"], "status": status} | fields


def _tables() -> dict[str, tuple[Listing, list[dict[str, Any]]]]:
    now = datetime.now(UTC)
    arrived, ended = ((now - timedelta(seconds=seconds)).isoformat() for seconds in (210, 150))

    def request(number: int, **fields: Any) -> dict[str, Any]:
        known = {"requestId": f"req-{number:024x}", "tenant": "research", "target": LONG, "priority": "normal"}
        return known | {"state": "running", "arrivedAt": arrived} | fields

    waiting = {"position": 2, "reason": "all 4 slots of the model are busy on gpu-0 and gpu-1", "etaSeconds": 12.0}
    receipt = {"promptTokens": 31, "completionTokens": 5}
    too_long = "the prompt has 40,000 tokens, more than the 32,768 of the model"
    failed = request(2**91, endedAt=ended, reason="context_length_exceeded", message=too_long)
    return {
        "weft ps": (_PROCESSES, [_process(LONG), _process("embed", state="loading", until="-", memoryBytes=0)]),
        "weft get models": (
            listing_of(ResourceKind.MODEL),
            [_model(LONG), _model("gpt-4o", tier="large", owner="me")],
        ),
        "weft get requests": (_REQUESTS, [request(2**90), request(2**91 + 7, state="queued", queued=waiting)]),
        "weft get requests --state ended": (_ENDED, [request(2**90, endedAt=ended, receipt=receipt), failed]),
    }


def test_tables_fit_terminals_as_recorded() -> None:
    shown = ""
    for command, (listing, rows) in _tables().items():
        for width in WIDTHS:
            text = TextTable(listing.columns, wider="-o wide", room=width).text(rows)
            assert max(map(len, text.splitlines())) <= width
            shown += f"=== {command} ({width} columns)\n{text}\n"
    assert shown == RECORDED.read_text(), "what differs is for users to see: record it on purpose"


def test_wide_output_is_never_cut() -> None:
    for listing, rows in _tables().values():
        assert "…" not in "".join(TextTable(listing.wide, is_cut=False).lines(rows, is_colored=False))


@pytest.mark.parametrize("name", [LONGEST, HUB])
def test_long_name_is_cut_in_its_middle_before_the_state_is_omitted(name: str) -> None:
    for listing, row in ((_PROCESSES, _process(name)), (listing_of(ResourceKind.MODEL), _model(name))):
        header, line = TextTable(listing.columns, wider="-o wide", room=80).lines([row], is_colored=False)
        assert {"RUNNER", "STATE"} <= set(header.split()) or {"RUNNER", "STATUS"} <= set(header.split())
        shown = line.split()[0]
        beginning, _, end = shown.partition("…")
        assert name.startswith(beginning)
        assert name.endswith(end)
        assert min(len(beginning), len(end)) >= 15
        assert len(line) <= 80
