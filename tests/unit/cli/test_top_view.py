"""The page of `weft top`: a pure function of what is known and of the terminal's size."""

from typing import Any

import pytest

from weft_app.cli.top import MIN_COLUMNS, MIN_ROWS, WARNING, Sort, View, page

GIB = 1024**3


def _model(name: str, **fields: Any) -> dict[str, Any]:
    known = {"model": name, "runner": "gpu-0", "host": "titan", "state": "ready", "slotsUsed": 0, "slotsTotal": 4}
    return known | {"memoryBytes": 0, "loadProgress": None, "detail": ""} | fields


def _end(number: int, **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"id": f"req-{number}", "tenant": "ann", "target": "qwen", "outcome": "completed"}
    return known | {"tokens": [31, 5], "seconds": 0.25, "tokensPerSecond": 20.04} | fields


DOCUMENT: dict[str, Any] = {
    "kind": "Top",
    "time": "2026-11-22T12:00:00+00:00",
    "notice": "",
    "tokensPerSecond": 12.34,
    "requests": {"running": 1, "waiting": 1, "total": 2},
    "devices": [
        {"host": "titan", "name": "RTX", "totalBytes": 24 * GIB, "freeBytes": 6 * GIB, "utilization": 0.875},
        {"host": "atlas", "name": "A2", "totalBytes": 16 * GIB, "freeBytes": 16 * GIB, "utilization": None},
    ],
    "models": [
        _model("qwen", slotsUsed=1, memoryBytes=5 * GIB),
        _model("llama", state="loading", loadProgress=0.4, memoryBytes=12 * GIB),
        _model("broken", state="crash-loop", detail="the engine ended with 1"),
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


def test_page_shows_devices_models_queue_and_recent_results() -> None:
    assert _texts(View(columns=100, rows=30)) == [
        "weft top  running 1  waiting 1  tokens/s 12.3  2026-11-22T12:00:00+00:00",
        "DEVICE  HOST   MEMORY        USED     FREE    BUSY",
        "RTX     titan  [########  ]  18 GiB   6 GiB   88%",
        "A2      atlas  [          ]  0 bytes  16 GiB  -",
        "MODEL   RUNNER  STATE        SLOTS  MEMORY  DETAIL",
        "broken  gpu-0   crash-loop   0/4    -       the engine ended with 1",
        "llama   gpu-0   loading 40%  0/4    12 GiB  -",
        "qwen    gpu-0   ready        1/4    5 GiB   -",
        "WAITING  TARGET  STATE    POS  ETA   WAITS FOR",
        "req-9    llama   loading  -    4.2s  llama is loading",
        "ENDED  TARGET  OUTCOME        TOKENS  TOOK    TOK/S",
        "req-1  qwen    completed      31+5    250 ms  20.0",
        "req-2  qwen    queue_timeout  -       30 s    -",
        "q quit  p pause  sort: n name, l load, m memory (now name)",
    ]


@pytest.mark.parametrize(("sort", "first"), [(Sort.NAME, "broken"), (Sort.LOAD, "qwen"), (Sort.MEMORY, "llama")])
def test_models_are_sorted_by_key(sort: Sort, first: str) -> None:
    texts = _texts(View(columns=100, rows=30, sort=sort))
    assert texts[5].startswith(first)
    assert texts[-1].endswith(f"(now {sort})")


def test_pause_is_shown() -> None:
    assert "p go on" in _texts(View(columns=100, rows=30, is_paused=True))[-1]


def test_unreadable_data_and_broken_models_are_warnings() -> None:
    lines = page(DOCUMENT | {"notice": "no router answers"}, View(columns=100, rows=30))
    assert [line.text.split()[0] for line in lines if line.style is WARNING] == ["no", "broken"]


@pytest.mark.parametrize(("columns", "rows"), [(100, 14), (100, 10), (60, 8), (40, 24), (20, 6), (1, 1), (500, 200)])
def test_page_fits_every_terminal(columns: int, rows: int) -> None:
    many = {"models": [_model(f"m{number}") for number in range(50)], "ended": [_end(number) for number in range(50)]}
    texts = _texts(View(columns=columns, rows=rows), **many)
    assert len(texts) <= max(rows, MIN_ROWS)
    assert max(map(len, texts)) <= max(columns, MIN_COLUMNS)
    assert texts[0].startswith("weft top")
    assert texts[-1].startswith("q quit")


def test_rows_that_do_not_fit_are_counted() -> None:
    texts = _texts(View(columns=100, rows=20), models=[_model(f"m{number:02}") for number in range(50)])
    shown = [text for text in texts if text.startswith("m")]
    assert f"... and {50 - len(shown)} more" in texts
    assert len(texts) == 20


def test_control_characters_in_names_are_removed() -> None:
    texts = _texts(View(columns=100, rows=30), models=[_model("evil\x1b[2Jname\n", detail="a\rb")])
    assert all(text.isprintable() for text in texts)


def test_empty_mesh_is_rendered() -> None:
    empty: dict[str, Any] = {"devices": [], "models": [], "queue": [], "ended": [], "tokensPerSecond": None}
    texts = _texts(View(columns=80, rows=24), **empty)
    assert len(texts) == 6
    assert "tokens/s -" in texts[0]
