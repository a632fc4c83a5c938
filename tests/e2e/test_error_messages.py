"""What users are told who mistype: the row of each command names what was typed, and what to type instead."""

import json
from collections.abc import Iterator
from pathlib import Path
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
        (("flush", "--model", TYPED), "model or pool"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
)
async def test_every_command_names_the_unknown_model_and_the_close_one(
    mesh: MeshProcess, arguments: tuple[str, ...], kind: str
) -> None:
    assert f"there is no {kind} {DID_YOU_MEAN.removesuffix('?')}" in await _refusal(mesh, *arguments, code=3)


async def test_waiting_for_an_unknown_model_names_the_close_one(mesh: MeshProcess) -> None:
    error = await _refusal(mesh, "wait", "model", TYPED, "--timeout", "0", code=5)
    assert f"there is no model {DID_YOU_MEAN}" in error


async def test_a_line_of_a_batch_with_an_unknown_model_is_refused_with_the_close_one(
    mesh: MeshProcess, tmp_path: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"model": name, **body}}
        for name in (CLOSE, TYPED)
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    error = await _refusal(mesh, "batch", "submit", str(file), code=1)
    assert "line 2" in error
    assert DID_YOU_MEAN in error


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
async def test_every_api_names_the_unknown_model_and_lists_the_close_ones(
    mesh: MeshProcess, method: str, path: str, body: dict[str, Any] | None
) -> None:
    async with aiohttp.ClientSession() as http, http.request(method, f"{mesh.url}{path}", json=body) as response:
        document = await response.json()
    error = document["error"] if isinstance(document["error"], dict) else document
    words = document["error"] if isinstance(document["error"], str) else error["message"]
    assert (response.status, error["code"], error["close_names"]) == (404, "model_not_found", [CLOSE])
    assert f" {DID_YOU_MEAN}" in words


@pytest.mark.parametrize(
    ("arguments", "begin", "words"),
    [
        (("load", CLOSE, "--set", "foo=1"), "weft: --set foo: ", "cannot be set"),
        (("load", CLOSE, "--keep-alive", "soon"), "weft: --keep-alive: ", "must be"),
        (("load", CLOSE, "--evict", "no such"), "weft: --evict: ", "must be"),
        (("lease", "acquire", "--memory", "300", "--", "echo"), "weft: --memory: ", "write 300MiB or 300GiB"),
        (("wait", "model", CLOSE, "--for", "redy"), "weft: --for: ", "must be ready"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
)
async def test_a_wrong_flag_is_named_as_it_was_typed(
    mesh: MeshProcess, arguments: tuple[str, ...], begin: str, words: str
) -> None:
    error = await _refusal(mesh, *arguments, code=2)
    assert error.startswith(begin), error
    assert words in error


async def test_a_flush_of_nothing_says_which_flags_there_are_and_names_none_that_was_not_typed(
    mesh: MeshProcess,
) -> None:
    error = await _refusal(mesh, "flush", code=2)
    assert error.startswith("weft: say what to flush: --all, --model NAME"), error


async def test_a_lease_that_can_never_be_is_answered_in_words_for_a_program(mesh: MeshProcess) -> None:
    error = await _refusal(mesh, "lease", "acquire", "--memory", "20GiB", "--", "echo", code=1)
    assert "echo needs 20 GiB" in error
    assert error.rstrip().endswith("even when they are empty; ask for less")


async def test_waiting_for_ready_is_taken(mesh: MeshProcess) -> None:
    assert (await run_weft("wait", "model", CLOSE, "--for", "ready", home=mesh.home))[0] == 0


async def test_cancelling_a_request_by_its_id_alone_is_taken(mesh: MeshProcess) -> None:
    error = await _refusal(mesh, "cancel", "req-nothing", code=3)
    assert "no request req-nothing" in error
    other = await _refusal(mesh, "cancel", "batch-5f0c", code=3)
    assert "batch" in other


async def test_a_role_that_is_none_is_answered_with_the_roles(mesh: MeshProcess) -> None:
    error = await _refusal(mesh, "keys", "create", "x", "--role", "owner", code=2)
    assert "'owner' is not one of 'user', 'viewer', 'operator', 'admin', 'service'" in " ".join(error.split())


async def test_a_message_behind_the_name_is_taken(mesh: MeshProcess) -> None:
    code, out, _ = await run_weft("chat", CLOSE, "hello there", home=mesh.home)
    assert (code, bool(out.strip())) == (0, True)
