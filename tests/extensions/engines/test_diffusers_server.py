"""The diffusers backend with its real server process, over stand-ins for the libraries."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import pytest
from hosted_stage import SWITCHES, scripted
from kit.engine_settings import engine_settings
from kit.engines import ANSWER_SECONDS, CALL, started, told_lines
from kit.failures import fails
from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CallInfo, LoadOrder
from runner_svc.runtimes.model_engine import ModelContext
from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2
from weft.dispatch.frames import Frame, GenerationPayload, collected_images
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_objects import to_json_object
from weft_extensions.engines.diffusers.diffusers_backend import DiffusersBackend
from weft_extensions.engines.diffusers.runtime import DiffusersModel
from weft_extensions.engines.library_server import program_command
from weft_testing.conformance.backend import Engine, LoadOrderChecks, ProcessChecks

SERVER_PROGRAM = "weft_extensions.engines.diffusers.server"

pytestmark = pytest.mark.slow("starts engine processes")

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "safety_checker": [None, None],
}
FAULTS = SWITCHES | {Engine.SLOW: {"seconds_per_step": 0.05}}


def _folder(folder: Path, **index: Any) -> Path:
    """The folder of a pipeline whose weights are a few bytes."""
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(INDEX | index))
    for name, file in (("unet", "diffusion_pytorch_model"), ("vae", "diffusion_pytorch_model")):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / f"{file}.safetensors").write_bytes(b"weights")
    return folder


def _settings(
    model: Path, switches: dict[str, Any] | None = None, **settings: Any
) -> tuple[DiffusersModel, ModelContext]:
    given = {"path": model, "command": program_command(SERVER_PROGRAM), **settings}
    return engine_settings(DiffusersModel, **scripted("SCRIPTED_DIFFUSERS", switches, **given))


def _backend(model: Path, switches: dict[str, Any] | None = None, **settings: Any) -> DiffusersBackend:
    return DiffusersBackend(*_settings(model, switches, **settings))


class _AnswersChats(DiffusersBackend):
    """A backend that makes an image for each chat, for the checks of processes, whose requests are chats."""

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        images = image_pb2.ImagePayload(prompt="a chat", size="64x64", steps=100, partial_images=8)
        async with aclosing(self.generate_images(images, call)) as frames:
            async for frame in frames:
                shown = any(event.HasField("partial_image") or event.HasField("image") for event in frame)
                text = [event_pb2.InferenceEvent(delta=event_pb2.Delta(text="x"))] if shown else []
                yield [*text, *frame]


@pytest.mark.nightly("same checks as test_ctranslate2_server")
class TestDiffusersOverAScriptedLibrary(LoadOrderChecks, ProcessChecks):
    offered = Operation.IMAGE

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path

    def make_variant(self) -> Path:
        return _folder(self._tmp_path / "variant")

    def make_backend(self, engine: Engine) -> DiffusersBackend:
        return _AnswersChats(*_settings(_folder(self._tmp_path / "model"), FAULTS[engine]))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _folder(tmp_path / "model")


def _running(
    model: Path, switches: dict[str, Any] | None = None, **settings: Any
) -> AbstractAsyncContextManager[tuple[DiffusersBackend, BackendFacts]]:
    return started(_backend(model, switches, **settings))


def _payload(
    prompt: str = "a lighthouse", extra: dict[str, Any] | None = None, **fields: Any
) -> image_pb2.ImagePayload:
    payload = image_pb2.ImagePayload(prompt=prompt, **{"size": "64x64", "steps": 4, "seed": 7, **fields})
    payload.extra_parameters.CopyFrom(to_json_object(extra or {}, "extra"))
    return payload


def _picture(width: int = 64, height: int = 64, form: str = "PNG", **made: Any) -> chat_pb2.MediaPart:
    content = f"{form} {json.dumps({'size': [width, height], **made})}"
    return chat_pb2.MediaPart(data=content.encode(), media_type="image/png")


async def _frames(backend: DiffusersBackend, payload: image_pb2.ImagePayload) -> list[Frame]:
    async with asyncio.timeout(ANSWER_SECONDS):
        return [frame async for frame in backend.generate_images(payload, CALL)]


async def _made(backend: DiffusersBackend, payload: image_pb2.ImagePayload) -> list[dict[str, Any]]:
    """What the images of the whole answer were made with, and the format of their files."""
    images = [image.image.data.decode().partition(" ") for image in collected_images(await _frames(backend, payload))]
    return [{"format": form, **json.loads(content)} for form, _, content in images]


async def _refusal(backend: DiffusersBackend, payload: image_pb2.ImagePayload) -> tuple[Reason, str]:
    with pytest.raises(WeftError) as refused:
        await _frames(backend, payload)
    return refused.value.reason, refused.value.message


async def test_images_are_sent_one_by_one_with_incremented_seeds_and_a_receipt(model: Path) -> None:
    async with _running(model) as (backend, _):
        frames = await _frames(backend, _payload(count=3, guidance=2.5, negative_prompt="fog"))
        images = collected_images(frames)
        assert [(image.index, image.seed) for image in images] == [(0, 7), (1, 8), (2, 9)]
        made = [json.loads(image.image.data.decode().partition(" ")[2]) for image in images]
        assert [one["seed"] for one in made] == [7, 8, 9]
        expected = {"guidance": 2.5, "negative_prompt": "fog", "steps": 4, "prompt": "a lighthouse"}
        assert made[0] | expected == made[0]
        receipt = frames[-1][-1].finished.receipt
        assert (receipt.usage.image_steps, receipt.usage.image_pixels) == (12, 3 * 64 * 64)
        assert receipt.gpu_time.ToMicroseconds() > 0
        progress = [event.work_progress for frame in frames for event in frame if event.HasField("work_progress")]
        assert progress[-1].done == progress[-1].total == 12
        assert [one.done for one in progress] == sorted(one.done for one in progress)


async def test_omitted_fields_default_to_the_configuration_or_the_model_family(model: Path) -> None:
    bare = image_pb2.ImagePayload(prompt="x")
    async with _running(model) as (backend, _):
        [made] = await _made(backend, bare)
        assert (made["steps"], made["guidance"], made["format"]) == (30, 7.5, "PNG")
        frames = await _frames(backend, bare)
        assert frames[-1][-1].finished.receipt.usage.image_pixels == 64 * 64, "the size for which it was trained"
    defaults = ("--steps", "3", "--guidance", "1.0", "--strength", "0.67")
    async with _running(model, extra_arguments=defaults) as (backend, _):
        [made] = await _made(backend, bare)
        assert (made["steps"], made["guidance"]) == (3, 1.0)
        [changed] = await _made(backend, image_pb2.ImagePayload(prompt="x", images=[_picture()]))
        assert changed["steps"] == 2


async def test_previews_are_evenly_spaced_before_their_image(model: Path) -> None:
    async with _running(model, extra_arguments=("--preview-side-pixels", "32")) as (backend, _):
        frames = await _frames(backend, _payload(steps=9, count=2, partial_images=2))
        shown = [
            event for frame in frames for event in frame if event.HasField("partial_image") or event.HasField("image")
        ]
        order = [
            (event.partial_image.index, event.partial_image.partial_index)
            if event.HasField("partial_image")
            else (event.image.index, None)
            for event in shown
        ]
        assert order == [(0, 0), (0, 1), (0, None), (1, 0), (1, 1), (1, None)]
        assert all(b"preview" in event.partial_image.image.data for event in shown if event.HasField("partial_image"))
    async with _running(model, {"previews_fail": True}) as (backend, _):
        frames = await _frames(backend, _payload(partial_images=2))
        assert len(collected_images(frames)) == 1, "a preview that cannot be made costs the image nothing"


async def test_source_images_and_masks_use_the_matching_pipeline(model: Path) -> None:
    async with _running(model) as (backend, _):
        [changed] = await _made(backend, _payload(size="", strength=0.5, images=[_picture(100, 50)]))
        assert changed["pipeline"] == "StableDiffusionImg2ImgPipeline"
        assert (changed["steps"], changed["source"]["size"]) == (2, [96, 48]), "on the grid of the family"
        [painted] = await _made(backend, _payload(images=[_picture()], mask=_picture(mode="L")))
        assert painted["pipeline"] == "StableDiffusionInpaintPipeline"
        assert painted["mask"]["mode"] == "L"
        [holed] = await _made(backend, _payload(images=[_picture(mode="RGBA")], mask=_picture(mode="RGBA")))
        assert holed["source"]["ground"] == "white"
        assert holed["mask"]["transparent_becomes"] == 255, "what is transparent in a mask may be changed"
        opaque = _picture(mode="RGBA", lowest_alpha=255)
        [white] = await _made(backend, _payload(images=[_picture()], mask=opaque))
        assert "transparent_becomes" not in white["mask"]
        [plain] = await _made(backend, _payload())
        assert plain["pipeline"] == "StableDiffusionPipeline"


async def test_requested_formats_and_quality_are_used(model: Path) -> None:
    async with _running(model) as (backend, _):
        [made] = await _made(backend, _payload(output_format="webp", extra={"output_compression": 40, "eta": 0.5}))
        assert (made["format"], made["quality"], made["eta"]) == ("WEBP", 40, 0.5)
        frames = await _frames(backend, _payload(output_format="jpeg", extra={"sharpness": 3}))
        assert collected_images(frames)[0].image.data.startswith(b"JPEG ")
        assert [event.warning.field for event in frames[0] if event.HasField("warning")] == ["sharpness"]


async def test_unsupported_fields_are_rejected_by_name(model: Path) -> None:
    no_previews: dict[str, Any] = {"size": ""}
    limits = ("--max-steps", "20", "--max-pixels", str(64 * 64), "--max-source-pixels", "10000")
    async with _running(model, extra_arguments=limits) as (backend, _):
        pid = backend.process_id
        for payload, begins in (
            (_payload(size="63x64"), "size: width and height must be multiples of 8 for this model, such as 64x64"),
            (_payload(size="128x64"), "size: must have at most 4096 pixels"),
            (_payload(steps=21), "steps: must be 1 to 20"),
            (_payload(strength=0.5), "strength: needs a source image"),
            (_payload(mask=_picture()), "mask: needs a source image"),
            (_payload(images=[_picture(), _picture()]), "images: must be one"),
            (_payload(images=[_picture()], strength=0.1), "strength: of 4 steps, 0.1 leaves none"),
            (_payload(images=[_picture()], mask=_picture(32, 32)), "mask: must have the size of the image, 64x64"),
            (_payload(extra={"clip_skip": 1}), "clip_skip: Stable Diffusion does not support it"),
            (_payload("unsafe"), "prompt: the model's own safety checker withheld the image"),
            (_payload(images=[_picture(form="GIF89a")], **no_previews), "images[0]: cannot be read as one of PNG"),
            (_payload(images=[_picture(broken=True)]), "images[0]: cannot be read as one of PNG, JPEG, WEBP: broken"),
            (_payload(images=[_picture(truncated=True)]), "images[0]: cannot be read as one of PNG"),
            (_payload(images=[_picture(50_000, 50_000)]), "images[0]: has 50000x50000 pixels"),
            (_payload(images=[_picture()], mask=_picture(truncated=True)), "mask: cannot be read"),
        ):
            reason, message = await _refusal(backend, payload)
            assert (reason, message.startswith(begins)) == (Reason.INVALID_ARGUMENT, True), message
        assert await _made(backend, _payload()), "and the engine goes on"
        assert backend.process_id == pid
    async with _running(model, extra_arguments=("--max-source-bytes", str(1024 * 1024))) as (backend, _):
        large = chat_pb2.MediaPart(data=b"PNG " + b"x" * 2**20, media_type="image/png")
        _, message = await _refusal(backend, _payload(images=[large]))
        assert message.startswith(f"images[0]: has {2**20 + 4} bytes, and at most {2**20} are accepted")


async def test_family_without_negative_prompts_rejects_them(model: Path) -> None:
    _folder(model, _class_name="FluxPipeline")
    async with _running(model) as (backend, _):
        assert await _refusal(backend, _payload(negative_prompt="fog")) == (
            Reason.INVALID_ARGUMENT,
            "negative_prompt: FLUX does not support it; omit it",
        )


async def test_inpainting_only_model_rejects_text_to_image(model: Path) -> None:
    _folder(model, _class_name="StableDiffusionInpaintPipeline")
    async with _running(model, {"denoiser_channels": 9}) as (backend, _):
        reason, message = await _refusal(backend, _payload())
        assert (reason, message) == (
            Reason.UNSUPPORTED_OPERATION,
            "this model is for inpainting only, not for text to image",
        )
    async with _running(model, {"denoiser_channels": 4}) as (backend, _):
        assert await _made(backend, _payload()), "another denoiser is as good for all"


async def test_cancelled_request_frees_the_slot_within_one_step(model: Path) -> None:
    async with _running(model, {"seconds_per_step": 0.1}) as (backend, _):
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            aclosing(backend.generate_images(_payload(steps=100), CALL)) as frames,
        ):
            while not any(event.work_progress.done >= 2 for event in await anext(frames)):
                pass
        assert await _made(backend, _payload())
        steps = [line for line in backend.log_lines(1000) if line.endswith("of 100")]
        assert len(steps) <= 2 + 2, "the step at which it was given up is the last one"


async def test_out_of_memory_fails_only_the_request_and_suggests_remedies(model: Path) -> None:
    async with _running(model, {"memory_pixels": 64 * 64, "with_device": True}, cpu_offload="model") as (backend, _):
        pid = backend.process_id
        reason, message = await _refusal(backend, _payload(size="512x512"))
        assert reason is Reason.OUT_OF_MEMORY
        assert "a smaller size or fewer images" in message
        assert "cpu_offload" in message
        assert "CUDA out of memory" in message
        assert await _made(backend, _payload())
        assert backend.process_id == pid
        assert await told_lines(backend, "freed", 1), "nothing of the failed request stays on the device"
    with fails(Reason.OUT_OF_MEMORY, "cpu_offload"):
        await _backend(model, {"load_needs_too_much": True}).start()


async def test_settings_and_load_order_reach_the_library(model: Path) -> None:
    saving = ("--vae-tiling", "--attention-slicing")
    async with _running(model, {"with_device": True}, extra_arguments=saving) as (backend, _):
        lines = backend.log_lines(100)
        assert "loaded Stable Diffusion on cuda as float16" in lines
        assert {"tiling", "slicing", "on cuda"} <= set(lines)
    offloaded = {"cpu_offload": "sequential", "quantization": "bitsandbytes_4bit"}
    unchecked = ("--no-safety-checker",)
    async with _running(model, {"with_device": True}, **offloaded, extra_arguments=unchecked) as (
        backend,
        _,
    ):
        [words] = [line for line in backend.log_lines(100) if line.startswith("StableDiffusionPipeline with ")]
        given = json.loads(words.removeprefix("StableDiffusionPipeline with "))
        assert given["quantization_config"].endswith("of ['unet']")
        assert given["requires_safety_checker"] == "False"
        assert "offloaded in layers" in backend.log_lines(100)
        assert "on cuda" not in backend.log_lines(100)
    backend = _backend(model, {"with_device": True}, **offloaded)
    await backend.start(LoadOrder(shares=(), parameters={"dtype": "bfloat16"}))
    try:
        assert "loaded Stable Diffusion on cpu as bfloat16" in backend.log_lines(100), "no device may be used"
    finally:
        await backend.stop()
    with pytest.raises(WeftError, match="device: there is no CUDA device"):
        await _backend(model, device="cuda").start()


async def test_offloaded_components_follow_their_pipeline(model: Path) -> None:
    async with _running(model, {"with_device": True}, cpu_offload="model") as (backend, _):
        await _made(backend, _payload(images=[_picture()]))
        await _made(backend, _payload())
        offloaded = [line.partition(" ")[0] for line in backend.log_lines(1000) if line.endswith(" is offloaded")]
    assert offloaded == ["StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionPipeline"]


@pytest.mark.parametrize(
    ("index", "files", "message"),
    [
        ({"_class_name": "KandinskyPipeline"}, {}, "pipelines of the class KandinskyPipeline are not supported"),
        ({"_class_name": ["custom", "Mine"]}, {}, "does not name a pipeline class"),
        ({"unet": ["my_unet", "MyUNet"]}, {}, "code that comes with a model is never run"),
        ({}, {"unet/my_unet.py": "import os"}, "unet/my_unet.py is a program"),
        (
            {"text_encoder": ["transformers", "CLIPTextModel"]},
            {"text_encoder/pytorch_model.bin": "x"},
            "text_encoder/pytorch_model.bin is pickled Python, which is never loaded",
        ),
    ],
)
async def test_folder_with_code_or_pickles_is_rejected_before_any_import(
    tmp_path: Path, index: dict[str, Any], files: dict[str, str], message: str
) -> None:
    folder = _folder(tmp_path / "model", **index)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    backend = _backend(folder, {"import_fails": True})
    with fails(Reason.INVALID_ARGUMENT, message):
        await backend.start()


async def _to_the_end(frames: AsyncGenerator[Frame]) -> None:
    async with asyncio.timeout(ANSWER_SECONDS):
        async for _ in frames:
            pass


async def test_progress_does_not_count_as_a_first_answer(model: Path) -> None:
    async with (
        _running(model, {"seconds_per_step": 0.05}) as (backend, _),
        aclosing(backend.generate_images(_payload(steps=100), CALL)) as frames,
    ):
        await anext(frames)
        os.kill(backend.process_id or 0, signal.SIGSEGV)
        with pytest.raises(WeftError, match=r"before its first answer: .*built for another processor"):
            await _to_the_end(frames)
