"""Parsing of ComfyUI's websocket messages and responses: progress, previews, the queue, errors. Pure.

The data comes from another program and is not trusted: unexpected content is ignored.
"""

import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from weft.kernel.errors.error_tree import WeftError, quoting_engine
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.media_types import image_type_of

PREVIEW_IMAGE, PREVIEW_IMAGE_WITH_METADATA = 1, 4
"""Binary messages with a preview; the second starts with metadata."""
MAX_ERROR_CHARS = 300
MAX_NODE_ID_CHARS = 64
_HEADER = struct.Struct(">I")
_OUT_OF_MEMORY = ("outofmemory", "out of memory", "exceed allowed memory")
_ADVICE = "ask for a smaller image or fewer images, or unload another model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Steps completed by a node."""

    node: str
    done: int
    total: int


class Notice(Enum):
    """A message without data."""

    QUEUE_CHANGED = auto()
    """The length of the queue has changed."""
    ENDED = auto()
    """The prompt has ended; its history has the result."""


@dataclass(frozen=True, slots=True)
class Executing:
    """The running node."""

    node: str


@dataclass(frozen=True, slots=True)
class Preview:
    """An encoded preview of the image."""

    data: bytes
    media_type: str


Message = Progress | Executing | Preview | Notice


def read_text(text: str, prompt_id: str) -> Message | None:
    """Parses a text message about a prompt; None: irrelevant or unknown."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("data"), dict):
        return None
    kind, data = message.get("type"), message["data"]
    if kind == "status":
        return Notice.QUEUE_CHANGED
    return _of_prompt(kind, data) if data.get("prompt_id", prompt_id) == prompt_id else None


def _of_prompt(kind: object, data: Mapping[str, Any]) -> Message | None:
    if kind == "progress":
        return _progress(data)
    if kind == "executing":
        node = data.get("node")
        return Notice.ENDED if node in (None, "") else Executing(str(node)[:MAX_NODE_ID_CHARS])
    return Notice.ENDED if kind in ("execution_success", "execution_error", "execution_interrupted") else None


def _progress(data: Mapping[str, Any]) -> Progress | None:
    done, total = data.get("value"), data.get("max")
    if not _is_count(done) or not _is_count(total) or not total:
        return None
    return Progress(node=str(data.get("node", ""))[:MAX_NODE_ID_CHARS], done=min(done, total), total=total)


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1_000_000


def read_binary(data: bytes, limit_bytes: int) -> Preview | None:
    """Returns the preview in a binary message; None: there is none, or it is too large or of an unknown type."""
    if len(data) < 2 * _HEADER.size or len(data) > limit_bytes:
        return None
    (kind,) = _HEADER.unpack_from(data)
    (second,) = _HEADER.unpack_from(data, _HEADER.size)
    start = 2 * _HEADER.size
    if kind == PREVIEW_IMAGE_WITH_METADATA:
        start += second
    elif kind != PREVIEW_IMAGE:
        return None
    image = data[start:]
    media_type = image_type_of(image)
    return None if media_type is None else Preview(image, media_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPrompt:
    """A prompt in the queue."""

    prompt_id: str
    client: str
    """The client that queued it; empty: unknown."""
    is_running: bool
    number: float


def read_queue(document: object) -> list[QueuedPrompt]:
    """Returns the prompts in a response of /queue, in execution order. Raises BACKEND_PROTOCOL_ERROR."""
    if not isinstance(document, dict):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "ComfyUI's answer for its queue cannot be read")
    found: list[QueuedPrompt] = []
    for key, is_running in (("queue_running", True), ("queue_pending", False)):
        items = document.get(key)
        listed = [item for item in items if isinstance(item, list)] if isinstance(items, list) else []
        found += [
            _queued(item, is_running=is_running) for item in listed if len(item) >= 2 and isinstance(item[1], str)
        ]
    # The running prompt first, then by number, because pending ones are listed as a heap.
    return sorted(found, key=lambda each: (not each.is_running, each.number))


def _queued(item: list[Any], *, is_running: bool) -> QueuedPrompt:
    extra = item[3] if len(item) > 3 and isinstance(item[3], dict) else {}
    client, number = extra.get("client_id"), item[0]
    return QueuedPrompt(
        prompt_id=item[1],
        client=client if isinstance(client, str) else "",
        is_running=is_running,
        number=float(number) if isinstance(number, int | float) else 0.0,
    )


def stage_behind(ahead: Collection[QueuedPrompt], own_clients: Collection[str]) -> str:
    """Describes what a prompt is waiting for, such as "behind 2 prompts of others"; empty: it is next."""
    others = sum(each.client not in own_clients for each in ahead)
    own = len(ahead) - others
    parts = [_prompts(others, " of others")] if others else []
    parts += [_prompts(own, " of this mesh")] if own else []
    return f"behind {' and '.join(parts)}" if parts else ""


def _prompts(count: int, whose: str) -> str:
    return f"{count} prompt{'' if count == 1 else 's'}{whose}"


def refused_prompt(status: int, document: object) -> WeftError:
    """Returns the error for a rejected prompt, naming the first faulty node."""
    error = document.get("error") if isinstance(document, dict) else None
    nodes = document.get("node_errors") if isinstance(document, dict) else None
    if isinstance(nodes, dict):
        for node, found in nodes.items():
            problems = found.get("errors") if isinstance(found, dict) else None
            if isinstance(problems, list) and problems:
                kind = shown(found.get("class_type", ""), 64)
                message = f"ComfyUI refuses node {shown(node, 64)} ({kind}): {_problem(problems[0])}"
                refused = WeftError(Reason.BACKEND_REJECTED, message, metadata={"node": shown(node, 64)})
                return quoting_engine(refused, "ComfyUI refuses a node of the prompt")
    what = _problem(error) if error is not None else f"status {status}"
    refused = WeftError(Reason.BACKEND_REJECTED, f"ComfyUI refuses the prompt: {what}")
    return quoting_engine(refused, f"ComfyUI refuses the prompt: status {status}")


def _problem(error: object) -> str:
    if not isinstance(error, dict):
        return shown(error)
    message, details = shown(error.get("message", "")), shown(error.get("details", ""))
    return f"{message} ({details})" if details else message


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """An image file written by a node."""

    name: str
    subfolder: str
    place: str
    """output or temp."""


def read_outputs(entry: Mapping[str, Any], nodes: Collection[str], most: int) -> list[OutputFile]:
    """Returns the images of these nodes from a prompt's history, in the order of the nodes.

    Raises BACKEND_ERROR if there is none, or more than `most`.
    """
    outputs = entry.get("outputs")
    found: list[OutputFile] = []
    for node in nodes:
        output = outputs.get(node) if isinstance(outputs, dict) else None
        images = output.get("images") if isinstance(output, dict) else None
        for image in images if isinstance(images, list) else []:
            if isinstance(image, dict) and isinstance(image.get("filename"), str):
                subfolder, place = image.get("subfolder", ""), image.get("type", "output")
                if isinstance(subfolder, str) and place in ("output", "temp"):
                    found.append(OutputFile(name=image["filename"], subfolder=subfolder, place=place))
    if not found:
        raise WeftError(Reason.BACKEND_ERROR, f"the workflow made no image in its output nodes {', '.join(nodes)}")
    if len(found) > most:
        raise WeftError(Reason.BACKEND_ERROR, f"the workflow made {len(found)} images; max_images allows {most}")
    return found


def end_error(entry: Mapping[str, Any]) -> WeftError | None:
    """Returns the error in the history of a finished prompt; None: it succeeded."""
    status = entry.get("status")
    if not isinstance(status, dict) or status.get("status_str") != "error":
        return None
    messages = status.get("messages")
    for message in reversed(messages) if isinstance(messages, list) else ():
        if isinstance(message, list) and len(message) == 2 and isinstance(message[1], dict):
            if message[0] == "execution_error":
                return _node_error(message[1])
            if message[0] == "execution_interrupted":
                node = shown(message[1].get("node_id", ""), 64)
                text = f"the prompt was interrupted in ComfyUI by someone else, at node {node}"
                interrupted = WeftError(Reason.BACKEND_ERROR, text, metadata={"node": node})
                return quoting_engine(interrupted, "the prompt was interrupted in ComfyUI by someone else")
    return WeftError(Reason.BACKEND_ERROR, "ComfyUI could not run the workflow and reported no reason")


def _node_error(data: Mapping[str, Any]) -> WeftError:
    node, kind = shown(data.get("node_id", ""), 64), shown(data.get("node_type", ""), 64)
    message, exception = shown(data.get("exception_message", "")), shown(data.get("exception_type", ""), 128)
    where = f"node {node} ({kind})"
    if any(sign in f"{exception} {message}".lower().replace("_", "") for sign in _OUT_OF_MEMORY):
        text = f"{where} ran out of accelerator memory; {_ADVICE}"
        lacking = WeftError(Reason.OUT_OF_MEMORY, text, metadata={"node": node})
        return quoting_engine(lacking, f"a node ran out of accelerator memory; {_ADVICE}")
    failed = WeftError(Reason.BACKEND_ERROR, f"{where} failed: {exception}: {message}", metadata={"node": node})
    return quoting_engine(failed, "a node of the ComfyUI prompt failed")


def shown(value: object, limit: int = MAX_ERROR_CHARS) -> str:
    """Returns a value from ComfyUI as one line of printable characters."""
    text = " ".join(str(value)[: 4 * limit].split())
    return "".join(filter(str.isprintable, text))[:limit]
