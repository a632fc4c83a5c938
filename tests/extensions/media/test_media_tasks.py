"""Images, transcriptions and speech as tasks and lines of batches over HTTP, and the addresses of results."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from batch_stage import PATH as BATCHES
from batch_stage import Stage, jsonl, line
from file_script import MemoryBatches, MemoryFiles
from gateway_script import RawResponse, RunningGateway, finished, serving
from task_script import ScriptedTasks, output

from gateway.gateway_config import GatewayConfig, MediaConfig, ResultConfig
from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2, image_pb2
from weft.api.router.v1 import file_service_pb2, task_pb2
from weft.durable.batches import RESULT
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.media_files import png

PATH = "/api/v1/inference-tasks"
KEY = bytes(range(32))
PNG = png(1, 1)
PNG_TEXT = base64.b64encode(PNG).decode()
IMAGE = {"endpoint": "/v1/images/generations", "body": {"model": "tiny", "prompt": "a lighthouse"}}


async def saved(files: MemoryFiles, data: bytes, purpose: str = RESULT, media_type: str = "image/png") -> str:
    async def content() -> AsyncIterator[bytes]:
        yield data

    new = file_service_pb2.File(tenant="default", name="a", purpose=purpose, media_type=media_type)
    return (await files.save(new, content())).id


def image(file_id: str) -> event_pb2.InferenceEvent:
    part = chat_pb2.MediaPart(file_id=file_id, media_type="image/png")
    return event_pb2.InferenceEvent(image=image_pb2.GeneratedImage(image=part, seed=7))


def words(text: str, **part: Any) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(transcript=audio_pb2.TranscriptPart(text=text, **part))


async def post(gateway: RunningGateway, body: object, path: str = PATH) -> tuple[int, Any]:
    answer = await gateway.request("POST", path, body)
    return answer.status, answer.json


async def result_of(gateway: RunningGateway, body: object) -> Any:
    """The result of a task that completes as it is submitted."""
    status, task = await post(gateway, body)
    assert status == 202, task
    found = (await gateway.request("GET", f"{PATH}/{task['id']}")).json
    assert found["state"] == "completed"
    return found.get("result", found["error"])


async def opened(gateway: RunningGateway, url: str, **headers: str) -> RawResponse:
    parts = urlsplit(url)
    return await gateway.request("GET", f"{parts.path}?{parts.query}", headers=headers)


async def test_image_task_result_is_the_json_of_its_api() -> None:
    files = MemoryFiles()
    tasks = ScriptedTasks(at_once=[output([image(await saved(files, PNG))], [finished()])])
    async with serving(tasks=tasks, files=files) as gateway:
        result = await result_of(gateway, IMAGE)
        assert result["data"] == [{"b64_json": PNG_TEXT, "seed": 7}]
        spec = tasks.one.new.spec
        assert (spec.image.prompt, spec.origin_kind) == ("a lighthouse", "images")


async def test_edit_references_or_inlines_files_and_the_task_stores_bytes_once() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks, files=MemoryFiles()) as gateway:
        data_url = f"data:image/png;base64,{PNG_TEXT}"
        body = {"model": "tiny", "prompt": "add a boat", "image": ["file-1", data_url], "mask": {"file_id": "file-2"}}
        assert (await post(gateway, {"endpoint": "/v1/images/edits", "body": body}))[0] == 202
        spec = tasks.one.new.spec
        assert [(each.file_id, each.data) for each in spec.image.images] == [("file-1", b""), ("", PNG)]
        assert (spec.image.mask.file_id, spec.image.images[1].media_type) == ("file-2", "image/png")
        assert not spec.image.extra_parameters.fields
        assert PNG_TEXT not in spec.origin.decode()
        assert json.loads(spec.origin)["image"] == ["file-1", "data:,"]


async def test_file_in_plain_base64_has_the_type_of_its_content() -> None:
    """Regression: engines got it as `file.bin` of an unknown type, which many refuse."""
    recording = base64.b64encode(b"RIFF\0\0\0\0WAVE").decode()
    tasks = ScriptedTasks()
    async with serving(tasks=tasks, files=MemoryFiles()) as gateway:
        edit = {"model": "tiny", "prompt": "add a boat", "image": PNG_TEXT}
        assert (await post(gateway, {"endpoint": "/v1/images/edits", "body": edit}))[0] == 202
        assert tasks.one.new.spec.image.images[0].media_type == "image/png"
    tasks = ScriptedTasks()
    async with serving(tasks=tasks, files=MemoryFiles()) as gateway:
        body = {"model": "tiny", "file": recording}
        assert (await post(gateway, {"endpoint": "/v1/audio/transcriptions", "body": body}))[0] == 202
        assert tasks.one.new.spec.transcription.audio.media_type == "audio/wav"


async def test_openai_json_edits_are_supported() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks, files=MemoryFiles()) as gateway:
        images = [{"file_id": "file-1"}, {"image_url": f"data:image/png;base64,{PNG_TEXT}"}]
        body = {"model": "tiny", "prompt": "add a boat", "images": images}
        assert (await post(gateway, {"endpoint": "/v1/images/edits", "body": body}))[0] == 202
        assert [(each.file_id, each.data) for each in tasks.one.new.spec.image.images] == [("file-1", b""), ("", PNG)]


@pytest.mark.parametrize(("name", "translates"), [("transcriptions", False), ("translations", True)])
async def test_transcription_is_a_task_with_a_file(name: str, translates: bool) -> None:
    part = audio_pb2.TranscriptionSegment(start_seconds=0, end_seconds=1.5, text="Hello")
    tasks = ScriptedTasks(at_once=[output([words("Hello", segment=part, language="en")], [finished()])])
    async with serving(tasks=tasks, files=MemoryFiles()) as gateway:
        body = {"model": "tiny", "file": "file-1", "response_format": "verbose_json"}
        result = await result_of(gateway, {"endpoint": f"/v1/audio/{name}", "body": body})
        assert (result["text"], result["language"], result["segments"][0]["end"]) == ("Hello", "en", 1.5)
        spec = tasks.one.new.spec.transcription
        assert (spec.audio.file_id, spec.translate, spec.with_segments) == ("file-1", translates, True)


async def test_captions_are_returned_as_text_in_json() -> None:
    part = audio_pb2.TranscriptionSegment(start_seconds=0, end_seconds=1.5, text="Hello")
    tasks = ScriptedTasks(at_once=[output([words("Hello", segment=part)], [finished()])])
    async with serving(tasks=tasks, files=MemoryFiles()) as gateway:
        body = {"model": "tiny", "file": "file-1", "response_format": "srt"}
        result = await result_of(gateway, {"endpoint": "/v1/audio/transcriptions", "body": body})
        assert result["text"].startswith("1\n00:00:00,000 --> 00:00:01,500\nHello")


@pytest.mark.parametrize("result_format", [None, "b64_json", "url"])
async def test_speech_task_result_is_audio(result_format: str | None) -> None:
    files = MemoryFiles()
    spoken = audio_pb2.SpeechPart(file_id=await saved(files, b"RIFF", media_type="audio/wav"), media_type="audio/wav")
    tasks = ScriptedTasks(at_once=[output([event_pb2.InferenceEvent(speech=spoken)], [finished()])])
    async with serving(tasks=tasks, files=files, result_key=KEY) as gateway:
        body = {"model": "tiny", "input": "Hello", "voice": "amy", "response_format": "wav"}
        if result_format is not None:
            body["result_format"] = result_format
        result = await result_of(gateway, {"endpoint": "/v1/audio/speech", "body": body})
        assert result["media_type"] == "audio/wav"
        if result_format == "url":
            answer = await opened(gateway, result["url"])
            assert (answer.headers["content-type"], answer.body) == ("audio/wav", b"RIFF")
        else:
            assert base64.b64decode(result["b64_json"]) == b"RIFF"


async def test_invalid_submission_names_the_member() -> None:
    async with serving(tasks=ScriptedTasks(), files=MemoryFiles()) as gateway:
        for endpoint, body, param in (
            ("/v1/images/edits", {"prompt": "x"}, "body.image"),
            ("/v1/images/edits", {"prompt": "x", "image": "no base64!"}, "body.image"),
            ("/v1/images/edits", {"prompt": "x", "image": "data:image/png,x"}, "body.image"),
            ("/v1/images/edits", {"prompt": "x", "images": [{}]}, "body.images[0]"),
            ("/v1/images/edits", {"prompt": "x", "image": ["file-1"] * 100}, "body.image"),
            ("/v1/audio/transcriptions", {}, "body.file"),
            ("/v1/audio/transcriptions", {"file": ""}, "body.file"),
            ("/v1/audio/speech", {"voice": "amy"}, "body.input"),
            ("/v1/images/generations", {"prompt": "x", "response_format": "url"}, "body.response_format"),
        ):
            status, answer = await post(gateway, {"endpoint": endpoint, "body": {"model": "tiny", **body}})
            assert (status, answer["error"]["param"]) == (400, param)


async def test_image_to_edit_was_not_checked_in_a_task() -> None:
    config = GatewayConfig(port=0, media=MediaConfig(max_pixels=1))
    large = base64.b64encode(png(2, 1)).decode()
    async with serving(tasks=ScriptedTasks(), files=MemoryFiles(), config=config) as gateway:
        for members in ({"image": large}, {"image": "file-1", "mask": large}):
            body = {"model": "tiny", "prompt": "x", **members}
            status, answer = await post(gateway, {"endpoint": "/v1/images/edits", "body": body})
            assert (status, answer["error"]["param"]) == (400, f"body.{list(members)[-1]}")
            assert "gateway.media.max_pixels" in answer["error"]["message"]


async def test_result_url_needs_no_key_and_grants_no_other_access() -> None:
    files = MemoryFiles()
    mine, other = await saved(files, PNG), await saved(files, b"other")
    tasks = ScriptedTasks(at_once=[output([image(mine)], [finished()])])
    async with serving(tasks=tasks, files=files, result_key=KEY) as gateway:
        body = {**IMAGE, "body": {**IMAGE["body"], "response_format": "url"}}  # type: ignore[dict-item]
        (entry,) = (await result_of(gateway, body))["data"]
        assert set(entry) == {"url", "seed"}
        answer = await opened(gateway, entry["url"])
        assert (answer.status, answer.body) == (200, PNG)
        headers = answer.headers
        assert (headers["content-type"], headers["x-content-type-options"]) == ("image/png", "nosniff")
        for changed in (
            entry["url"].replace(mine, other),
            entry["url"].replace("tenant=default", "tenant=bob"),
            entry["url"].replace("expires=", "expires=9"),
            entry["url"][:-1],
            entry["url"].partition("?")[0],
        ):
            assert (await opened(gateway, changed)).status == 404


async def test_expired_result_url_is_gone() -> None:
    files = MemoryFiles()
    tasks = ScriptedTasks(at_once=[output([image(await saved(files, PNG))], [finished()])])
    config = GatewayConfig(port=0, results=ResultConfig(link_seconds=0.001))
    async with serving(tasks=tasks, files=files, result_key=KEY, config=config) as gateway:
        body = {**IMAGE, "body": {**IMAGE["body"], "response_format": "url"}}  # type: ignore[dict-item]
        (entry,) = (await result_of(gateway, body))["data"]
        answer = await opened(gateway, entry["url"])
        assert (answer.status, answer.error["code"]) == (410, "not_found")


async def test_file_that_is_not_a_result_has_no_url() -> None:
    files = MemoryFiles()
    uploaded = await saved(files, b"lines", purpose="batch")
    tasks = ScriptedTasks(at_once=[output([image(uploaded)], [finished()])])
    async with serving(tasks=tasks, files=files, result_key=KEY) as gateway:
        body = {**IMAGE, "body": {**IMAGE["body"], "response_format": "url"}}  # type: ignore[dict-item]
        (entry,) = (await result_of(gateway, body))["data"]
        assert (await opened(gateway, entry["url"])).status == 404


async def test_active_content_type_is_served_as_a_download() -> None:
    files = MemoryFiles()
    strange = await saved(files, b"<script>", media_type="text/html")
    tasks = ScriptedTasks(at_once=[output([image(strange)], [finished()])])
    async with serving(tasks=tasks, files=files, result_key=KEY) as gateway:
        body = {**IMAGE, "body": {**IMAGE["body"], "response_format": "url"}}  # type: ignore[dict-item]
        (entry,) = (await result_of(gateway, body))["data"]
        headers = (await opened(gateway, entry["url"])).headers
        assert (headers["content-type"], headers["content-disposition"]) == ("application/octet-stream", "attachment")


async def test_expired_result_is_an_error_of_the_answer_instead_of_the_task() -> None:
    tasks = ScriptedTasks(at_once=[output([image("file-gone")], [finished()])])
    async with serving(tasks=tasks, files=MemoryFiles()) as gateway:
        assert (await result_of(gateway, IMAGE))["code"] == "not_found"


async def test_progress_of_a_running_task_is_shown() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks, files=MemoryFiles()) as gateway:
        _, task = await post(gateway, IMAGE)
        assert "progress" not in task
        kept = tasks.one
        kept.task.state = task_pb2.TASK_STATE_RUNNING
        kept.task.progress.CopyFrom(
            event_pb2.WorkProgress(unit=event_pb2.WORK_UNIT_STEPS, done=10, total=20, stage="decoding")
        )
        found = (await gateway.request("GET", f"{PATH}/{task['id']}")).json
        assert found["progress"] == {"unit": "steps", "done": 10.0, "total": 20.0, "stage": "decoding"}


@pytest.mark.parametrize("response_format", ["b64_json", "url"])
async def test_batch_lines_generate_images(response_format: str) -> None:
    files, batches = MemoryFiles(), MemoryBatches()
    result = await saved(files, PNG)
    endpoint = "/v1/images/generations"
    body = {"model": "tiny", "prompt": "a lighthouse", "response_format": response_format}
    async with serving(files=files, batches=batches, result_key=KEY) as gateway:
        source = await saved(files, jsonl(line(url=endpoint, body=body)), purpose="batch")
        status, batch = await post(
            gateway, {"input_file_id": source, "endpoint": endpoint, "completion_window": "24h"}, BATCHES
        )
        assert status == 200, batch
        batches.end(batch["id"], 0, outputs=(output([image(result)], [finished()]),))
        batches.close(batch["id"])
        while (found := (await gateway.request("GET", f"{BATCHES}/{batch['id']}")).json)["status"] != "completed":
            pass
        (row,) = files.text(found["output_file_id"]).splitlines()
        (entry,) = json.loads(row)["response"]["body"]["data"]
        if response_format == "b64_json":
            assert entry == {"b64_json": PNG_TEXT, "seed": 7}
        else:
            assert (await opened(gateway, entry["url"])).body == PNG


async def test_outage_while_an_image_is_read_becomes_the_error_of_no_line() -> None:
    files, batches = MemoryFiles(), MemoryBatches()
    result = await saved(files, PNG)
    endpoint = "/v1/images/generations"
    async with serving(files=files, batches=batches, result_key=KEY) as gateway:
        at = Stage(gateway, files, batches)
        made = await at.make(line(url=endpoint, body={"model": "tiny", "prompt": "a lighthouse"}), endpoint=endpoint)
        batches.end(made["id"], 0, outputs=(output([image(result)], [finished()]),))
        files.failure = WeftError(Reason.SERVICE_UNAVAILABLE, "file store timed out")
        batches.close(made["id"])
        found = await at.until_failed(made["id"])
        files.failure = None
        batches.in_hand.clear()
        done = await at.until(made["id"], "completed")
    assert [error["code"] for error in found["errors"]["data"]] == ["service_unavailable"]
    (row,) = at.lines_of(done["output_file_id"])
    assert (row["response"]["status_code"], done["error_file_id"]) == (200, None)


async def test_outage_while_an_image_is_read_is_no_error_of_its_task() -> None:
    files = MemoryFiles()
    tasks = ScriptedTasks(at_once=[output([image(await saved(files, PNG))], [finished()])])
    async with serving(tasks=tasks, files=files) as gateway:
        _, task = await post(gateway, IMAGE)
        files.failure = WeftError(Reason.SERVICE_UNAVAILABLE, "file store timed out")
        answer = await gateway.request("GET", f"{PATH}/{task['id']}")
        files.failure = None
        again = await gateway.read(f"{PATH}/{task['id']}")
    assert (answer.status, again["error"], again["result"]["data"][0]["b64_json"]) == (503, None, PNG_TEXT)


async def test_images_and_recordings_can_be_uploaded_for_tasks() -> None:
    files = MemoryFiles()
    async with serving(files=files) as gateway:
        made = await gateway.sdk.files.create(file=("talk.wav", b"RIFF", "audio/wav"), purpose="user_data")
        assert made.purpose == "user_data"
        assert files.kept[made.id][0].media_type == "audio/wav"
