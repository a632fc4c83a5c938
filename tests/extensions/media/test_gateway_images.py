"""Images over HTTP: what reaches the mesh, answers and streams in OpenAI's form, and refusals that name the field."""

import asyncio
import base64
import json
from typing import Any

import pytest
from gateway_script import RunningGateway, ScriptedDispatcher, finished, queued, serving, started
from openai import APIError, APIStatusError

from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2, receipt_pb2, usage_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_objects import plain_object
from weft_testing.media_files import gif, png

PICTURE = png(3, 2)
DATA_URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


def picture(index: int = 0, *, seed: int | None = None, data: bytes = PICTURE) -> event_pb2.InferenceEvent:
    image = image_pb2.GeneratedImage(index=index, image=chat_pb2.MediaPart(data=data, media_type="image/png"))
    if seed is not None:
        image.seed = seed
    return event_pb2.InferenceEvent(image=image)


def preview(partial_index: int, index: int = 0) -> event_pb2.InferenceEvent:
    part = chat_pb2.MediaPart(data=png(1, 1), media_type="image/png")
    return event_pb2.InferenceEvent(
        partial_image=image_pb2.PartialImage(index=index, partial_index=partial_index, image=part)
    )


def worked(done: float, total: float = 20, stage: str = "") -> event_pb2.InferenceEvent:
    progress = event_pb2.WorkProgress(unit=event_pb2.WORK_UNIT_STEPS, done=done, total=total, stage=stage)
    return event_pb2.InferenceEvent(work_progress=progress)


def ended() -> event_pb2.InferenceEvent:
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, model="tiny")
    receipt.usage.CopyFrom(usage_pb2.Usage(prompt_tokens=4, image_steps=20, image_pixels=6))
    return event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt))


def made(*images: event_pb2.InferenceEvent) -> ScriptedDispatcher:
    return ScriptedDispatcher(steps=[[started()], [worked(1)], list(images or [picture(seed=7)]), [ended()]])


async def test_every_image_field_reaches_the_mesh() -> None:
    asked: dict[str, Any] = {
        "negative_prompt": "dogs", "num_inference_steps": 12, "guidance_scale": 4.5, "seed": 42, "strength": 0.25,
        "scheduler": "euler",
    }  # fmt: skip
    async with serving(made()) as gateway:
        await gateway.sdk.images.generate(
            model="tiny", prompt="a cat", n=3, size="640x480", output_format="webp", output_compression=80,
            background="opaque", quality="auto", extra_body=asked,
        )  # fmt: skip
        (payload,) = gateway.dispatcher.payloads
        (context,) = gateway.dispatcher.contexts
    assert context.operation is Operation.IMAGE
    assert (payload.count, payload.size, payload.output_format, payload.quality) == (3, "640x480", "webp", "")
    assert (payload.negative_prompt, payload.steps, payload.guidance) == ("dogs", 12, 4.5)
    assert (payload.seed, payload.strength, payload.partial_images) == (42, 0.25, 0)
    extra = plain_object(payload.extra_parameters)
    assert extra == {"scheduler": "euler", "output_compression": 80, "background": "opaque"}


async def test_stream_sends_previews_and_images_as_events_and_progress_as_comments() -> None:
    steps = [[queued()], [started()], [worked(5)], [preview(0)], [worked(10, stage="two\nlines")], [preview(1)]]
    dispatcher = ScriptedDispatcher(steps=[*steps, [picture(seed=7)], [ended()]])
    async with serving(dispatcher) as gateway:
        body = json.dumps({"model": "tiny", "prompt": "a cat", "stream": True, "partial_images": 2}).encode()
        raw = await gateway.request("POST", "/v1/images/generations", body)
        (payload,) = gateway.dispatcher.payloads
    assert payload.partial_images == 2
    blocks = raw.body.decode().split("\n\n")
    comments = [block for block in blocks if block.startswith(":")]
    assert comments[:3] == [
        ": queued position=3 reason=every slot is taken",
        ": steps 5/20",
        ": steps 10/20 stage=two lines",
    ]
    events = [block.split("\ndata: ") for block in blocks if block.startswith("event: ")]
    assert [name for name, _ in events] == [
        "event: image_generation.partial_image",
        "event: image_generation.partial_image",
        "event: image_generation.completed",
    ]
    first, last = json.loads(events[0][1]), json.loads(events[-1][1])
    assert (first["partial_image_index"], first["size"], first["output_format"]) == (0, "1x1", "png")
    assert (last["size"], last["seed"], last["usage"]["image_steps"]) == ("3x2", 7, 20)
    assert base64.b64decode(last["b64_json"]) == PICTURE
    assert blocks[-2] == "data: [DONE]"


async def test_each_image_is_sent_when_complete() -> None:
    held = asyncio.Event()
    dispatcher = ScriptedDispatcher(steps=[[started()], [picture(0)], held, [picture(1)], [ended()]])
    async with serving(dispatcher) as gateway:
        stream = await gateway.sdk.images.generate(model="tiny", prompt="a cat", n=2, stream=True)
        first = await anext(stream)
        held.set()
        rest = [event async for event in stream]
    assert first.type == "image_generation.completed"
    assert first.usage.total_tokens == 0
    assert [event.usage.input_tokens for event in rest if event.type == "image_generation.completed"] == [4]


async def test_mid_stream_failure_is_an_event_and_an_earlier_one_a_status() -> None:
    failure = WeftError(Reason.OUT_OF_MEMORY, "1024x1024 does not fit; ask for a smaller size")
    async with serving(ScriptedDispatcher(steps=[[started()], [preview(0)], failure])) as gateway:
        stream = await gateway.sdk.images.generate(model="tiny", prompt="a cat", stream=True, partial_images=1)
        with pytest.raises(APIError) as broken:
            [event async for event in stream]
    assert broken.value.code == "out_of_memory"
    assert "smaller size" in broken.value.message
    async with serving(ScriptedDispatcher(steps=[[started()], failure])) as gateway:
        with pytest.raises(APIStatusError) as refused:
            await gateway.sdk.images.generate(model="tiny", prompt="a cat", stream=True)
    assert refused.value.code == "out_of_memory"


async def test_client_disconnect_cancels_image_generation() -> None:
    dispatcher = ScriptedDispatcher(steps=[[started()], [preview(0)], asyncio.Event()])
    async with serving(dispatcher) as gateway:
        stream = await gateway.sdk.images.generate(model="tiny", prompt="a cat", stream=True, partial_images=1)
        assert (await anext(stream)).type == "image_generation.partial_image"
        await stream.close()
        async with asyncio.timeout(20):
            await dispatcher.was_closed.wait()


async def test_engine_without_output_is_an_error_streamed_or_not() -> None:
    for stream in (False, True):
        async with serving(ScriptedDispatcher(steps=[[started()], [finished()]])) as gateway:
            with pytest.raises(APIStatusError) as failed:
                await gateway.sdk.post(
                    "/images/generations", cast_to=object, body={"model": "tiny", "prompt": "a", "stream": stream}
                )
        assert (failed.value.status_code, failed.value.code) == (502, "backend_protocol_error")


async def test_edit_accepts_a_form_with_files_and_all_fields() -> None:
    async with serving(made()) as gateway:
        stream = await gateway.sdk.images.edit(
            model="tiny", prompt="a hat", image=[("a.png", PICTURE, "image/png"), ("b.png", png(4, 4), "image/png")],
            mask=("m.png", PICTURE, "image/png"), stream=True, partial_images=1, extra_body={"strength": 0.5},
        )  # fmt: skip
        events = [event.type async for event in stream]
        (payload,) = gateway.dispatcher.payloads
    assert events == ["image_edit.completed"]
    assert [len(image.data) for image in payload.images] == [len(PICTURE), len(png(4, 4))]
    assert (payload.mask.data, payload.strength, payload.partial_images) == (PICTURE, 0.5, 1)


def _json(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "a cat", **fields}


async def test_invalid_image_field_is_reported() -> None:
    async with serving(made()) as gateway:
        for fields, status, field in (
            ({"size": "99999x1"}, 400, "size"),
            ({"size": "0x512"}, 400, "size"),
            ({"steps": 0}, 400, "steps"),
            ({"steps": 10**6}, 400, "steps"),
            ({"steps": 4, "num_inference_steps": 5}, 400, "num_inference_steps"),
            ({"guidance": -1}, 400, "guidance"),
            ({"seed": -1}, 400, "seed"),
            ({"seed": 2**60}, 400, "seed"),
            ({"strength": 2}, 400, "strength"),
            ({"partial_images": 2}, 400, "partial_images"),
            ({"partial_images": 99, "stream": True}, 400, "partial_images"),
            ({"output_format": "gif"}, 400, "output_format"),
            ({"negative_prompt": "x" * 40_000}, 400, "negative_prompt"),
            ({"prompt": ""}, 400, "prompt"),
            ({"response_format": "url"}, 501, "response_format"),
        ):
            failed = await _refused(gateway, "/images/generations", _json(**fields))
            assert (failed.status_code, failed.param) == (status, field)
        assert not gateway.dispatcher.calls


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"images": []}, 400, "images"),
        ({"images": [{"file_id": "file-1"}]}, 501, "images[0].file_id"),
        ({"images": [{}]}, 400, "images[0].image_url"),
        ({"images": [{"image_url": "data:image/png;base64,!"}]}, 400, "images[0].image_url"),
        ({"images": [{"image_url": "https://elsewhere.example/a.png"}]}, 400, "images[0].image_url"),
        ({"images": [{"image_url": DATA_URL}], "mask": {"image_url": DATA_URL[:44]}}, 400, "mask.image_url"),
    ],
    ids=["none", "file id", "empty", "no base64", "address", "truncated mask"],
)
async def test_invalid_image_of_a_json_edit_is_reported(fields: dict[str, Any], status: int, field: str) -> None:
    async with serving(made()) as gateway:
        failed = await _refused(gateway, "/images/edits", _json(**fields))
        assert (failed.status_code, failed.param) == (status, field)


async def _refused(gateway: RunningGateway, path: str, body: dict[str, Any]) -> APIStatusError:
    with pytest.raises(APIStatusError) as failed:
        await gateway.sdk.post(path, cast_to=object, body=body)
    return failed.value


async def test_file_that_is_no_valid_image_is_rejected_and_error_names_the_field() -> None:
    async with serving(made()) as gateway:
        for data in (b"", b"no image", gif(2, 2), png(3, 2)[:20], png(60_000, 60_000, pixels=False)):
            with pytest.raises(APIStatusError) as failed:
                await gateway.sdk.images.edit(model="tiny", prompt="a hat", image=("a.png", data, "image/png"))
            assert not gateway.dispatcher.calls
            assert (failed.value.status_code, failed.value.param) == (400, "image")
