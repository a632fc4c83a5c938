"""Declaring resources with `weft` against a real mesh: round trips, refusals, adoption, watching, waiting."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from jsonschema import Draft202012Validator
from mesh_process import (
    WEFT,
    MeshProcess,
    eventually,
    fake_runner,
    run_weft,
    running_mesh,
    take_interrupts,
    user_environment,
    write_config,
)
from typer.testing import CliRunner

from weft.documents.schemas import schemas
from weft_app.cli.main import app

READ_SECONDS = 20.0

SOME_OF_EVERYTHING = """\
kind: model
name: cloud
poolName: big
operations: [chat, embedding]
contextTokens: 4096
digest: sha256:0000000000000000000000000000000000000000000000000000000000000000
remote: true
skills: [text, image]
wake:
  byMesh: {type: http, url: "http://127.0.0.1:1/wake", headers: {Authorization: "Bearer ${WEFT_WAKE_TOKEN}"}}
  maxWaitSeconds: 90
---
kind: model
name: pinned
runner: a
wake:
  byRunner: true
  byMesh: {type: wake_on_lan, macAddress: "00:11:22:33:44:55"}
---
kind: agent
name: reviewer
pool: big
description: "Reviews 2026-01-01 - ünïcode"
systemPrompt: |
  Line one.
    Indented, with: a colon # and no comment
  Last.
defaultParams: {max_tokens: 7, temperature: 0, stop: ["\\n", "END"], seed: -5, logit_bias: {5: 1.5}}
---
kind: agent
name: coder-2
model: m-a
---
kind: Route
name: summaries
description: Short ones
candidates: [m-a, big]
budgetSeconds: 90.5
keepAlive: 5m
pinPrimary: true
---
kind: route
name: drafts
candidates: [pool]
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("declarative")
    runner = fake_runner("a")
    runner["agents"] = [
        {"name": "coder", "model": "m-a", "system_prompt": "Be terse.", "default_params": {"temperature": 0.5}}
    ]
    with running_mesh(folder / "home", "--config", str(write_config(folder, runner, fake_runner("b")))) as mesh:
        yield mesh


def _weft(mesh: MeshProcess, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """A command to its end as `run_weft` does, but in this process: a test has many."""
    result = CliRunner().invoke(app, arguments, input=stdin, env={"WEFT_HOME": str(mesh.home), "COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def _nothing_is_left(mesh: MeshProcess) -> Iterator[None]:
    yield
    agents = [f"agent/{name}" for name in ("reviewer", "coder-2", "temporary", "temporary3", "watched")]
    routes = [f"route/{name}" for name in ("summaries", "drafts")]
    models = [f"model/{name}" for name in ("cloud", "pinned", "temporary", "temporary2")]
    code, _, error = _weft(mesh, "delete", *agents, *routes, *models, "--ignore-not-found")
    assert code == 0, error


def _apply(mesh: MeshProcess, text: str, *options: str) -> tuple[int, str, str]:
    return _weft(mesh, "apply", "-f", "-", *options, stdin=text)


def _get(mesh: MeshProcess, *words: str) -> Any:
    code, out, error = _weft(mesh, "get", *words, "-o", "json")
    assert code == 0, error
    return json.loads(out)


async def _http(mesh: MeshProcess, method: str, path: str, body: object = None) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{mesh.url}{path}", json=body, raise_for_status=True) as answer,
    ):
        return await answer.json()


def test_what_is_applied_is_created_then_unchanged_then_configured(mesh: MeshProcess) -> None:
    code, out, error = _apply(mesh, SOME_OF_EVERYTHING)
    assert (code, {line.split()[1] for line in out.splitlines()}) == (0, {"created"}), error
    code, out, _ = _apply(mesh, SOME_OF_EVERYTHING)
    assert (code, {line.split()[1] for line in out.splitlines()}) == (0, {"unchanged"})
    changed = SOME_OF_EVERYTHING.replace("contextTokens: 4096", "contextTokens: 8192")
    code, out, _ = _weft(mesh, "diff", "-f", "-", stdin=changed)
    assert code == 1
    assert "-contextTokens: 4096\n+contextTokens: 8192\n" in out
    code, out, _ = _apply(mesh, changed)
    assert out.splitlines() == [
        "model/cloud configured",
        "model/pinned unchanged",
        "agent/reviewer unchanged",
        "agent/coder-2 unchanged",
        "route/summaries unchanged",
        "route/drafts unchanged",
    ]
    cloud = _get(mesh, "model", "cloud")
    assert (cloud["contextTokens"], cloud["status"]["kind"], cloud["remote"]) == (8192, "public", True)
    assert cloud["wake"]["byMesh"]["headers"] == {"Authorization": "Bearer ${WEFT_WAKE_TOKEN}"}
    reviewer = _get(mesh, "agent", "reviewer")
    assert reviewer["systemPrompt"] == "Line one.\n  Indented, with: a colon # and no comment\nLast.\n"
    assert reviewer["defaultParams"]["temperature"] == 0


@pytest.mark.parametrize("output", ["yaml", "json"])
@pytest.mark.parametrize("kind", ["models", "agents", "runners", "pools", "routes"])
def test_what_was_got_is_applied_without_a_change(mesh: MeshProcess, kind: str, output: str) -> None:
    assert _apply(mesh, SOME_OF_EVERYTHING)[0] == 0
    _, names, _ = _weft(mesh, "get", kind, "-o", "name")
    assert len(names.splitlines()) >= 2
    for words in ((kind,), (names.splitlines()[0],), (names.splitlines()[-1],)):
        code, got, error = _weft(mesh, "get", *words, "-o", output)
        assert code == 0, error
        code, out, error = _apply(mesh, got)
        assert code == 0, error
        assert {line.split()[1] for line in out.splitlines()} == {"unchanged"}


@pytest.mark.parametrize("kind", ["model", "agent", "runner", "pool", "route"])
def test_json_of_a_real_mesh_holds_to_the_published_schemas(mesh: MeshProcess, kind: str) -> None:
    assert _apply(mesh, SOME_OF_EVERYTHING)[0] == 0
    Draft202012Validator(schemas()[f"{kind}-list.json"]).validate(_get(mesh, f"{kind}s"))
    code, out, _ = _weft(mesh, "events", kind, "-o", "json")
    assert code == 0
    Draft202012Validator(schemas()["event-list.json"]).validate(json.loads(out))


@pytest.mark.parametrize(
    ("middle", "code"),
    [
        ("kind: agent\nname: [\n", 2),
        ("kind: agent\nname: broken\nmodel: m-a\nmodle: m-a\n", 2),
        ("kind: agent\nname: broken\nmodel: no-such-model\n", 3),
        ("kind: model\nname: coder\n", 4),
        ("kind: agent\nname: coder\nmodel: m-b\n", 4),
        ("kind: runner\nname: nobody\n", 3),
        ("kind: pool\nname: pool\nmembers: [m-a]\n", 2),
    ],
)
def test_one_bad_document_in_the_middle_applies_nothing(mesh: MeshProcess, middle: str, code: int) -> None:
    text = f"kind: model\nname: temporary\n---\n{middle}---\nkind: agent\nname: temporary3\nmodel: m-a\n"
    found, out, error = _apply(mesh, text)
    assert (found, out) == (code, ""), error
    assert error.startswith("weft: ")
    assert "Traceback" not in error
    assert _weft(mesh, "get", "model", "temporary")[0] == 3
    assert _weft(mesh, "get", "agent", "temporary3")[0] == 3


def test_a_virtual_resource_becomes_a_public_one_only_when_adopted(mesh: MeshProcess) -> None:
    _, got, _ = _weft(mesh, "get", "agent", "coder", "-o", "yaml")
    terser = got.replace("Be terse.", "Be terser.")
    code, _, error = _apply(mesh, terser)
    assert code == 4
    assert "--adopt" in error
    code, out, _ = _apply(mesh, terser, "--adopt", "--dry-run")
    assert (code, out) == (0, "agent/coder configured (dry run)\n")
    assert (_get(mesh, "agent", "coder"))["status"]["kind"] == "virtual"
    code, out, _ = _apply(mesh, terser, "--adopt")
    assert (code, out) == (0, "agent/coder configured\n")
    adopted = _get(mesh, "agent", "coder")
    assert (adopted["status"]["kind"], adopted["systemPrompt"]) == ("public", "Be terser.")


def test_a_model_in_use_is_not_deleted(mesh: MeshProcess) -> None:
    _apply(mesh, "kind: model\nname: temporary\n---\nkind: agent\nname: temporary3\nmodel: temporary\n")
    assert _weft(mesh, "delete", "model", "temporary")[0] == 4
    code, out, _ = _weft(mesh, "delete", "model/temporary", "agent/temporary3")
    assert (code, out) == (0, "agent/temporary3 deleted\nmodel/temporary deleted\n")
    assert _weft(mesh, "delete", "model", "temporary")[0] == 3


async def test_a_route_is_declared_listed_and_in_the_way_of_what_it_names(mesh: MeshProcess) -> None:
    assert _apply(mesh, SOME_OF_EVERYTHING)[0] == 0
    summaries = _get(mesh, "route", "summaries")
    assert (summaries["candidates"], summaries["budgetSeconds"], summaries["keepAlive"]) == (["m-a", "big"], 90.5, 300)
    assert summaries["status"]["state"] == "active"

    # The gateway follows the registry's watch, a moment behind what was declared.
    async def drafts() -> Any:
        listed = {entry["id"]: entry["meta"] for entry in (await _http(mesh, "GET", "/v1/models"))["data"]}
        return listed.get("route/drafts")

    assert (await eventually(drafts, 10.0, "the route is not listed"))["members"] == ["m-a", "m-b"]
    meta = (await _http(mesh, "GET", "/v1/models/route/summaries"))["meta"]
    assert (meta["route"], meta["candidates"]) == (True, ["m-a", "big"])
    code, out, error = _weft(mesh, "delete", "model", "cloud")
    assert (code, out) == (4, "")
    assert "in use by agents: reviewer; by routes: summaries" in error
    assert _weft(mesh, "wait", "route/summaries", "--timeout", "0")[0] == 0


async def test_what_is_set_for_the_mesh_is_the_same_on_every_surface(mesh: MeshProcess) -> None:
    off = {"allowCloudFallback": False}
    assert await _http(mesh, "PUT", "/api/v1/config", off) == off
    assert json.loads(_weft(mesh, "config", "get", "-o", "json")[1]) == {"allowCloudFallback": False}
    assert _weft(mesh, "config", "set", "allowCloudFallback=true")[0] == 0
    assert await _http(mesh, "GET", "/api/v1/config") == {"allowCloudFallback": True}
    events = json.loads(_weft(mesh, "events", "-o", "json")[1])
    Draft202012Validator(schemas()["event-list.json"]).validate(events)
    told = [event for event in events["items"] if event["resourceKind"] == "mesh"]
    assert [event["resourceName"] for event in told[-2:]] == ["settings", "settings"]
    assert "mesh/settings" in _weft(mesh, "events")[1]


@asynccontextmanager
async def _running(mesh: MeshProcess, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *WEFT,
        *arguments,
        env={**user_environment(), "WEFT_HOME": str(mesh.home)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=take_interrupts,
    )
    try:
        async with asyncio.timeout(READ_SECONDS):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    if line := await process.stdout.readline():
        return line.decode()
    _, error = await process.communicate()
    raise AssertionError(f"it ended with {process.returncode} and said no more than: {error.decode()}")


async def test_a_watch_shows_changes_as_they_come_and_ends_well_with_ctrl_c(mesh: MeshProcess) -> None:
    async with _running(mesh, "get", "agents", "-w") as process:
        assert (await _line(process)).split()[0] == "NAME"
        assert (await _line(process)).split()[0] == "coder"
        _apply(mesh, "kind: agent\nname: temporary\npool: pool\ndescription: Hello\n")
        assert (await _line(process)).split() == ["temporary", "declared", "active", "pool/pool", "Hello"]
        _weft(mesh, "delete", "agent", "temporary")
        assert (await _line(process)).split()[:3] == ["temporary", "-", "deleted"]
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


async def test_a_watch_in_json_and_events_follow_too(mesh: MeshProcess) -> None:
    async with (
        _running(mesh, "get", "model", "m-a", "-w", "-o", "json") as models,
        _running(mesh, "events", "agent", "watched", "-w", "-o", "json") as events,
    ):
        assert json.loads(await _line(models))["name"] == "m-a"
        _apply(mesh, "kind: agent\nname: watched\nmodel: m-a\n")
        while json.loads(await _line(events))["reason"] != "created":
            pass
        _weft(mesh, "delete", "agent", "watched")
        assert json.loads(await _line(events))["reason"] == "deleted"


async def test_wait_ends_with_what_it_waits_for(mesh: MeshProcess) -> None:
    async with _running(mesh, "wait", "agent", "temporary", "--for", "status=active") as process:
        _apply(mesh, "kind: agent\nname: temporary\nmodel: m-a\n")
        assert await process.wait() == 0
    async with _running(mesh, "wait", "agent", "temporary", "--for", "delete") as process:
        _weft(mesh, "delete", "agent", "temporary")
        assert await process.wait() == 0
    for target in ("model/m-a", "agent/coder", "runner/a", "pool/pool"):
        assert _weft(mesh, "wait", target)[0] == 0
    code, _, error = _weft(mesh, "wait", "agent/coder", "--for", "delete", "--timeout", "1s")
    assert (code, "it is active" in error) == (5, True)


async def test_describe_tells_conditions_pool_process_and_events(mesh: MeshProcess) -> None:
    code, out, _ = _weft(mesh, "describe", "model", "m-a")
    assert code == 0
    assert str((await mesh.describe("a")).process_id) in out
    assert "listening on" in out, "the backend's last lines"
    assert "registered" in out
    for target in ("agent/coder", "runner/a", "pool/pool"):
        assert _weft(mesh, "describe", target)[0] == 0


def test_agents_are_chatted_with_by_their_plain_name(mesh: MeshProcess) -> None:
    for name in ("coder", "agent/coder", "pool", "m-a"):
        code, out, error = _weft(mesh, "chat", name, "-m", "hi")
        assert (code, bool(out.strip())) == (0, True), error
    assert _weft(mesh, "chat", "nobody", "-m", "hi")[0] == 3


def test_routes_are_chatted_with_by_their_plain_name(mesh: MeshProcess) -> None:
    assert _apply(mesh, "kind: route\nname: drafts\ncandidates: [pool]\nbudgetSeconds: 60\nkeepAlive: 5m\n")[0] == 0
    for name in ("drafts", "route/drafts"):
        code, out, error = _weft(mesh, "chat", name, "-m", "hi")
        assert (code, bool(out.strip())) == (0, True), error
    assert _weft(mesh, "chat", "route/nobody", "-m", "hi")[0] == 3


async def test_names_are_completed_from_the_running_mesh(mesh: MeshProcess) -> None:
    line = "weft describe model m-"
    process = await asyncio.create_subprocess_exec(
        *WEFT[:1],
        "-c",
        "from weft_app.cli.main import app; app(prog_name='weft')",
        env={
            **os.environ,
            "WEFT_HOME": str(mesh.home),
            "_WEFT_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": "3",
        },
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert out.decode().split() == ["m-a", "m-b"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("get", "models"), 0),
        (("get", "widgets"), 3),
        (("get", "model", "nix"), 3),
        (("apply", "-f", "/nowhere.yaml"), 2),
        (("delete", "pool", "pool"), 2),
        (("wait", "model/nix", "--for", "exists", "--timeout", "0"), 5),
        (("nonsense",), 2),
    ],
)
async def test_exit_codes_are_as_documented(mesh: MeshProcess, arguments: tuple[str, ...], code: int) -> None:
    found, _, error = await run_weft(*arguments, home=mesh.home)
    assert found == code, error


def test_a_folder_of_files_is_applied_as_one(mesh: MeshProcess, tmp_path: Path) -> None:
    (tmp_path / "1.yaml").write_text("kind: agent\nname: temporary\nmodel: temporary2\n")
    (tmp_path / "2.json").write_text('{"kind": "model", "name": "temporary2"}')
    code, out, error = _weft(mesh, "apply", "-f", str(tmp_path))
    assert (code, out) == (0, "agent/temporary created\nmodel/temporary2 created\n"), error
