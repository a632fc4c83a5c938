"""The fake's node classes, the validation of a prompt, and the order in which its nodes run.

Images are small and depend on the whole graph: equal prompts produce equal images, and different ones do not.
"""

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Prompt = dict[str, Any]
MODEL_BYTES = 2 * 1024**3
"""Accelerator memory that a checkpoint takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """One class of nodes, with the checks of its inputs."""

    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    file: str = ""
    """The input that names an uploaded file; empty: none."""
    is_output: bool = False


CLASSES: Mapping[str, NodeClass] = MappingProxyType(
    {
        "CheckpointLoaderSimple": NodeClass(words={"ckpt_name": ["tiny.safetensors", "large.safetensors"]}),
        "CLIPTextEncode": NodeClass(),
        "EmptyLatentImage": NodeClass(ranges={"width": (16, 16_384), "height": (16, 16_384)}),
        "LoadImage": NodeClass(file="image"),
        "LoadImageMask": NodeClass(file="image"),
        "VAEEncode": NodeClass(),
        "KSampler": NodeClass(ranges={"seed": (0, 2**64 - 1), "steps": (1, 10_000), "cfg": (0, 100)}),
        "VAEDecode": NodeClass(),
        "SaveImage": NodeClass(is_output=True),
        "PreviewImage": NodeClass(is_output=True),
        # Not a ComfyUI node: it fails according to `fault`, otherwise it passes its input on.
        "FakeFault": NodeClass(words={"fault": ["none", "error", "out_of_memory", "crash", "hang"]}),
    }
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The check of a prompt."""

    error: Mapping[str, Any] | None
    """None: it is valid."""
    node_errors: Mapping[str, Any]
    outputs: tuple[str, ...]


def is_link(value: object) -> bool:
    """Whether an input is another node's output."""
    return isinstance(value, list)


def validated(prompt: object, files: "frozenset[str]") -> Verdict:
    """Validates like ComfyUI: unknown classes and prompts without outputs first, then each node's inputs."""
    if not isinstance(prompt, dict):
        return Verdict(_error("invalid_prompt", "Cannot execute: not an object", ""), {}, ())
    for name, node in prompt.items():
        if not isinstance(node, dict) or node.get("class_type") not in CLASSES:
            kind = node.get("class_type") if isinstance(node, dict) else None
            problem = "missing the class_type property." if kind is None else f"node {kind} does not exist."
            return Verdict(_error("invalid_prompt", f"Cannot execute because {problem}", f"Node ID '#{name}'"), {}, ())
    outputs = tuple(name for name, node in prompt.items() if CLASSES[node["class_type"]].is_output)
    if not outputs:
        return Verdict(_error("prompt_no_outputs", "Prompt has no outputs", ""), {}, ())
    found = {name: problems for name in order_of(prompt, outputs) if (problems := list(_problems(prompt, name, files)))}
    if not found:
        return Verdict(None, {}, outputs)
    node_errors = {
        name: {"errors": problems, "dependent_outputs": list(outputs), "class_type": prompt[name]["class_type"]}
        for name, problems in found.items()
    }
    details = "\n".join(f"{each['message']}: {each['details']}" for problems in found.values() for each in problems)
    return Verdict(
        _error("prompt_outputs_failed_validation", "Prompt outputs failed validation", details), node_errors, ()
    )


def _problems(prompt: Prompt, name: str, files: "frozenset[str]") -> Iterator[dict[str, Any]]:
    kind = CLASSES[prompt[name]["class_type"]]
    for key, value in prompt[name].get("inputs", {}).items():
        if is_link(value):
            continue
        least, most = kind.ranges.get(key, (-math.inf, math.inf))
        if key in kind.words and value not in kind.words[key]:
            yield _error("value_not_in_list", "Value not in list", f"{key}: '{value}' not in {kind.words[key]}")
        elif key == kind.file and value not in files:
            yield _error("custom_validation_failed", "Custom validation failed", f"{key} - Invalid image file: {value}")
        elif key in kind.ranges and value < least:
            yield _error("value_smaller_than_min", f"Value {value} smaller than min of {least}", key)
        elif key in kind.ranges and value > most:
            yield _error("value_bigger_than_max", f"Value {value} bigger than max of {most}", key)


def _error(kind: str, message: str, details: str) -> dict[str, Any]:
    return {"type": kind, "message": message, "details": details, "extra_info": {}}


def order_of(prompt: Prompt, outputs: tuple[str, ...]) -> list[str]:
    """Returns the nodes that the outputs need, in dependency order."""
    ordered: dict[str, None] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in ordered or name not in prompt or name in above:
            return
        for value in prompt[name].get("inputs", {}).values():
            if is_link(value):
                visit(str(value[0]), (*above, name))
        ordered[name] = None

    for name in outputs:
        visit(name, ())
    return list(ordered)


def signature_of(prompt: Prompt, name: str) -> str:
    """Returns a digest of a node and its dependencies: nodes with equal signatures have equal results."""
    parts: list[object] = [prompt[name]["class_type"]]
    for key, value in sorted(prompt[name].get("inputs", {}).items()):
        parts.append([key, [signature_of(prompt, str(value[0])), value[1]] if is_link(value) else value])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def size_of(prompt: Prompt) -> tuple[int, int]:
    """Returns the size of the images of a prompt, in pixels."""
    for node in prompt.values():
        if node["class_type"] == "EmptyLatentImage":
            return int(node["inputs"]["width"]), int(node["inputs"]["height"])
    return 64, 64


def picture(width: int, height: int, seed: str) -> bytes:
    """Returns a PNG in a single color, which is derived from the digest `seed`."""
    colour = bytes.fromhex(seed[:6])
    rows = zlib.compress((b"\0" + colour * width) * height, 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
