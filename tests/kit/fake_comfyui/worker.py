"""The fake's worker: the queue of prompts, the running one, its messages, and the history."""

import asyncio
import heapq
import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.fake_comfyui.nodes import MODEL_BYTES, Prompt, order_of, picture, signature_of, size_of

PREVIEW_IMAGE, PREVIEW_IMAGE_WITH_METADATA = 1, 4
PNG = 2
VRAM_TOTAL = 8 * 1024**3
Send = Callable[[str | int, Any, str | None], None]
"""Sends a message to the client with this id, or to all; a number and bytes are a binary message."""


class _InterruptedError(Exception):
    pass


class _NodeFailedError(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Pace:
    """The speed of steps. A held worker waits before each step until it is released."""

    step_seconds: float = 0.0
    _steps: asyncio.Semaphore | None = None

    def hold(self) -> None:
        """Makes the worker wait before each step from now on."""
        self._steps = asyncio.Semaphore(0)

    def let(self, steps: int) -> None:
        """Lets this many steps happen."""
        assert self._steps is not None, "hold comes first"
        for _ in range(steps):
            self._steps.release()

    def go(self) -> None:
        """Stops waiting."""
        held, self._steps = self._steps, None
        if held is not None:
            for _ in range(10_000):
                held.release()

    async def step(self) -> None:
        """Waits until the next step may happen."""
        if self._steps is not None:
            await self._steps.acquire()
        await asyncio.sleep(self.step_seconds)


@dataclass(slots=True)
class Item:
    """A prompt."""

    number: float
    prompt_id: str
    prompt: Prompt
    extra_data: dict[str, Any]
    outputs: tuple[str, ...]

    @property
    def client_id(self) -> str | None:
        """The client that receives its messages."""
        found = self.extra_data.get("client_id")
        return found if isinstance(found, str) else None

    def listed(self) -> list[Any]:
        """Returns it as in /queue and /history."""
        return [self.number, self.prompt_id, self.prompt, self.extra_data, list(self.outputs)]

    def __lt__(self, other: "Item") -> bool:
        return self.number < other.number


@dataclass(slots=True, kw_only=True)
class Worker:
    """Runs one prompt at a time."""

    folder: Path
    """Contains input, output and temp."""
    send: Send
    pace: Pace = field(default_factory=Pace)
    padding_bytes: int = 0
    """Number of bytes appended to each written image."""
    crash: Callable[[], None] = lambda: os._exit(1)
    """The effect of a node with the fault crash."""
    frees: bool = True
    """Whether /free is available."""
    pending: list[Item] = field(default_factory=list)
    running: Item | None = None
    history: dict[str, dict[str, Any]] = field(default_factory=dict)
    executed_count: int = 0
    """Number of started prompts."""
    interrupted: list[str] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    last_node: str | None = None
    _interrupt: asyncio.Event = field(default_factory=asyncio.Event)
    _flags: set[str] = field(default_factory=set)
    _cached: dict[str, dict[str, Any]] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def vram_free(self) -> int:
        """Free accelerator memory, in bytes."""
        return VRAM_TOTAL - MODEL_BYTES * len(self.loaded)

    def put(self, item: Item) -> None:
        """Queues a prompt."""
        heapq.heappush(self.pending, item)
        self.note_queue()
        self._wake.set()

    def delete(self, prompt_id: str) -> None:
        """Removes a pending prompt; ignores any other id."""
        self.pending = [item for item in self.pending if item.prompt_id != prompt_id]
        heapq.heapify(self.pending)
        self.note_queue()

    def interrupt(self, prompt_id: str | None) -> None:
        """Interrupts the running prompt, or only if it has this id."""
        if prompt_id is None or (self.running is not None and self.running.prompt_id == prompt_id):
            # As in ComfyUI: the flag stays until the next node checks it, even one of another prompt.
            self._interrupt.set()

    def free(self, flags: set[str]) -> None:
        """Records what to free; it is freed when no prompt is running."""
        if self.frees:
            self._flags |= flags
            self._wake.set()

    def note_queue(self) -> None:
        """Sends the number of prompts to all clients."""
        self.send("status", {"status": {"exec_info": {"queue_remaining": self.remaining}}}, None)

    @property
    def remaining(self) -> int:
        """Number of pending and running prompts."""
        return len(self.pending) + (self.running is not None)

    async def work(self) -> None:
        """Runs prompts as they arrive, until cancelled."""
        while True:
            self._free_memory()
            if not self.pending:
                self._wake.clear()
                await self._wake.wait()
                continue
            self.running = item = heapq.heappop(self.pending)
            self.note_queue()
            await self._run(item)

    def _free_memory(self) -> None:
        if self._flags:
            self.loaded.clear()
        if "free_memory" in self._flags:
            self._cached.clear()
        self._flags.clear()

    async def _run(self, item: Item) -> None:
        self._interrupt.clear()
        self.executed_count += 1
        messages: list[list[Any]] = []
        outputs: dict[str, Any] = {}

        def tell(kind: str, data: dict[str, Any], *, to_all: bool = False) -> None:
            data = {"prompt_id": item.prompt_id, **data}
            if kind.startswith("execution_"):
                data["timestamp"] = int(time.time() * 1000)
                messages.append([kind, data])
            if to_all or item.client_id is not None:
                self.send(kind, data, None if to_all else item.client_id)

        tell("execution_start", {})
        node, status = "", "error"
        try:
            names = order_of(item.prompt, item.outputs)
            known = [name for name in names if signature_of(item.prompt, name) in self._cached]
            tell("execution_cached", {"nodes": known})
            for node in names:
                if node not in known:
                    await self._execute(item, node, tell)
                if node in item.outputs:
                    outputs[node] = self._cached[signature_of(item.prompt, node)]
                    tell("executed", {"node": node, "display_node": node, "output": outputs[node]})
            tell("execution_success", {})
            status = "success"
        except _InterruptedError:
            self.interrupted.append(item.prompt_id)
            tell("execution_interrupted", _where(item, node), to_all=True)
        except _NodeFailedError as failed:
            about = {"exception_message": str(failed), "exception_type": failed.kind, "traceback": ["fake\n"]}
            tell("execution_error", {**_where(item, node), **about, "current_inputs": {}, "current_outputs": []})
        self.running = self.last_node = None
        self.history[item.prompt_id] = {
            "prompt": item.listed(),
            "outputs": outputs,
            "status": {"status_str": status, "completed": status == "success", "messages": messages},
            "meta": {},
        }
        self.note_queue()
        if item.client_id is not None:
            self.send("executing", {"node": None, "prompt_id": item.prompt_id}, item.client_id)

    async def _execute(self, item: Item, node: str, tell: Callable[..., None]) -> None:
        kind, inputs = item.prompt[node]["class_type"], item.prompt[node]["inputs"]
        self.last_node = node
        tell("executing", {"node": node, "display_node": node})
        self._look()
        if kind == "CheckpointLoaderSimple":
            self.loaded.add(inputs["ckpt_name"])
        if kind == "KSampler":
            await self._sample(item, node, inputs["steps"], tell)
        if kind == "FakeFault":
            await self._fail(inputs["fault"])
        result = {"images": [self._saved(item, node)]} if node in item.outputs else {}
        self._cached[signature_of(item.prompt, node)] = result

    async def _sample(self, item: Item, node: str, steps: int, tell: Callable[..., None]) -> None:
        width, height = size_of(item.prompt)
        signature = signature_of(item.prompt, node)
        for step in range(1, steps + 1):
            await self.pace.step()
            self._look()
            tell("progress", {"value": step, "max": steps, "node": node})
            state = {"value": step, "max": steps, "state": "running", "node_id": node, "prompt_id": item.prompt_id}
            tell("progress_state", {"nodes": {node: state}}, to_all=True)
            preview = picture(min(width, 64), min(height, 64), signature)
            self.send(PREVIEW_IMAGE, struct.pack(">I", PNG) + preview, item.client_id)
            about = json.dumps({"node_id": node, "prompt_id": item.prompt_id, "image_type": "image/png"}).encode()
            framed = struct.pack(">I", len(about)) + about + preview
            self.send(PREVIEW_IMAGE_WITH_METADATA, framed, item.client_id)

    async def _fail(self, fault: str) -> None:
        match fault:
            case "error":
                raise _NodeFailedError("RuntimeError", "the tensors do not match")
            case "out_of_memory":
                raise _NodeFailedError("torch.OutOfMemoryError", "Allocation on device would exceed allowed memory.")
            case "crash":
                self.crash()
                await asyncio.Event().wait()
            case "hang":
                await self._interrupt.wait()
                self._look()

    def _look(self) -> None:
        """Raises if the running prompt was interrupted."""
        if self._interrupt.is_set():
            self._interrupt.clear()
            raise _InterruptedError

    def _saved(self, item: Item, node: str) -> dict[str, str]:
        """Writes an output node's image; returns how it is listed."""
        kind, inputs = item.prompt[node]["class_type"], item.prompt[node]["inputs"]
        place = "output" if kind == "SaveImage" else "temp"
        prefix = inputs["filename_prefix"] if kind == "SaveImage" else f"ComfyUI_temp_{item.prompt_id[:5]}"
        subfolder, _, name = prefix.rpartition("/")
        folder = self.folder / place / subfolder
        folder.mkdir(parents=True, exist_ok=True)
        count = len(list(folder.glob(f"{name}_*_.png"))) + 1
        file = folder / f"{name}_{count:05}_.png"
        image = picture(*size_of(item.prompt), signature_of(_unnamed(item.prompt), node))
        file.write_bytes(image + bytes(self.padding_bytes))
        return {"filename": file.name, "subfolder": subfolder, "type": place}


def _unnamed(prompt: Prompt) -> Prompt:
    """Returns a prompt without output file names, which do not affect its images."""
    plain: Prompt = {}
    for name, node in prompt.items():
        inputs = {key: value for key, value in node["inputs"].items() if key != "filename_prefix"}
        plain[name] = {**node, "inputs": inputs}
    return plain


def _where(item: Item, node: str) -> dict[str, Any]:
    return {"node_id": node, "node_type": item.prompt.get(node, {}).get("class_type", ""), "executed": []}
