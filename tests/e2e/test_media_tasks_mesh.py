"""Images and sound as durable tasks in a mesh of real processes: kills in the middle, files in and out, addresses."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
from kit.fake_backend import run_fake_backend
from mesh_process import MeshProcess, eventually, run_weft, running_mesh, write_config

MODEL = "m-media"
OFFERS = "image,transcription,speech"
END_SECONDS = 40.0
TASKS = "/api/v1/inference-tasks"
WAV = b"RIFF\x24\0\0\0WAVEfmt " + bytes(2000)
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def media_runner(url: str) -> dict[str, Any]:
    """A runner over a server that makes images and sound."""
    model = {"name": MODEL, "url": f"{url}/v1", "operations": OFFERS.split(",")}
    return {
        "name": "media",
        "runtime": "openai_http",
        "models": [model],
        "first_term_seconds": 0.5,
    }


@contextmanager
def _serving(folder: Path, url: str) -> Iterator[MeshProcess]:
    config = write_config(folder, media_runner(url), router={"results": {"max_bytes": 4096}})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


class Caller:
    """A caller of the HTTP API of a mesh."""

    def __init__(self, client: httpx2.Client) -> None:
        self.client = client

    def upload(self, name: str, data: bytes, media_type: str) -> str:
        files = {"file": (name, data, media_type)}
        answer = self.client.post("/v1/files", data={"purpose": "user_data"}, files=files)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def submit(self, endpoint: str, **body: Any) -> str:
        answer = self.client.post(TASKS, json={"endpoint": endpoint, "body": {"model": MODEL, **body}})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    async def ended(self, task: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def is_over() -> bool:
            found.update(self.client.get(f"{TASKS}/{task}").json())
            return found["state"] in {"completed", "failed"}

        await eventually(is_over, END_SECONDS, "the task does not end")
        return found

    async def result(self, endpoint: str, **body: Any) -> Any:
        ended = await self.ended(self.submit(endpoint, **body))
        assert ended["state"] == "completed", ended
        return ended["result"]


async def test_media_tasks_read_and_write_files_over_http(tmp_path: Path) -> None:
    async with run_fake_backend(offers=OFFERS) as backend:
        with _serving(tmp_path, backend.base_url) as mesh, httpx2.Client(base_url=mesh.url, timeout=30) as client:
            caller = Caller(client)
            await eventually(lambda: MODEL in client.get("/v1/models").text, 20.0, "the model is missing")

            source = caller.upload("house.png", PIXEL, "image/png")
            edited = await caller.result("/v1/images/edits", prompt="add a boat", image=source, response_format="url")
            url = edited["data"][0]["url"]
            assert url.startswith(f"{mesh.url}/v1/results/file-")
            opened = httpx2.get(url)
            assert (opened.status_code, opened.headers["content-type"]) == (200, "image/png")
            assert opened.content.startswith(b"\x89PNG")
            assert httpx2.get(f"{url}x").status_code == 404
            assert httpx2.get(url.replace("tenant=default", "tenant=bob")).status_code == 404
            result_id = url.partition("/v1/results/")[2].partition("?")[0]
            assert client.get(f"/v1/files/{result_id}/content", headers={"X-Tenant-ID": "bob"}).status_code == 404

            talk = caller.upload("talk.wav", WAV, "audio/wav")
            heard = await caller.result("/v1/audio/transcriptions", file=talk)
            assert heard["text"] == f"{len(WAV)} bytes of sound"
            inline = base64.b64encode(WAV).decode()
            translated = await caller.result("/v1/audio/translations", file=f"data:audio/wav;base64,{inline}")
            assert translated["text"] == f"{len(WAV)} bytes in English"

            spoken = await caller.result("/v1/audio/speech", input="hello there", voice="amy")
            assert spoken["media_type"] == "audio/wav"
            assert base64.b64decode(spoken["b64_json"]).startswith(b"RIFF")

            long = caller.submit("/v1/audio/speech", input="word " * 700, voice="amy")
            failed = await caller.ended(long)
            told = None if failed["state"] == "completed" else failed["error"]["code"]
            assert told in {None, "request_too_large"}

            live = client.post(
                "/v1/images/generations", json={"model": MODEL, "prompt": "a pier", "response_format": "url"}
            ).json()
            assert httpx2.get(live["data"][0]["url"]).content.startswith(b"\x89PNG")


async def test_live_media_requests_are_journaled_and_batches_run_images_and_transcriptions(tmp_path: Path) -> None:
    async with run_fake_backend(offers=OFFERS) as backend:
        with _serving(tmp_path, backend.base_url) as mesh, httpx2.Client(base_url=mesh.url, timeout=30) as client:
            caller = Caller(client)
            await eventually(lambda: MODEL in client.get("/v1/models").text, 20.0, "the model is missing")

            image = client.post(
                "/v1/images/generations", json={"model": MODEL, "prompt": "a lighthouse", "durable": "wait"}
            )
            assert base64.b64decode(image.json()["data"][0]["b64_json"]).startswith(b"\x89PNG")
            assert client.get(f"{TASKS}/{image.headers['x-weft-task-id']}").json()["state"] == "completed"
            form = {"model": MODEL, "durable": "wait"}
            words = client.post("/v1/audio/transcriptions", data=form, files={"file": ("talk.wav", WAV, "audio/wav")})
            assert words.json()["text"] == f"{len(WAV)} bytes of sound"
            assert words.headers["x-weft-task-id"].startswith("task-")
            speech = client.post(
                "/v1/audio/speech", json={"model": MODEL, "input": "hello", "voice": "amy", "durable": "wait"}
            )
            assert speech.content.startswith(b"RIFF")

            talk = caller.upload("talk.wav", WAV, "audio/wav")
            outputs = {}
            for endpoint, body in (
                ("/v1/images/generations", {"prompt": "a lighthouse"}),
                ("/v1/audio/transcriptions", {"file": talk}),
            ):
                outputs[endpoint] = await batch_of(client, endpoint, {"model": MODEL, **body})
            assert base64.b64decode(outputs["/v1/images/generations"]["data"][0]["b64_json"]).startswith(b"\x89PNG")
            assert outputs["/v1/audio/transcriptions"]["text"] == f"{len(WAV)} bytes of sound"

            code, out, _ = await run_weft("get", "tasks", home=mesh.home)
            assert code == 0
            assert "completed" in out


async def batch_of(client: httpx2.Client, endpoint: str, body: dict[str, Any]) -> Any:
    """The body of the one line of a batch."""
    sdk = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0)
    with sdk:
        lines = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body}).encode()
        file = sdk.files.create(file=("lines.jsonl", lines), purpose="batch")
        made = sdk.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]

        def is_over() -> bool:
            return sdk.batches.retrieve(made.id).status == "completed"

        await eventually(is_over, END_SECONDS, "the batch does not end")
        output = sdk.batches.retrieve(made.id).output_file_id
        assert output is not None
        return json.loads(sdk.files.content(output).text)["response"]["body"]
