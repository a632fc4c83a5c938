"""A laptop that dials out: real processes, real sockets."""

import asyncio
import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest
import yaml
from chats import answers
from join_process import (
    BACKEND_KEY,
    JoinProcess,
    capturing_proxy,
    laptop_server,
    make_token,
    relay_facts,
    running_join,
)
from kit.envoy import running_envoy
from kit.fake_backend import run_fake_backend
from mesh_process import MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config

from weft.api.common.v1 import tokenize_pb2
from weft.api.registry.v1 import runner_pb2
from weft.api.router.v1 import inference_service_pb2, inference_service_pb2_grpc
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.kernel.channels.rpc import open_channel
from weft.kernel.values.address import metadata_of, relayed_address
from weft_app.cli.options import EXIT_CONFLICT
from weft_testing.conformance.runner_under_test import attach
from weft_testing.fake_backend.process import FakeBackendProcess
from weft_testing.free_port import free_port

RELAY_PROXY = Path(__file__).parents[2] / "deploy" / "envoy" / "relay.yaml"
INACTIVE = runner_pb2.Runner.STATUS_INACTIVE


@pytest.fixture(scope="module")
def plain_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("relay")
    config = write_config(folder, relay={"listen": "127.0.0.1:0"})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


_TOKENS: dict[Path, str] = {}


async def _token(mesh: MeshProcess) -> str:
    """One token for all homes here, so that they share the name `laptop`."""
    if mesh.home not in _TOKENS:
        _TOKENS[mesh.home] = (await make_token(mesh.home, "--reusable"))["token"]
    return _TOKENS[mesh.home]


class Reachable(Protocol):
    """A mesh that answers over HTTP."""

    url: str


async def _ready(url: str) -> None:
    await eventually(partial(answers, url, "llama"), 15.0, "llama does not answer")


def _body(model: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **changes}


async def _events(mesh: Reachable | MeshProcess, on_content: Any = None, **changes: Any) -> list[dict[str, Any]]:
    """The events of a stream; `on_content` is awaited with the number of contents so far."""
    events: list[dict[str, Any]] = []
    contents = 0
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{mesh.url}/v1/chat/completions", json=_body(stream=True, **changes)) as answer,
    ):
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            events.append(json.loads(line[6:]))
            if _content(events[-1]):
                contents += 1
                if on_content is not None:
                    await on_content(contents)
    return events


def _content(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def _text(events: list[dict[str, Any]]) -> str:
    return "".join(map(_content, events))


async def _status(mesh: MeshProcess) -> int:
    return next((runner.status for runner in await mesh.runners() if runner.name == "laptop"), 0)


def _traces(folder: Path, *words: bytes) -> list[tuple[Path, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files, f"nothing is under {folder}"
    return [(path, word) for path in files for word in words if word in path.read_bytes()]


async def test_laptop_serves_through_its_link_transparently(plain_mesh: MeshProcess, tmp_path: Path) -> None:
    token = await _token(plain_mesh)
    async with (
        run_fake_backend(answer_tokens=5) as backend,
        capturing_proxy(relay_facts(plain_mesh.home)["url"]) as proxy,
    ):
        with running_join(tmp_path / "laptop", proxy.address, token, *laptop_server(backend.base_url)) as laptop:
            await laptop.until("joined as laptop: llama")
            await _ready(plain_mesh.url)
            assert _text(await _events(plain_mesh)) == "tok0 tok1 tok2 tok3 tok4"
            await plain_mesh.describe("laptop", log_lines=100)
            await backend.set_behaviour(status=500)
            await _events(plain_mesh)
            # A backend that is gone makes for the most talkative errors.
            backend.signal(signal.SIGKILL)
            await _events(plain_mesh)
            await plain_mesh.describe("laptop", log_lines=100)
            assert await laptop.stop() == 0
        secrets = (backend.base_url.encode(), f":{backend.base_url.rpartition(':')[2]}".encode(), BACKEND_KEY.encode())
    assert b"laptop" in proxy.captured
    assert b"runner.sock" not in proxy.captured
    assert not [word for word in secrets if word in proxy.captured]
    assert not _traces(plain_mesh.home, *secrets)
    assert not _traces(plain_mesh.home, token.encode())
    assert token not in laptop.output
    assert not _traces(tmp_path / "laptop", token.encode())


async def test_laptop_that_dies_mid_stream_is_detected_immediately(plain_mesh: MeshProcess, tmp_path: Path) -> None:
    async with (
        run_fake_backend(answer_tokens=0, tokens_per_second=50) as backend,
        _joined(plain_mesh, tmp_path, backend) as laptop,
    ):

        async def kill(count: int) -> None:
            if count == 5:
                laptop.kill()

        events = await asyncio.wait_for(_events(plain_mesh, kill), 10.0)
        assert events[-1]["error"]["code"] == "worker_lost", events[-1]

        async def is_inactive() -> bool:
            return await _status(plain_mesh) == INACTIVE

        await eventually(is_inactive, 5.0, "the mesh does not know that the laptop is gone")
        await backend.wait_for_state(lambda state: state.requests_cancelled == 1)


async def test_stopping_laptop_finishes_its_running_work(plain_mesh: MeshProcess, tmp_path: Path) -> None:
    async with (
        run_fake_backend(answer_tokens=20, tokens_per_second=20) as backend,
        _joined(plain_mesh, tmp_path, backend) as laptop,
    ):

        async def stop(count: int) -> None:
            if count == 3:
                laptop.process.send_signal(signal.SIGINT)

        assert _text(await _events(plain_mesh, stop)) == " ".join(f"tok{number}" for number in range(20))
        assert await laptop.exit_code() == 0
        assert await _status(plain_mesh) == INACTIVE


async def test_runner_joins_only_once_per_home(plain_mesh: MeshProcess, tmp_path: Path) -> None:
    async with run_fake_backend() as backend, _joined(plain_mesh, tmp_path, backend):
        again = ("http://127.0.0.1:9", "--token", "t", *laptop_server(backend.base_url))
        code, _, err = await run_weft("runner", "join", *again, home=tmp_path / "laptop")
        assert code == EXIT_CONFLICT
        assert "joined already" in err


async def test_revoked_token_ends_the_command_with_the_next_step(plain_mesh: MeshProcess, tmp_path: Path) -> None:
    made = await make_token(plain_mesh.home)
    code, out, _ = await run_weft("runner", "token", "revoke", made["id"], home=plain_mesh.home)
    assert (code, out) == (0, f"token {made['id']} revoked\n")
    url = relay_facts(plain_mesh.home)["url"]
    with running_join(tmp_path / "laptop", url, made["token"], *laptop_server("http://127.0.0.1:9")) as laptop:
        assert await laptop.exit_code() == 1
        assert "create another: weft runner token create" in laptop.output
        assert "Traceback" not in laptop.output


async def test_laptop_reconnects_after_the_mesh_was_killed(tmp_path: Path) -> None:
    config = write_config(tmp_path, relay={"listen": f"127.0.0.1:{free_port()}"})
    home = tmp_path / "home"
    async with run_fake_backend() as backend:
        with running_mesh(home, "--config", str(config)) as mesh:
            token, url = (await make_token(home))["token"], relay_facts(home)["url"]
            with running_join(tmp_path / "laptop", url, token, *laptop_server(backend.base_url)) as laptop:
                await laptop.until("joined as laptop")
                await _ready(mesh.url)
                (before,) = await mesh.runners()
                mesh.stop(signal.SIGKILL)
                await laptop.until("no link")
                with running_mesh(home, "--config", str(config)) as again:
                    await _ready(again.url)
                    (after,) = await again.runners()
                    assert (after.name, after.incarnation) == (before.name, before.incarnation)
                    assert after.status == runner_pb2.Runner.STATUS_ACTIVE
                    code, out, _ = await run_weft("get", "models", "-o", "name", home=home)
                    assert (code, out.count("llama")) == (0, 1)
                    assert await laptop.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x"], "URL"),
        (["http://mesh.example:7443", "--token", "t"], "https://"),
        (["http://127.0.0.1:1/path", "--token", "t"], "URL"),
        (["https://x:1", "--token", "two words"], "--token"),
        (["https://x:1"], "--token"),
        (["https://x:1", "--token", "t", "--fingerprint", "sha256:12"], "--fingerprint"),
        (["http://127.0.0.1:1", "--token", "t", "--fingerprint", "sha256:" + "0" * 64], "--fingerprint"),
        (["https://x:1", "--token", "t", "--ca-file", "/nowhere/ca.pem"], "--ca-file"),
        (["https://x:1", "--token", "t", "--url", "http://127.0.0.1:1", "--upstream-model", "m"], "--upstream-model"),
        (["https://x:1", "--token", "t", "--model", "m"], "--model"),
        (["https://x:1", "--token", "t", "--runner", "quiet"], "--publish m-quiet"),
        (["https://x:1", "--token", "t", "--runner", "quiet", "--publish", "other"], "has no model other"),
        (["https://x:1", "--token", "t", "--runner", "nobody"], "--runner"),
    ],
)
async def test_invalid_arguments_are_reported(arguments: list[str], message: str, tmp_path: Path) -> None:
    quiet = {"name": "quiet", "runtime": "openai_http", "models": [{"name": "m-quiet", "url": "http://127.0.0.1:1/v1"}]}
    config = write_config(tmp_path, quiet)
    code, _, err = await run_weft("runner", "join", *arguments, "--config", str(config), home=tmp_path / "home")
    assert code == 2
    assert message in err


async def test_link_supports_every_runner_operation(plain_mesh: MeshProcess, tmp_path: Path) -> None:
    runner = fake_runner("laptop", answer_tokens=3)
    runner["models"][0]["name"] = "llama"
    config = write_config(tmp_path, runner)
    token = await _token(plain_mesh)
    arguments = ("--config", str(config), "--publish", "llama")
    with running_join(tmp_path / "laptop", relay_facts(plain_mesh.home)["url"], token, *arguments) as laptop:
        await laptop.until("joined as laptop")
        await _ready(plain_mesh.url)
        assert (await plain_mesh.describe("laptop")).process_id > 0
        async with open_channel(plain_mesh.grpc) as channel:
            control: Any = runner_service_pb2_grpc.RunnerServiceStub(channel)
            about: Any = {"metadata": metadata_of(relayed_address(plain_mesh.grpc, "laptop")), "timeout": 20.0}
            tail = control.TailLogs(
                runner_service_pb2.TailLogsRequest(model="llama", line_count=10, follow=True), **about
            )
            lines = [*(await tail.read()).lines, *(await plain_mesh.describe("laptop", log_lines=100)).log_lines]
            assert "listening on <local>" in "".join(lines)
            assert not [line for line in lines if "127.0.0.1" in line]
            callers: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
            words = inference_service_pb2.TokenizeRequest(
                model="llama", payload=tokenize_pb2.TokenizePayload(text="one two")
            )
            assert (await callers.Tokenize(words, timeout=20.0)).result.count == 2
            async with attach(plain_mesh.grpc, "laptop") as permitted:
                await permitted.unload()
                assert (await plain_mesh.describe("laptop")).process_id == 0
                await control.Wake(runner_service_pb2.WakeRequest(model="llama"), **about)
                assert (await plain_mesh.describe("laptop")).process_id > 0
                await permitted.unload()
                await permitted.load()
                assert (await plain_mesh.describe("laptop")).process_id > 0
            tail.cancel()


async def test_runner_joins_with_a_pinned_certificate(tmp_path: Path) -> None:
    config = write_config(tmp_path, relay={"listen": "0.0.0.0:0"})
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        facts = relay_facts(mesh.home)
        made = await make_token(mesh.home, "--reusable")
        assert made["joinCommand"].startswith(f"weft runner join weft://{made['token']}@")
        assert made["joinCommand"].endswith(f"/{facts['fingerprint']}")
        assert (mesh.home / "state" / "relay" / "key.pem").stat().st_mode & 0o777 == 0o600
        url = f"https://127.0.0.1:{facts['url'].rpartition(':')[2]}"
        pin = ("--fingerprint", facts["fingerprint"])
        async with run_fake_backend(answer_tokens=3) as backend:
            server = laptop_server(backend.base_url)
            with running_join(tmp_path / "laptop", url, made["token"], *pin, *server) as laptop:
                await laptop.until("joined as laptop")
                await _ready(mesh.url)
                assert _text(await _events(mesh)) == "tok0 tok1 tok2"
            other = ("--fingerprint", "sha256:" + "0" * 64)
            with running_join(tmp_path / "other", url, made["token"], *other, *server) as laptop:
                assert await laptop.exit_code() == 1
                assert "another certificate" in laptop.output
            with running_join(tmp_path / "none", url, made["token"], *server) as laptop:
                assert await laptop.exit_code() == 1
                assert "--fingerprint" in laptop.output
            roots = ("--ca-file", str(mesh.home / "state" / "relay" / "cert.pem"))
            with running_join(tmp_path / "roots", url, made["token"], *roots, *server) as laptop:
                await laptop.until("joined as laptop")


async def test_runner_joins_through_an_http2_proxy(plain_mesh: MeshProcess, tmp_path: Path) -> None:
    token = await _token(plain_mesh)
    text = RELAY_PROXY.read_text()
    for port, ours in (("7444", "0"), ("7443", relay_facts(plain_mesh.home)["url"].rpartition(":")[2])):
        assert f"port_value: {port}" in text
        text = text.replace(f"port_value: {port}", f"port_value: {ours}")
    async with run_fake_backend(answer_tokens=0, tokens_per_second=30) as backend:
        with (
            running_envoy(yaml.safe_load(text), tmp_path) as proxy,
            running_join(tmp_path / "laptop", f"http://{proxy}", token, *laptop_server(backend.base_url)) as laptop,
        ):
            await laptop.until("joined as laptop")
            await _ready(plain_mesh.url)

            async def leave(count: int) -> None:
                if count == 10:
                    raise ConnectionAbortedError

            with pytest.raises(ConnectionAbortedError):
                await _events(plain_mesh, leave)
            await backend.wait_for_state(lambda state: state.requests_cancelled == 1)


class _joined:  # noqa: N801 - reads as a statement
    """A laptop with this backend, joined and ready for the length of the block."""

    def __init__(self, mesh: MeshProcess, folder: Path, backend: FakeBackendProcess) -> None:
        self._mesh = mesh
        self._folder = folder
        self._backend = backend
        self._stack: Any = None

    async def __aenter__(self) -> JoinProcess:
        token = await _token(self._mesh)
        url = relay_facts(self._mesh.home)["url"]
        self._stack = running_join(self._folder / "laptop", url, token, *laptop_server(self._backend.base_url))
        laptop: JoinProcess = self._stack.__enter__()
        await laptop.until("joined as laptop")
        await _ready(self._mesh.url)
        return laptop

    async def __aexit__(self, *error: object) -> None:
        self._stack.__exit__(*error)
