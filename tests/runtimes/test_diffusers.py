"""diffusers itself, in the server program under its own environment, with pipelines of small random weights."""

import asyncio
import os
import resource
import struct
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import SkipTest

import psutil
import pytest
from kit.engine_settings import engine_settings
from native_builds import built_diffusers
from typing_extensions import override

from runner_svc.backend.port import CallInfo
from runner_svc.runtimes.model_engine import ModelContext
from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2
from weft.dispatch.frames import Frame, GenerationPayload, collected_images
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft_extensions.engines.diffusers.diffusers_backend import DiffusersBackend
from weft_extensions.engines.diffusers.runtime import DiffusersModel
from weft_extensions.engines.library_server import program_command
from weft_testing.conformance.backend import Engine, LoadOrderChecks, ProcessChecks

SERVER_PROGRAM = "weft_extensions.engines.diffusers.server"

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]

CALL = CallInfo(request_id="r1", traceparent="")
FAMILIES = ("sd", "sdxl", "sd3", "flux")
START_SECONDS = 180.0
"""A start imports PyTorch and diffusers, 24 s on a busy machine."""
ANSWER_SECONDS = 180.0
NOTICE_SECONDS = 60.0


def _settings(family: str = "sd", **settings: Any) -> tuple[DiffusersModel, ModelContext]:
    python, pipelines = built_diffusers()
    # Nothing of the repository is on the path of this interpreter, but for what the bootstrap puts there.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = program_command(SERVER_PROGRAM, str(python))
    given = {"path": pipelines / family, "command": command, "environment": environment, "threads": 1, **settings}
    return engine_settings(DiffusersModel, **given)


class _AnswersChats(DiffusersBackend):
    """A backend that makes images for each chat, for the checks of processes, whose requests are chats."""

    steps = 2

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        images = _payload(count=2 if self.steps == 2 else 10, steps=self.steps, partial_images=8)
        async with aclosing(self.generate_images(images, call)) as frames:
            async for frame in frames:
                shown = any(event.HasField("partial_image") or event.HasField("image") for event in frame)
                text = [event_pb2.InferenceEvent(delta=event_pb2.Delta(text="x"))] if shown else []
                yield [*text, *frame]


class TestDiffusers(LoadOrderChecks, ProcessChecks):
    offered = Operation.IMAGE
    start_seconds = START_SECONDS
    notice_seconds = NOTICE_SECONDS

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path

    def make_variant(self) -> Path:
        variant = self._tmp_path / "variant"
        variant.symlink_to(built_diffusers()[1] / "sdxl")
        return variant

    def make_backend(self, engine: Engine) -> DiffusersBackend:
        if engine not in (Engine.NORMAL, Engine.SLOW):
            raise SkipTest("the real library has no such fault switch")
        backend = _AnswersChats(*_settings())
        backend.steps = 100 if engine is Engine.SLOW else 2
        return backend


@asynccontextmanager
async def _running(family: str = "sd", **settings: Any) -> AsyncGenerator[DiffusersBackend]:
    backend = DiffusersBackend(*_settings(family, **settings))
    async with asyncio.timeout(START_SECONDS):
        await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


def _payload(**fields: Any) -> image_pb2.ImagePayload:
    return image_pb2.ImagePayload(**{"prompt": "a lighthouse", "size": "64x64", "steps": 4, "seed": 7, **fields})


async def _frames(backend: DiffusersBackend, payload: image_pb2.ImagePayload) -> list[Frame]:
    async with asyncio.timeout(ANSWER_SECONDS):
        return [frame async for frame in backend.generate_images(payload, CALL)]


async def _images(backend: DiffusersBackend, payload: image_pb2.ImagePayload) -> list[bytes]:
    return [image.image.data for image in collected_images(await _frames(backend, payload))]


def _png(width: int = 64, height: int = 64, rows: bytes | None = None) -> chat_pb2.MediaPart:
    """A PNG in RGB, dark on the left and light on the right; `rows`: its compressed pixels instead."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\x00" + b"".join(bytes([column * 255 // width] * 3) for column in range(width))
    pixels = zlib.compress(row * height) if rows is None else rows
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return chat_pb2.MediaPart(data=data, media_type="image/png")


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_is_deterministic_per_seed_for_text_image_and_mask(family: str) -> None:
    async with _running(family) as backend:
        first, second = await _images(backend, _payload(count=2))
        assert first.startswith(b"\x89PNG")
        assert first != second, "the second one has another seed"
        assert await _images(backend, _payload(seed=8)) == [second]
        assert await _images(backend, _payload()) == [first]
        assert await _images(backend, _payload(prompt="a dog")) != [first]
        [changed] = await _images(backend, _payload(images=[_png()], strength=0.5))
        [painted] = await _images(backend, _payload(images=[_png()], mask=_png(), strength=0.5))
        assert len({first, changed, painted}) == 3
        assert await _images(backend, _payload()) == [first], "other pipelines over the same weights change nothing"


@pytest.mark.parametrize("family", FAMILIES)
async def test_progress_and_previews_follow_the_steps_of_every_family(family: str) -> None:
    async with _running(family) as backend:
        frames = await _frames(backend, _payload(steps=6, partial_images=2, output_format="jpeg"))
    events = [event for frame in frames for event in frame]
    previews = [event.partial_image for event in events if event.HasField("partial_image")]
    assert [preview.partial_index for preview in previews] == [0, 1]
    assert all(preview.image.data.startswith(b"\xff\xd8\xff") for preview in previews)
    progress = [event.work_progress for event in events if event.HasField("work_progress")]
    assert (progress[-1].done, progress[-1].total) == (6, 6)
    receipt = events[-1].finished.receipt
    assert (receipt.usage.image_steps, receipt.usage.image_pixels) == (6, 64 * 64)
    assert receipt.gpu_time.ToMicroseconds() > 0


async def test_cancelled_request_frees_the_slot_within_one_step() -> None:
    async with _running() as backend:
        done = 0.0
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            aclosing(backend.generate_images(_payload(steps=100), CALL)) as frames,
        ):
            async for frame in frames:
                done = max([done, *(event.work_progress.done for event in frame)])
                if done >= 2:
                    break
        assert done < 100, "it was still at work"
        assert len(await _images(backend, _payload(steps=1))) == 1, "the next request has the slot"


async def test_invalid_images_are_rejected_by_field_and_the_process_continues() -> None:
    bomb = _png(16_000, 16_000, zlib.compress(b"\x00" * 10_000_000))
    giant = _png(60_000, 60_000, zlib.compress(b"\x00" * 10_000_000))
    cut = chat_pb2.MediaPart(data=_png().data[:-40], media_type="image/png")
    flipped = bytearray(_png().data)
    flipped[60] ^= 0xFF
    bad = [
        (bomb, "images[0]: has 16000x16000 pixels"),
        (giant, "images[0]: cannot be read as one of PNG, JPEG, WEBP: Image size (3600000000 pixels) exceeds limit"),
        (cut, "images[0]: cannot be read"),
        (chat_pb2.MediaPart(data=bytes(flipped), media_type="image/png"), "images[0]: cannot be read"),
        (chat_pb2.MediaPart(data=b"GIF89a" + bytes(100), media_type="image/gif"), "images[0]: cannot be read"),
        (chat_pb2.MediaPart(data=b"%!PS-Adobe-3.0 EPSF-3.0\n", media_type="image/png"), "images[0]: cannot be read"),
        (chat_pb2.MediaPart(data=b"x", media_type="image/png"), "images[0]: cannot be read"),
        (_png(20_000, 1, zlib.compress(bytes(60_001))), "images[0]: has 20000x1 pixels"),
    ]
    async with _running(extra_arguments=("--max-source-pixels", "1000000")) as backend:
        engine = psutil.Process(backend.process_id)
        for image, begins in bad:
            with pytest.raises(WeftError) as refused:
                await _frames(backend, _payload(images=[image]))
            assert refused.value.reason is Reason.INVALID_ARGUMENT
            assert refused.value.message.startswith(begins), refused.value.message
            assert "/" not in refused.value.message.partition(": ")[2], "it names no file of the machine"
        assert await _images(backend, _payload(images=[_png()]))
        assert psutil.Process(backend.process_id) == engine


async def test_out_of_memory_fails_only_the_request() -> None:
    async with _running(extra_arguments=("--max-pixels", "268435456")) as backend:
        assert backend.process_id is not None
        await _images(backend, _payload())
        taken = psutil.Process(backend.process_id).memory_info().vms
        resource.prlimit(backend.process_id, resource.RLIMIT_AS, (taken + 300_000_000, resource.RLIM_INFINITY))
        with pytest.raises(WeftError) as failed:
            await _frames(backend, _payload(size="4096x4096", steps=1))
        assert failed.value.reason is Reason.OUT_OF_MEMORY, failed.value.message
        assert "a smaller size" in failed.value.message
        assert len(await _images(backend, _payload())) == 1
