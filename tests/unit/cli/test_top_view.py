"""The page of `weft top`: a pure function of what is known and of the terminal's size, and what it reads."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli import top
from weft_app.cli.top import TopScreen, TopSource
from weft_app.cli.top_page import MIN_COLUMNS, MIN_ROWS, SELECTED, WARNING, Sort, View, page, targets

GIB = 1024**3


def _model(name: str, **fields: Any) -> dict[str, Any]:
    known = {"model": name, "runner": "gpu-0", "host": "titan", "state": "ready", "slotsUsed": 0, "slotsTotal": 4}
    unknown = {"memoryBytes": 0, "tokensPerSecond": None, "until": None, "loadProgress": None, "detail": ""}
    return known | unknown | fields


def _end(number: int, **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"id": f"req-{number}", "tenant": "ann", "target": "qwen", "outcome": "completed"}
    return known | {"tokens": [31, 5], "seconds": 0.25, "tokensPerSecond": 20.04} | fields


def _host(name: str, **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"host": name, "cpuCount": 16, "cpuUtilization": 0.35, "runners": ["gpu-0", "gpu-1"]}
    return known | {"memoryTotalBytes": 64 * GIB, "memoryUsedBytes": 48 * GIB} | fields


DOCUMENT: dict[str, Any] = {
    "kind": "Top",
    "time": "2026-11-22T12:00:00+00:00",
    "notice": "",
    "tokensPerSecond": 12.34,
    "requests": {"running": 1, "waiting": 1, "total": 2},
    "hosts": [
        _host("titan"),
        _host("atlas", cpuCount=None, cpuUtilization=None, memoryTotalBytes=None, memoryUsedBytes=None),
    ],
    "devices": [
        {"host": "titan", "name": "RTX", "totalBytes": 24 * GIB, "freeBytes": 6 * GIB, "utilization": 0.875},
        {"host": "atlas", "name": "A2", "totalBytes": 16 * GIB, "freeBytes": 16 * GIB, "utilization": None},
    ],
    "models": [
        _model("qwen", slotsUsed=1, memoryBytes=5 * GIB, tokensPerSecond=12.34, until="4m"),
        _model("llama", state="loading", loadProgress=0.4, memoryBytes=12 * GIB),
        _model("broken", state="crash-loop", detail="the engine ended with 1"),
    ],
    "running": [
        {
            "id": "req-8",
            "tenant": "ann",
            "target": "qwen",
            "runner": "gpu-0",
            "state": "generating",
            "seconds": 12.0,
            "tokens": 140,
            "tokensPerSecond": 12.34,
        }
    ],
    "queue": [
        {
            "id": "req-9",
            "tenant": "bob",
            "target": "llama",
            "state": "loading",
            "position": None,
            "etaSeconds": 4.2,
            "waitsFor": "llama is loading",
        }
    ],
    "ended": [_end(1), _end(2, outcome="queue_timeout", tokens=None, seconds=30.0, tokensPerSecond=None)],
}


def _texts(view: View, **changes: Any) -> list[str]:
    return [line.text for line in page(DOCUMENT | changes, view)]


def test_page_shows_hosts_devices_models_running_waiting_and_ended_requests() -> None:
    assert _texts(View(columns=120, rows=30)) == [
        "weft top  running 1  waiting 1  tokens/s 12.3  2026-11-22T12:00:00+00:00",
        "HOST   CPU              CORES  MEMORY                       RUNNERS",
        "titan  ████░░░░░░  35%  16     ████████░░ 48 GiB of 64 GiB  gpu-0,gpu-1",
        "atlas  -                -      -                            gpu-0,gpu-1",
        "DEVICE  BUSY             MEMORY                        HOST",
        "RTX     █████████░  88%  ████████░░ 18 GiB of 24 GiB   titan",
        "A2      -                ░░░░░░░░░░ 0 bytes of 16 GiB  atlas",
        "MODEL   RUNNER  STATE       SLOTS  MEMORY  TOK/S  EXPIRES  PROGRESS         DETAIL",
        "broken  gpu-0   crash-loop  0/4    -       -      -        -                the engine ended with 1",
        "llama   gpu-0   loading     0/4    12 GiB  -      -        ████░░░░░░  40%  -",
        "qwen    gpu-0   ready       1/4    5 GiB   12.3   4m       -                -",
        "RUNNING  TARGET  STATE       RUNNER  TENANT  TOKENS  TOOK  TOK/S",
        "req-8    qwen    generating  gpu-0   ann     140     12 s  12.3",
        "WAITING  TARGET  STATE    POS  ETA   TENANT  WAITS FOR",
        "req-9    llama   loading  -    4.2s  bob     llama is loading",
        "ENDED  TARGET  OUTCOME        TENANT  TOKENS  TOOK    TOK/S",
        "req-1  qwen    completed      ann     31+5    250 ms  20.0",
        "req-2  qwen    queue_timeout  ann     -       30 s    -",
        "q quit  p pause  s sort (name)  ↑↓ select  c cancel  l logs",
    ]


def test_narrow_page_omits_minor_columns_before_it_cuts_others() -> None:
    texts = _texts(View(columns=60, rows=30))
    assert "titan  ████░░░░░░  35%  16     ████████░░ 48 GiB of 64 GiB" in texts
    assert "RUNNING  TARGET  STATE       RUNNER  TOKENS  TOOK  TOK/S" in texts


@pytest.mark.parametrize(("sort", "first"), [(Sort.NAME, "broken"), (Sort.LOAD, "qwen"), (Sort.MEMORY, "llama")])
def test_models_are_sorted_by_key(sort: Sort, first: str) -> None:
    texts = _texts(View(columns=100, rows=30, sort=sort), hosts=[], devices=[])
    assert texts[2].startswith(first)
    assert f"s sort ({sort})" in texts[-1]


def test_requests_beyond_the_listed_ones_are_counted() -> None:
    """Beyond 100 requests, the page counted the listed ones as all."""
    (first, *_) = _texts(View(columns=120, rows=30), requests={"running": 60, "waiting": 40, "total": 412})
    assert first.startswith("weft top  running 60  waiting 40  tokens/s 12.3  not listed 312  ")


def test_pause_is_shown() -> None:
    assert "p go on" in _texts(View(columns=100, rows=30, is_paused=True))[-1]


def test_message_replaces_the_keys() -> None:
    assert _texts(View(columns=100, rows=30, message="Cancel req-8?"))[-1] == "Cancel req-8?"


def test_unreadable_data_is_a_warning_and_states_have_colors() -> None:
    lines = page(DOCUMENT | {"notice": "no router answers"}, View(columns=120, rows=30, is_colored=True))
    assert [line.text for line in lines if line.style is WARNING] == ["no router answers"]
    (broken,) = (line.text for line in lines if line.text.startswith("broken"))
    assert "\x1b[31mcrash-loop\x1b[0m" in broken


@pytest.mark.parametrize(("columns", "rows"), [(100, 16), (100, 10), (60, 8), (40, 24), (20, 6), (1, 1), (500, 200)])
def test_page_fits_every_terminal(columns: int, rows: int) -> None:
    many = {"models": [_model(f"m{number}") for number in range(50)], "ended": [_end(number) for number in range(50)]}
    texts = _texts(View(columns=columns, rows=rows), **many)
    assert len(texts) <= max(rows, MIN_ROWS)
    assert max(map(len, texts)) <= max(columns, MIN_COLUMNS)
    assert texts[0].startswith("weft top")
    assert texts[-1].startswith("q quit")


def test_rows_that_do_not_fit_are_counted() -> None:
    texts = _texts(View(columns=100, rows=24), models=[_model(f"m{number:02}") for number in range(50)])
    shown = [text for text in texts if text.startswith("m")]
    assert f"... and {50 - len(shown)} more" in texts
    assert len(texts) == 24


def test_selected_row_is_shown_among_many() -> None:
    models = [_model(f"m{number:02}") for number in range(50)]
    lines = page(DOCUMENT | {"models": models}, View(columns=100, rows=24, selected=("model", "m40")))
    assert [line.text.split()[0] for line in lines if line.style is SELECTED] == ["m40"]
    assert len(lines) == 24


def test_models_and_requests_are_targets_in_the_order_of_the_page() -> None:
    models = [("model", name) for name in ("broken", "llama", "qwen")]
    assert targets(DOCUMENT, Sort.NAME) == [*models, *(("request", f"req-{number}") for number in (8, 9, 1, 2))]


def test_control_characters_in_names_are_removed() -> None:
    texts = _texts(View(columns=100, rows=30), models=[_model("evil\x1b[2Jname\n", detail="a\rb")])
    assert all(text.isprintable() for text in texts)


def test_every_key_but_y_answers_the_question_with_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """q ended the program, and l showed a log and left the question open."""
    pressed = iter([["j"] * 4, ["c"], ["q"], ["c"], ["l"], ["q"]])
    monkeypatch.setattr(top, "_keys", lambda _: next(pressed))
    source: Any = SimpleNamespace(document=lambda: DOCUMENT)
    assert TopScreen(source, Path("/nowhere"), 60.0)._watch() is None
    assert list(pressed) == []


def test_empty_mesh_is_rendered() -> None:
    empty: dict[str, list[Any]] = {key: [] for key in ("hosts", "devices", "models", "running", "queue", "ended")}
    texts = _texts(View(columns=80, rows=24), tokensPerSecond=None, **empty)
    assert len(texts) == 2
    assert "tokens/s -" in texts[0]


def test_lost_mesh_keeps_the_last_state_with_a_notice_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    is_gone = False

    def read(_: object) -> dict[str, Any]:
        if is_gone:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the mesh does not answer")
        return DOCUMENT

    monkeypatch.setattr(top, "connect", lambda _: nullcontext())
    monkeypatch.setattr(top, "_read", read)
    source = TopSource(Path("/nowhere"))
    assert source.document() == DOCUMENT
    is_gone = True
    told = f"No answer since {DOCUMENT['time']}, retrying: the mesh does not answer"
    assert source.document() == DOCUMENT | {"notice": told}
    is_gone = False
    assert source.document() == DOCUMENT
