"""Workflows, payloads and settings for tests with the fake ComfyUI."""

import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from kit.engine_settings import engine_settings
from kit.fake_comfyui.server import FakeComfyUi
from runner_svc.backend.port import CallInfo
from weft.api.common.v1 import image_pb2, workflow_pb2
from weft.dispatch.workflow_graph import to_canonical_workflow
from weft.documents.reader import read_message
from weft_extensions.comfyui.comfyui_backend import ComfyUiBackend
from weft_extensions.comfyui.prompt_run import RunLimits
from weft_extensions.comfyui.runtime import ComfyUiModel

_PROGRAM = (
    f"import runpy, sys; sys.path.insert(0, '{Path(__file__).parents[1]}'); "
    "runpy.run_module('kit.fake_comfyui', run_name='__main__')"
)
COMMAND = (sys.executable, "-c", _PROGRAM, "--port", "{port}")
"""The command line of an engine: a runner's programs do not find the modules of the tests."""
GRAPH: dict[str, Any] = {
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "seed": 7,
            "steps": 4,
            "cfg": 7.0,
            "model": ["4", 0],
            "positive": ["6", 0],
            "latent_image": ["5", 0],
        },
    },
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny.safetensors"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a hill", "clip": ["4", 1]}},
    "7": {"class_type": "FakeFault", "inputs": {"samples": ["3", 0], "fault": "none"}},
    "8": {"class_type": "VAEDecode", "inputs": {"samples": ["7", 0], "vae": ["4", 2]}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "ComfyUI"}},
}
INPUTS: list[dict[str, Any]] = [
    {"name": "prompt", "type": "text", "node": "6", "input": "text", "source": "prompt"},
    {"name": "width", "type": "integer", "node": "5", "input": "width", "source": "width"},
    {"name": "height", "type": "integer", "node": "5", "input": "height", "source": "height"},
    {"name": "steps", "type": "integer", "node": "3", "input": "steps", "source": "steps", "minimum": 1, "maximum": 50},
    {"name": "seed", "type": "seed", "node": "3", "input": "seed"},
    {
        "name": "fault",
        "type": "choice",
        "node": "7",
        "input": "fault",
        "choices": ["none", "error", "out_of_memory", "crash", "hang"],
    },
]
HILL = image_pb2.ImagePayload(prompt="a hill", size="128x64", seed=11)
DOCUMENT: dict[str, Any] = {"graph": GRAPH, "inputs": INPUTS, "outputs": ["9"]}


def workflow(document: dict[str, Any] | None = None) -> workflow_pb2.Workflow:
    """Returns a workflow in its canonical form."""
    found = read_message(document or DOCUMENT, workflow_pb2.Workflow)
    to_canonical_workflow(found, "")
    return found


def edit_workflow() -> workflow_pb2.Workflow:
    """Returns a workflow that edits an image."""
    graph = json.loads(json.dumps(GRAPH))
    graph["10"] = {"class_type": "LoadImage", "inputs": {"image": "example.png"}}
    graph["11"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["10", 0], "vae": ["4", 2]}}
    graph["3"]["inputs"]["latent_image"] = ["11", 0]
    del graph["5"]
    inputs = [each for each in INPUTS if each["node"] != "5"]
    image = {"name": "image", "type": "image", "node": "10", "input": "image"}
    return workflow({"graph": graph, "inputs": [*inputs, image], "outputs": ["9"]})


def call(**given: Any) -> CallInfo:
    return CallInfo(request_id="req-1", traceparent="", **given)


LIMITS = RunLimits(poll_seconds=0.05, reconnect_seconds=10.0)


def attached(
    url: str, *, whole: workflow_pb2.Workflow | None = None, limits: RunLimits = LIMITS, **given: Any
) -> ComfyUiBackend:
    """Returns the backend of an external ComfyUI. `given`: settings, or fields of the context."""
    model, context = engine_settings(ComfyUiModel, url=url, **given)
    return ComfyUiBackend(model, context, (), whole or workflow(), limits=limits)


async def queue_foreign(fake: FakeComfyUi, seed: int = 1) -> str:
    """Queues a prompt of another client; returns its id."""
    graph = json.loads(json.dumps(GRAPH))
    graph["3"]["inputs"] |= {"seed": seed, "steps": 3}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fake.url}/prompt", json={"prompt": graph, "client_id": "someone"}) as answer,
    ):
        document = await answer.json()
        return str(document["prompt_id"])


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
