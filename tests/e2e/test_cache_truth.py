"""Prefix caches of many tenants through the whole mesh, on the real llama.cpp server."""

import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from mesh_process import MeshProcess, running_mesh, write_config
from shallow_model import write_shallow_model

from weft_app.compose.demo import DEMO_MODEL, demo_runner_document

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]

MIN_HIT_TOKENS = 40
STORY = "Once upon a time there was a lighthouse on a rock far out in the sea, and nobody lived there. " * 4


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("cache")
    (model,) = demo_runner_document()["models"]
    model["path"] = str(write_shallow_model(folder / "shallow.gguf"))
    config = write_config(folder, {"name": "local", "models": [model]})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@dataclass(frozen=True)
class Answer:
    """What an answer says of the cache, in its usage and in its headers."""

    cached: int
    headers: Mapping[str, str]


def _post(mesh: MeshProcess, path: str, headers: Mapping[str, str], **body: Any) -> tuple[Any, Mapping[str, str]]:
    """The answer's document and its headers, names in lower case."""
    request = urllib.request.Request(
        mesh.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response), {name.lower(): value for name, value in response.headers.items()}


def _ask(mesh: MeshProcess, tenant: str, text: str, headers: dict[str, str] | None = None) -> Answer:
    document, facts = _post(
        mesh,
        "/v1/chat/completions",
        {"X-Tenant-ID": tenant, **(headers or {})},
        model=DEMO_MODEL,
        messages=[{"role": "user", "content": text}],
        max_tokens=1,
    )
    return Answer(document["usage"]["prompt_tokens_details"]["cached_tokens"], facts)


def _text(name: str) -> str:
    return f"The story of {name}. {STORY}"


def test_usage_and_headers_report_cache_hits_and_misses(mesh: MeshProcess) -> None:
    miss, hit = (_ask(mesh, "first", _text("one")) for _ in range(2))
    assert (miss.cached, miss.headers["x-cache-hit"], miss.headers["x-cache-tokens-reused"]) == (0, "false", "0")
    assert hit.cached > MIN_HIT_TOKENS
    assert (hit.headers["x-cache-hit"], hit.headers["x-cache-tokens-reused"]) == ("true", str(hit.cached))
    assert "x-gpu-time-ms" not in hit.headers, "no accelerator has computed it"
    assert int(hit.headers["x-queue-wait-ms"]) >= 0


def test_tenants_never_hit_the_cache_of_another_tenant(mesh: MeshProcess) -> None:
    tenants = [f"tenant-{number}" for number in range(6)]
    assert [_ask(mesh, tenant, _text("two")).cached for tenant in tenants] == [0] * 6
    assert _ask(mesh, tenants[-1], _text("two")).cached > MIN_HIT_TOKENS
    _ask(mesh, tenants[-1], _text("three"))
    assert _ask(mesh, tenants[0], _text("three")).cached == 0


def _flush(mesh: MeshProcess, **what: str) -> None:
    """Flush, and wait until it has been done."""
    operation, _ = _post(mesh, "/v1/admin/cache/flush", {}, **what)
    name = operation["name"].removeprefix("operations/")
    deadline = time.monotonic() + 30
    while operation["state"] not in {"succeeded", "failed", "cancelled"}:
        assert time.monotonic() < deadline, operation
        time.sleep(0.05)
        with urllib.request.urlopen(f"{mesh.url}/v1/admin/operations/{name}", timeout=30) as response:
            operation = json.load(response)
    assert operation["state"] == "succeeded", operation


def test_flush_evicts_only_its_scope(mesh: MeshProcess) -> None:
    tagged = {"X-Cache-Tag": "draft"}
    text = _text("nine")

    def warm() -> None:
        _ask(mesh, "flushed", text)
        _ask(mesh, "flushed", text, tagged)
        _ask(mesh, "kept", text)

    def found() -> list[bool]:
        answers = (_ask(mesh, "flushed", text), _ask(mesh, "flushed", text, tagged), _ask(mesh, "kept", text))
        return [answer.cached > MIN_HIT_TOKENS for answer in answers]

    warm()
    assert found() == [True, True, True]
    _flush(mesh, scope="tag", tag="draft")
    assert found() == [True, False, True]
    _flush(mesh, scope="tenant", tenant="flushed")
    assert found() == [False, False, True]
    _flush(mesh, scope="model", model=DEMO_MODEL)
    assert found() == [False, False, False]
    _flush(mesh, scope="all")
    assert found() == [False, False, False]
