"""weft.yaml is read again while a mesh runs: what changed drains, what is wrong changes nothing, all else goes on."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from chats import chat
from kit.listing_server import listing_server
from mesh_process import COLD_WEFT, MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config

from runner_svc.added_models_file import SUFFIX

pytestmark = pytest.mark.timeout(300)

PACE = 25.0
"""Tokens per second of the fakes: an answer of 100 takes 4 s."""


def _model(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "path": __file__, "slots": 2, **settings}


def _runner(name: str, *models: dict[str, Any], **settings: Any) -> dict[str, Any]:
    fake = fake_runner(name, answer_tokens=100, tokens_per_second=PACE)
    return {**fake, "models": list(models), **settings}


BOX = _runner("box", _model("steady"), _model("other"))


class Reloadable:
    """A mesh and its file."""

    def __init__(self, mesh: MeshProcess, folder: Path) -> None:
        self.mesh = mesh
        self.folder = folder

    def write(self, *runners: dict[str, Any], **sections: Any) -> None:
        write_config(self.folder, *runners, **sections)

    async def weft(self, *words: str) -> tuple[int, str, str]:
        return await run_weft(*words, home=self.mesh.home)

    async def reload(self, *options: str) -> dict[str, Any]:
        code, out, error = await self.weft("mesh", "reload", "-o", "json", *options)
        assert code == 0, error
        found: dict[str, Any] = json.loads(out)
        return found

    async def names(self, kind: str = "models") -> list[str]:
        code, out, error = await self.weft("get", kind, "-o", "json")
        assert code == 0, error
        return [item["name"] for item in json.loads(out)["items"]]

    async def instances(self) -> dict[str, Any]:
        """Process and slots of each model, as `weft ps` has them."""
        code, out, error = await self.weft("ps", "-o", "json")
        assert code == 0, error
        return {item["model"]: item for item in json.loads(out)["items"]}

    async def ask(self, model: str, tenant: str = "t", **fields: Any) -> int:
        return (await chat(self.mesh.url, model, headers={"X-Tenant-Id": tenant}, **{"max_tokens": 2, **fields}))[0]

    @asynccontextmanager
    async def stream(self, model: str, tokens: int) -> AsyncIterator["asyncio.Task[list[str]]"]:
        """An answer that has begun; the task returns its content, and fails where it does not end in order."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "stream": True,
        }
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
            http.post(f"{self.mesh.url}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            begun = asyncio.Event()
            task = asyncio.create_task(_content(response, begun))
            await asyncio.wait_for(begun.wait(), 30)
            yield task
            await task


async def _content(response: aiohttp.ClientResponse, begun: asyncio.Event) -> list[str]:
    pieces: list[str] = []
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return pieces
        event = json.loads(data)
        assert "error" not in event, event
        pieces += [text for choice in event["choices"] if (text := choice["delta"].get("content"))]
        if pieces:
            begun.set()
    raise AssertionError("the stream ended without its end")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloadable]:
    folder = tmp_path_factory.mktemp("reload")
    with running_mesh(folder / "home", "--config", str(write_config(folder, BOX))) as mesh:
        yield Reloadable(mesh, folder)


_OF_RELOADS = ("pid", "state", "slotsTotal", "contextTokens")
"""What reloads change."""


@pytest.fixture
async def mesh(running: Reloadable) -> Reloadable:
    """The mesh with the first configuration in force."""
    running.write(BOX)
    await running.reload()
    return running


def _slow_command() -> list[str]:
    return list(_runner("box", command=fake_runner("x", answer_tokens=1000, tokens_per_second=8)["command"])["command"])


async def test_changed_model_finishes_its_requests_and_restarts_with_new_settings(mesh: Reloadable) -> None:
    assert await mesh.ask("steady") == 200
    before = await mesh.instances()
    async with mesh.stream("other", 100) as answer:
        mesh.write({**BOX, "models": [_model("steady"), _model("other", slots=3)]})
        beside = ["other is loaded beside the old one, which ends with its last request"]
        assert (await mesh.reload("--dry-run"))["notes"] == beside
        found = await mesh.reload()
        (change,) = found["changes"]
        assert found["notes"] == beside
        assert (change["name"], change["effect"]) == ("other", "model_reload")
        assert change["settings"] == [{"name": "slots", "before": 2, "after": 3}]
        assert await mesh.ask("other") == 200, "a request that comes meanwhile is served by the new one"
    assert len(answer.result()) == 100
    after = await mesh.instances()
    assert after["other"]["pid"] != before["other"]["pid"]
    assert after["other"]["slotsTotal"] == 3
    assert after["steady"]["pid"] == before["steady"]["pid"]


@pytest.mark.nightly("swaps models in a reload")
async def test_changed_model_that_does_not_fit_beside_the_old_one_loads_after_it(tmp_path: Path) -> None:
    """Both were in memory until the old one was idle, or the new one took the memory of other models."""
    device = {"nvidia": False, "declared": [{"name": "card", "memory_mb": 4096}]}

    def box(slots: int) -> dict[str, Any]:
        # 512 MiB are the ledger's margin.
        models = _model("big", memory_mb=2500, slots=slots), _model("small", memory_mb=500)
        return _runner("box", *models, command=_slow_command())

    path = write_config(tmp_path, box(2), accelerators=device)
    with running_mesh(tmp_path / "home", "--config", str(path)) as host:
        mesh = Reloadable(host, tmp_path)
        before = await mesh.instances()
        mesh.write(box(3), accelerators=device)
        (said,) = (await mesh.reload("--dry-run"))["notes"]
        assert said.startswith("big is loaded once the old one has ended with its last request: it needs ")
        async with mesh.stream("big", 56) as answer:
            assert (await mesh.reload())["notes"] == [said]
            waiting = asyncio.create_task(mesh.ask("big"))
            assert not answer.done(), "the reload does not wait for the request"
            assert not (await mesh.instances())["big"]["pid"], "nothing of the new one is in memory yet"
            assert psutil.pid_exists(before["big"]["pid"])
        assert len(answer.result()) == 56
        assert await waiting == 200, "a request that came meanwhile waits for the new one"
        after = await mesh.instances()
        assert (after["big"]["slotsTotal"], after["small"]["pid"]) == (3, before["small"]["pid"])
        assert not psutil.pid_exists(before["big"]["pid"])


async def test_removed_config_entries_leave_the_mesh_immediately(mesh: Reloadable) -> None:
    mesh.write(BOX, _runner("guest", _model("visitor", pool="guests")))
    await mesh.reload()
    assert await mesh.ask("visitor") == 200
    assert await mesh.names("pools") == ["guests", "other", "steady"]
    mesh.write({**BOX, "models": [_model("steady")]})
    found = await mesh.reload()
    assert {(each["kind"], each["name"], each["action"]) for each in found["changes"]} == {
        ("runner", "guest", "removed"),
        ("model", "visitor", "removed"),
        ("model", "other", "removed"),
    }
    assert await mesh.names() == ["steady"]
    assert await mesh.names("pools") == ["steady"]
    assert await mesh.names("runners") == ["box"]
    assert await mesh.ask("visitor") == 404


async def test_reload_lists_servers_attached_to_a_removed_runner(mesh: Reloadable) -> None:
    """They were gone without a word; the next start alone said so."""
    mesh.write(BOX, _runner("guest", _model("visitor")))
    await mesh.reload()
    file = mesh.mesh.home / "state" / "runners" / f"guest{SUFFIX}"
    file.write_text('{"models": [{"name": "ollama"}]}')
    said = (
        "ollama: added to the runner guest, which the configuration does not have; name a runner guest in it, "
        f"attach or load them again, or delete {file} to forget them"
    )
    mesh.write(BOX)
    assert said in (await mesh.reload("--dry-run"))["notes"]
    assert said in (await mesh.reload())["notes"]
    assert said not in (await mesh.reload())["notes"], "said once, by the reload that loses it"


async def test_running_request_of_a_removed_model_finishes(mesh: Reloadable) -> None:
    async with mesh.stream("other", 60) as answer:
        mesh.write({**BOX, "models": [_model("steady")]})
        found = await mesh.reload()
        assert found["notes"] == ["other is removed after 1 request that runs"]
        assert await mesh.names() == ["steady"]
    assert len(answer.result()) == 60


async def test_sighup_reloads(mesh: Reloadable) -> None:
    mesh.write({**BOX, "models": [_model("steady"), _model("other"), _model("third")]})
    mesh.mesh.process.send_signal(signal.SIGHUP)

    async def has_come() -> bool:
        return await mesh.names() == ["other", "steady", "third"]

    await _until(has_come)


async def test_invalid_file_reports_all_errors_and_changes_nothing(mesh: Reloadable) -> None:
    async def are_ready() -> bool:
        return all(each["state"] == "ready" for each in (await mesh.instances()).values())

    # The test before this one may have removed a model, which is loaded again.
    await _until(are_ready)
    before = await mesh.instances()
    wrong = {**BOX, "models": [_model("steady", slots=0), _model("late", pool="box")], "max_request": 3}
    mesh.write(wrong, prot=1)
    code, _, error = await mesh.weft("mesh", "reload")
    assert code == 2
    for words in (
        "max_request: is not a setting; did you mean max_requests?",
        "prot: is not",
        "slots: must be at least 1",
    ):
        assert words in error, error
    after = await mesh.instances()
    # Memory and kept prompts of engines change by themselves.
    assert after.keys() == before.keys()
    for name, each in after.items():
        assert [each[key] for key in _OF_RELOADS] == [before[name][key] for key in _OF_RELOADS]
    # A runner that dies now comes back as it was.
    (runner,) = [pid for name, pid in _facts(mesh)["pids"]["runners"].items() if name == "box"]
    psutil.Process(runner).kill()

    async def is_back() -> bool:
        found = await mesh.instances()
        return set(found) == {"other", "steady"} and all(
            each["state"] == "ready" and each["pid"] not in (0, before[name]["pid"]) for name, each in found.items()
        )

    await _until(is_back)


async def test_limits_apply_immediately_and_a_changed_port_is_reported_as_pending(mesh: Reloadable) -> None:
    assert await mesh.ask("steady", "limited") == 200
    limits = {"rate_limits": {"tenants": {"limited": ["1req/hour"]}}}
    async with mesh.stream("steady", 100) as answer:
        mesh.write(BOX, router=limits, gateway={"max_body_bytes": 1024}, grpc_port=1)
        found = {each["name"]: each["effect"] for each in (await mesh.reload())["changes"]}
        assert found == {
            "router.rate_limits": "live",
            "gateway.max_body_bytes": "live",
            "grpc_port": "mesh_restart",
        }
        assert [await mesh.ask("steady", "limited") for _ in range(2)] == [200, 429]
        assert await mesh.ask("steady", "x" * 40) == 200
        assert await mesh.ask("steady", messages=[{"role": "user", "content": "x" * 2000}]) == 413
    assert len(answer.result()) == 100
    again = (await mesh.reload())["changes"]
    assert [(each["name"], each["effect"]) for each in again] == [("grpc_port", "mesh_restart")], "it still waits"


async def test_config_aliases_are_added_changed_and_removed_by_a_reload(mesh: Reloadable) -> None:
    async def reload(*aliases: dict[str, str]) -> list[str]:
        mesh.write(BOX, **({"registry": {"aliases": list(aliases)}} if aliases else {}))
        return [f"{each['name']} {each['effect']}" for each in (await mesh.reload())["changes"]]

    assert await mesh.ask("claude-sonnet") == 404
    assert await reload({"name": "fast", "target": "steady"}) == ["registry.aliases live"]
    assert await mesh.names("aliases") == ["fast"]
    assert await mesh.ask("fast") == 200
    await reload({"name": "fast", "pattern": "claude-*", "target": "steady"}, {"name": "late", "target": "other"})
    assert [await mesh.ask(name) for name in ("claude-sonnet", "late", "fast")] == [200, 200, 404]
    # One that an operator declares comes before one of the file, also when the file changes.
    manifest = mesh.folder / "alias.yaml"
    manifest.write_text(json.dumps({"kind": "alias", "name": "late", "target": "steady"}))
    code, _, error = await mesh.weft("apply", "-f", str(manifest))
    assert code == 0, error
    await reload({"name": "late", "target": "nothing-there"})
    assert [await mesh.ask(name) for name in ("late", "claude-sonnet")] == [200, 404]
    code, _, error = await mesh.weft("delete", "alias", "late")
    assert code == 0, error
    assert await reload() == ["registry.aliases live"]
    assert await mesh.names("aliases") == []
    assert await mesh.ask("late") == 404


async def test_model_created_right_before_a_reload_refuses_no_request(mesh: Reloadable) -> None:
    """It answered 503 "no heartbeat" for 5 s."""
    mesh.write(BOX, _runner("guest", _model("visitor")))
    with listing_server("frontier", is_ollama=False) as server:
        provider = {"url": f"http://{server.address}/v1"}
        document = {"kind": "model", "name": "frontier", "operations": ["chat"], "provider": provider}
        async with (
            aiohttp.ClientSession() as http,
            # `weft models create` takes so long to exit that the model may be served by then.
            http.post(f"{mesh.mesh.url}/api/v1/apply", json={"documents": [document]}) as response,
        ):
            assert response.status == 200, await response.text()
        reloading = asyncio.create_task(mesh.reload())
        statuses = [await mesh.ask("frontier", allow_remote=True)]
        while not reloading.done():
            statuses.append(await mesh.ask("frontier", allow_remote=True))
        await reloading
        statuses.append(await mesh.ask("frontier", allow_remote=True))
        code, _, error = await mesh.weft("delete", "model", "frontier")
    assert (code, set(statuses)) == (0, {200}), error


async def test_runner_with_changed_settings_restarts_while_requests_wait(mesh: Reloadable) -> None:
    async with mesh.stream("steady", 60) as answer:
        mesh.write({**BOX, "max_requests": 7})
        reloading = asyncio.create_task(mesh.reload())
        statuses = []
        while not reloading.done():
            statuses.append(await mesh.ask("other"))
        (change,) = reloading.result()["changes"]
    assert change["effect"] == "runner_restart"
    assert len(answer.result()) == 60, "its requests are finished first"
    assert set(statuses) <= {200, 503}
    assert statuses[-1] == 200
    assert await mesh.names() == ["other", "steady"]


@pytest.mark.nightly("kills a mesh in a reload")
async def test_mesh_killed_during_a_reload_starts_with_the_file_config(tmp_path: Path) -> None:
    path = write_config(tmp_path, BOX, _runner("guest", _model("visitor")))
    home = tmp_path / "home"
    with running_mesh(home, "--config", str(path)) as host:
        mesh = Reloadable(host, tmp_path)
        async with aiohttp.ClientSession() as http:
            body = {"model": "steady", "messages": [{"role": "user", "content": "hi"}], "stream": True}
            async with http.post(f"{host.url}/v1/chat/completions", json=body) as response:
                await response.content.readany()
                mesh.write({**BOX, "max_requests": 7, "models": [_model("steady"), _model("third")]})
                reloading = asyncio.create_task(mesh.weft("mesh", "reload"))
                # The runner drains: the request runs for 4 s.
                snapshot = home / "run" / "config.yaml"
                await _until(lambda: "third" in snapshot.read_text())
                assert not reloading.done()
                host.stop(signal.SIGKILL)
        code, _, error = await reloading
        assert code != 0, error
    with running_mesh(home, "--config", str(path)) as host:
        mesh = Reloadable(host, tmp_path)
        assert await mesh.names() == ["steady", "third"]
        assert await mesh.names("runners") == ["box"]
        assert await mesh.ask("third") == 200


async def test_watched_file_is_reloaded_when_it_changes(tmp_path: Path) -> None:
    path = write_config(tmp_path, _runner("box", _model("steady")))
    with running_mesh(tmp_path / "home", "--config", str(path), "--watch") as host:
        mesh = Reloadable(host, tmp_path)
        mesh.write(_runner("box", _model("steady"), _model("late")))

        async def has_come() -> bool:
            return await mesh.names() == ["late", "steady"]

        await _until(has_come)
        path.write_text("runners: [\n")
        output = tmp_path / "home.out"
        await _until(lambda: "the configuration is not reloaded" in output.read_text())
        assert await mesh.names() == ["late", "steady"]
        code, out, error = await mesh.weft("status")
        assert (code, f"Config:       {path}" in out) == (0, True), (out, error)


async def test_restart_applies_what_a_reload_cannot_and_keeps_the_pid(tmp_path: Path) -> None:
    path, home = write_config(tmp_path, BOX), tmp_path / "home"
    # The process starts itself again by its own command line: it must be the one that was typed.
    with running_mesh(home, "--config", str(path), weft=COLD_WEFT) as host:
        mesh = Reloadable(host, tmp_path)
        mesh.write(BOX, drain_seconds=7.0)
        (change,) = (await mesh.reload())["changes"]
        assert (change["name"], change["effect"]) == ("drain_seconds", "mesh_restart")
        before = _facts(mesh)
        code, out, error = await mesh.weft("mesh", "restart")
        assert code == 0, error
        assert "serves again at" in out
        after = _facts(mesh)
        assert after["pids"]["host"] == before["pids"]["host"] == host.process.pid
        assert after["pids"]["runners"] != before["pids"]["runners"]
        host.facts = after
        assert (await mesh.reload())["changes"] == []
        assert await mesh.ask("steady") == 200


def _facts(mesh: Reloadable) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((mesh.mesh.home / "run" / "up.json").read_text())
    return found


async def _until(condition: Callable[[], Any]) -> None:
    await eventually(condition, 60.0, "it has not come")
