"""A misspelt name: every command and every API repeats it and names the close one."""

from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from kit.library_words import library_words
from mesh_process import MeshProcess, run_weft, running_mesh
from test_memory_swap import two_models

# test_memory_swap.two_models: `first` is loaded, `second` sleeps, on a declared device of 3000 MB of the runner `box`.
CLOSE = "first"
TYPED = "frist"
DID_YOU_MEAN = f"{TYPED}; did you mean {CLOSE}?"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("errors")
    with running_mesh(folder / "home", "--config", str(two_models(folder))) as running:
        yield running


async def _refusal(mesh: MeshProcess, *arguments: str, code: int) -> str:
    found, out, error = await run_weft(*arguments, home=mesh.home)
    assert (found, library_words(error)) == (code, []), (out, error)
    return error


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("chat", TYPED, "hi"), "model, pool, agent, route or workflow"),
        (("chat", TYPED, "hi", "--async"), "model, pool, agent, route or workflow"),
        (("get", "model", TYPED), "model"),
        (("get", "pool", TYPED), "pool"),
        (("describe", "model", TYPED), "model"),
        (("delete", "model", TYPED), "model"),
        (("logs", TYPED), "model, runner or service"),
        (("load", TYPED), "model or pool"),
        (("unload", TYPED), "model or pool"),
        (("models", "flush", "--model", TYPED), "model or pool"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
)
async def test_every_command_reports_the_unknown_model_and_the_closest_match(
    mesh: MeshProcess, arguments: tuple[str, ...], kind: str
) -> None:
    assert f"there is no {kind} {DID_YOU_MEAN.removesuffix('?')}" in await _refusal(mesh, *arguments, code=3)


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {"model": TYPED, **CHAT}),
        ("POST", "/v1/embeddings", {"model": TYPED, "input": "x"}),
        ("POST", "/v1/responses", {"model": TYPED, "input": "x"}),
        ("POST", "/v1/messages", {"model": TYPED, **CHAT}),
        ("POST", "/api/chat", {"model": TYPED, **CHAT}),
        ("POST", "/api/show", {"model": TYPED}),
        ("GET", f"/v1/models/{TYPED}", None),
        ("GET", f"/v1/admin/models/{TYPED}", None),
        ("POST", f"/v1/admin/models/{TYPED}/load", {}),
        ("GET", f"/api/v1/models/{TYPED}", None),
        ("DELETE", f"/api/v1/models/{TYPED}", None),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
async def test_every_api_reports_the_unknown_model_and_lists_close_matches(
    mesh: MeshProcess, method: str, path: str, body: dict[str, Any] | None
) -> None:
    async with aiohttp.ClientSession() as http, http.request(method, f"{mesh.url}{path}", json=body) as response:
        document = await response.json()
    error = document["error"] if isinstance(document["error"], dict) else document
    words = document["error"] if isinstance(document["error"], str) else error["message"]
    assert (response.status, error["code"], error["close_names"]) == (404, "model_not_found", [CLOSE])
    assert f" {DID_YOU_MEAN}" in words
