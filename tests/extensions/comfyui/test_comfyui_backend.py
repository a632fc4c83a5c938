"""The backend of the runtime comfyui, over the fake: images, progress, previews, the queue of others, cancellation."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kit.comfyui import (
    COMMAND,
    GRAPH,
    HILL,
    LIMITS,
    attached,
    call,
    edit_workflow,
    files_in,
    queue_foreign,
    workflow,
)
from kit.engine_settings import engine_settings
from kit.failures import expect_failure, fails
from kit.fake_comfyui.nodes import picture
from kit.fake_comfyui.server import FakeComfyUi
from kit.presence import present
from kit.waiting import until

from runner_svc.backend.port import LoadOrder
from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2
from weft.dispatch.frames import Frame, collected_images
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import to_json_object
from weft_extensions.comfyui.comfyui_backend import ComfyUiBackend
from weft_extensions.comfyui.runtime import ComfyUiModel


@asynccontextmanager
async def serving(
    folder: Path, kind: type[FakeComfyUi] = FakeComfyUi, **given: Any
) -> AsyncIterator[tuple[FakeComfyUi, ComfyUiBackend]]:
    async with kind(folder) as fake:
        backend = attached(fake.url, **given)
        try:
            await backend.start()
            yield fake, backend
        finally:
            fake.worker.pace.go()
            await backend.stop()


async def answer(backend: ComfyUiBackend, payload: image_pb2.ImagePayload, **given: Any) -> list[Frame]:
    async with aclosing(backend.generate_images(payload, call(**given))) as frames:
        return [frame async for frame in frames]


def events(frames: list[Frame], kind: str) -> list[Any]:
    return [getattr(event, kind) for frame in frames for event in frame if event.WhichOneof("event") == kind]


async def refusal(backend: ComfyUiBackend, payload: image_pb2.ImagePayload) -> WeftError:
    with pytest.raises(WeftError) as caught:
        await answer(backend, payload)
    return caught.value


def with_fault(fault: str, **given: Any) -> image_pb2.ImagePayload:
    extra = to_json_object({"fault": fault}, "extra")
    return image_pb2.ImagePayload(prompt="a hill", extra_parameters=extra, **given)


async def test_image_is_generated_with_step_progress_and_its_files_and_history_are_removed(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        frames = await answer(backend, HILL)
        [image] = collected_images(frames)
        assert image.image.media_type == "image/png"
        assert image.image.data.startswith(b"\x89PNG")
        assert (image.seed, image.index) == (11, 0)
        progress = [(each.done, each.total) for each in events(frames, "work_progress") if not each.stage]
        assert progress[-4:] == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert events(frames, "work_progress")[-1].unit == event_pb2.WORK_UNIT_STEPS
        usage = frames[-1][-1].finished.receipt.usage
        assert (usage.image_steps, usage.image_pixels) == (4, 128 * 64)
        assert fake.worker.history == {}
        assert fake.origins == []


async def test_several_images_use_one_prompt_each_with_incremented_seeds_and_summed_steps(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        payload = image_pb2.ImagePayload(prompt="a hill", seed=5, count=3)
        frames = await answer(backend, payload)
        images = collected_images(frames)
        assert [(each.index, each.seed) for each in images] == [(0, 5), (1, 6), (2, 7)]
        assert len({each.image.data for each in images}) == 3
        assert events(frames, "work_progress")[-1].done == events(frames, "work_progress")[-1].total == 12
        assert fake.worker.executed_count == 3


async def test_missing_seed_is_random_and_reported(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, backend):
        payload = image_pb2.ImagePayload(prompt="a hill")
        seeds = {collected_images(await answer(backend, payload))[0].seed for _ in range(2)}
        assert len(seeds) == 2


@pytest.mark.parametrize("wanted", [0, 1, 2])
async def test_requested_number_of_previews_is_sent(tmp_path: Path, wanted: int) -> None:
    async with serving(tmp_path) as (_, backend):
        payload = image_pb2.ImagePayload(prompt="a hill", steps=12, partial_images=wanted)
        previews = events(await answer(backend, payload), "partial_image")
        assert [each.partial_index for each in previews] == list(range(wanted))
        assert all(each.image.data.startswith(b"\x89PNG") for each in previews)


async def test_foreign_prompts_are_awaited_and_mentioned_in_the_progress(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        fake.worker.pace.hold()
        foreign = [await queue_foreign(fake, seed) for seed in (1, 2)]
        stages: list[str] = []
        async with aclosing(backend.generate_images(HILL, call())) as frames:
            async for frame in frames:
                stages += [event.work_progress.stage for event in frame if event.HasField("work_progress")]
                if len(stages) == 1:
                    fake.worker.pace.go()
        assert stages[0] == "behind 2 prompts of others"
        assert fake.worker.interrupted == []
        assert set(foreign) <= set(fake.worker.history), "the history of others is left alone"


async def test_engine_load_includes_foreign_prompts(tmp_path: Path) -> None:
    async with FakeComfyUi(tmp_path) as fake:
        fake.worker.pace.hold()
        for seed in (1, 2):
            await queue_foreign(fake, seed)
        await until(lambda: fake.worker.running is not None)
        backend = attached(fake.url)
        try:
            await backend.start()
            await until(lambda: backend.engine_load is not None)
            load = present(backend.engine_load)
            assert (load.running_count, load.waiting_count, load.other_count) == (1, 1, 2)
        finally:
            fake.worker.pace.go()
            await backend.stop()


async def test_cancelling_a_queued_prompt_removes_it_without_interrupting_the_running_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        fake.worker.pace.hold()
        foreign = await queue_foreign(fake)
        async with aclosing(backend.generate_images(HILL, call())) as frames:
            await anext(frames)
            assert fake.worker.remaining == 2
        assert fake.worker.remaining == 1
        assert ("POST", "/interrupt") not in [each[:2] for each in fake.requests]
        fake.worker.pace.go()
        await until(lambda: foreign in fake.worker.history)
        assert fake.worker.history[foreign]["status"]["status_str"] == "success"


async def test_cancelling_a_running_prompt_interrupts_it_and_no_foreign_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        fake.worker.pace.hold()
        async with aclosing(backend.generate_images(HILL, call())) as frames:
            await anext(frames)
            await until(lambda: fake.worker.running is not None)
            own = present(fake.worker.running)
            foreign = await queue_foreign(fake)
            closing = asyncio.create_task(frames.aclose())
            await until(lambda: any(path == "/interrupt" for _, path, _ in fake.requests))
            fake.worker.pace.go()
            await closing
        assert fake.worker.interrupted == [own.prompt_id]
        await until(lambda: foreign in fake.worker.history)
        assert fake.worker.history[foreign]["status"]["status_str"] == "success"


async def test_late_interrupt_names_the_prompt_it_is_for(tmp_path: Path) -> None:
    """Versions of ComfyUI that read `prompt_id` ignore such a late one; without it they interrupt whatever runs."""
    steps = 2

    class Late(FakeComfyUi):
        async def _interrupt(self, request: web.Request) -> web.Response:
            self.worker.pace.let(steps)
            await until(lambda: self.worker.running is not None and self.worker.running.prompt_id == foreign[0])
            return await super()._interrupt(request)

    foreign: list[str] = []
    async with serving(tmp_path, Late) as (fake, backend):
        fake.worker.pace.hold()
        payload = image_pb2.ImagePayload(prompt="a hill", steps=steps)
        async with aclosing(backend.generate_images(payload, call())) as frames:
            await anext(frames)
            await until(lambda: fake.worker.running is not None)
            foreign.append(await queue_foreign(fake))
        fake.worker.pace.go()
        await until(lambda: foreign[0] in fake.worker.history)
        assert fake.worker.history[foreign[0]]["status"]["status_str"] == "success"
        assert any(path == "/interrupt" for _, path, _ in fake.requests)


async def test_cancelled_task_removes_its_prompt_before_it_ends(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        fake.worker.pace.hold()
        await queue_foreign(fake)
        task = asyncio.create_task(answer(backend, HILL))
        await until(lambda: fake.worker.remaining == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fake.worker.remaining == 1


async def test_failing_node_is_reported(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        error = await refusal(backend, with_fault("error"))
        expect_failure(error, Reason.BACKEND_ERROR, "node 7 (FakeFault)")
        assert error.metadata["node"] == "7"
        assert fake.worker.history == {}


async def test_node_without_memory_is_an_out_of_memory_error_with_advice(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, backend):
        expect_failure(
            await refusal(backend, with_fault("out_of_memory")), Reason.OUT_OF_MEMORY, "node 7", "smaller image"
        )


async def test_rejected_prompt_error_names_the_node_and_the_input(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        expect_failure(
            await refusal(backend, image_pb2.ImagePayload(prompt="a hill", size="8x64")),
            Reason.BACKEND_REJECTED,
            "node 5 (EmptyLatentImage)",
            "width",
        )
        assert fake.worker.executed_count == 0


async def test_prompt_interrupted_by_another_client_is_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        fake.worker.pace.hold()
        task = asyncio.create_task(refusal(backend, HILL))
        await until(lambda: fake.worker.running is not None)
        fake.worker.interrupt(None)
        fake.worker.pace.go()
        expect_failure(await task, Reason.BACKEND_ERROR, "interrupted")


async def test_lost_websocket_is_reopened_and_the_prompt_runs_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        fake.worker.pace.hold()
        task = asyncio.create_task(answer(backend, HILL))
        await until(lambda: fake.worker.running is not None)
        for _ in range(2):
            await fake.drop_sockets()
            await until(lambda: bool(fake.sockets))
        fake.worker.pace.go()
        assert len(collected_images(await task)) == 1
        assert fake.worker.executed_count == 1


async def test_prompt_end_missed_by_the_websocket_is_read_from_the_history(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=replace(LIMITS, poll_seconds=5.0)) as (fake, backend):
        fake.worker.pace.hold()
        task = asyncio.create_task(answer(backend, HILL))
        await until(lambda: fake.worker.running is not None)
        fake.worker.pace.go()
        await until(lambda: fake.worker.running is None)
        await fake.drop_sockets()
        assert len(collected_images(await task)) == 1


async def test_comfyui_restart_mid_request_is_reported_as_a_death(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        fake.worker.pace.hold()
        task = asyncio.create_task(refusal(backend, HILL))
        await until(lambda: fake.worker.running is not None)
        await fake.restart()
        assert (await task).reason is Reason.SERVER_DIED
        assert fake.worker.executed_count == 0, "nothing is done again here"


async def test_unreachable_comfyui_is_reported_dead_after_its_timeout(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=replace(LIMITS, reconnect_seconds=0.3)) as (fake, backend):
        fake.worker.pace.hold()
        task = asyncio.create_task(refusal(backend, HILL))
        await until(lambda: fake.worker.running is not None)
        await fake.stop()
        assert (await task).reason is Reason.SERVER_DIED


async def test_source_image_is_uploaded_under_a_unique_name_and_used(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        source = chat_pb2.MediaPart(media_type="image/png", data=picture(8, 8, "ff0000"))
        payload = image_pb2.ImagePayload(prompt="a hill", images=[source])
        for _ in range(2):
            frames = await answer(backend, payload, workflow=edit_workflow())
            assert len(collected_images(frames)) == 1
        uploaded = files_in(fake.folder / "input")
        assert len(uploaded) == 2
        assert all(name.startswith("weft/weft-") for name in uploaded)


async def test_request_workflow_overrides_the_model_workflow(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        graph = json.loads(json.dumps(GRAPH))
        graph["3"]["inputs"]["steps"] = 2
        given = workflow({"graph": graph, "outputs": ["9"]})
        frames = await answer(backend, image_pb2.ImagePayload(prompt="a hill"), workflow=given)
        assert frames[-1][-1].finished.receipt.usage.image_steps == 2
        [sent] = [body for _, path, body in fake.requests if path == "/prompt"]
        assert sent["prompt"]["6"]["inputs"]["text"] == "a hill"


async def test_fields_without_an_input_are_warned_about_before_the_image(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, backend):
        payload = image_pb2.ImagePayload(prompt="a hill", negative_prompt="rain", output_format="webp")
        frames = await answer(backend, payload)
        assert [each.field for each in events(frames, "warning")] == ["negative_prompt", "output_format"]
        assert frames[0][0].HasField("warning")


async def test_model_without_a_workflow_accepts_only_workflow_requests(tmp_path: Path) -> None:
    async with FakeComfyUi(tmp_path) as fake:
        model, context = engine_settings(ComfyUiModel, url=fake.url)
        backend = ComfyUiBackend(model, context, (), None)
        await backend.start()
        try:
            expect_failure(await refusal(backend, HILL), Reason.UNSUPPORTED_OPERATION, "workflow/NAME")
        finally:
            await backend.stop()


async def test_oversized_image_is_rejected(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=replace(LIMITS, max_image_bytes=1024 * 1024)) as (fake, backend):
        fake.worker.padding_bytes = 2 * 1024 * 1024
        assert (await refusal(backend, HILL)).reason is Reason.BACKEND_PROTOCOL_ERROR


async def test_unload_frees_the_memory_and_waits_until_it_is_available(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        await answer(backend, HILL)
        before = fake.worker.vram_free
        assert await backend.sleep() is True
        assert fake.worker.vram_free > before
        await backend.start()
        assert len(collected_images(await answer(backend, HILL))) == 1


async def test_rejected_quantization_ended_a_sleeping_comfyui(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, backend):
        assert await backend.sleep() is True
        with pytest.raises(WeftError, match="quantization"):
            await backend.start(LoadOrder(model_path=tmp_path))
        assert await backend.responds(1.0)


async def test_unload_fails_if_the_memory_is_not_freed_in_time(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=replace(LIMITS, free_seconds=0.2)) as (fake, backend):
        await answer(backend, HILL)
        fake.worker.frees = False
        assert await backend.sleep() is False


async def test_unload_is_skipped_while_foreign_prompts_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as (fake, backend):
        fake.worker.pace.hold()
        await queue_foreign(fake)
        assert await backend.sleep() is False
        assert not any(path == "/free" for _, path, _ in fake.requests)


async def test_unresponsive_comfyui_cannot_be_attached() -> None:
    backend = attached("http://127.0.0.1:9")
    with fails(Reason.CONNECT_FAILED) as caught:
        await backend.start()
    assert "127.0.0.1" not in caught.value.message


def started() -> ComfyUiBackend:
    folders = ("--output-directory", "{output}", "--input-directory", "{input}")
    model, context = engine_settings(ComfyUiModel)
    return ComfyUiBackend(model, context, (*COMMAND, *folders), workflow(), limits=LIMITS)


def has_process(backend: ComfyUiBackend) -> bool:
    return backend.process_id is not None


@pytest.mark.slow("starts a program")
async def test_managed_comfyui_generates_images_leaves_no_file_and_stops() -> None:
    backend = started()
    try:
        await backend.start()
        assert has_process(backend)
        source = chat_pb2.MediaPart(media_type="image/png", data=picture(8, 8, "ff0000"))
        payload = image_pb2.ImagePayload(prompt="a hill", images=[source])
        assert len(collected_images(await answer(backend, payload, workflow=edit_workflow()))) == 1
        assert backend._folder is not None
        folder = backend._folder.path
        assert [name for name in files_in(folder) if name != "lock"] == []
        assert await backend.sleep() is True
        assert has_process(backend)
    finally:
        await backend.stop()
    assert not has_process(backend)
    assert not folder.exists()


@pytest.mark.slow("starts a program")
async def test_managed_comfyui_that_crashes_in_a_node_is_reported_dead() -> None:
    backend = started()
    try:
        await backend.start()
        assert (await refusal(backend, with_fault("crash"))).reason is Reason.SERVER_DIED
    finally:
        await backend.stop()
