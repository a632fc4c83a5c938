"""The readable text in content that engines do not support, such as documents and search results. Pure."""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

READABLE = ("title", "filename", "url", "source", "context", "text", "summary", "content", "data", "stdout", "stderr")
READABLE_RESULTS = (*READABLE, "output", "results", "error", "error_code", "return_code")
"""Members with text for people, in reading order; others are ids, encrypted, or about presentation."""
_DATA_URL = re.compile(r"data:([a-z0-9.+/-]{1,80})(?:;charset=[a-z0-9-]{1,40})?;base64,", re.IGNORECASE)
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml", "application/x-yaml")


def text_in(value: object) -> str:
    """Returns the readable text in a JSON value, one line per piece; empty: none."""
    return "\n".join(_pieces(value))


def _pieces(value: object) -> Iterator[str]:
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, Mapping):
        for name in READABLE_RESULTS:
            if name in value and not (name == "data" and _is_encoded(value)):
                yield from _pieces(value[name])
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for each in value:
            yield from _pieces(each)


def _is_encoded(value: Mapping[str, Any]) -> bool:
    return value.get("type") == "base64" or ("media_type" in value and not _is_text(value["media_type"]))


def document_text(block: Mapping[str, Any]) -> str:
    """Returns the text of a document block of Anthropic's API, with its title; empty: no text, such as a PDF."""
    source = block.get("source")
    if not isinstance(source, Mapping):
        return ""
    if source.get("type") == "base64":
        text = _decoded(source.get("data")) if _is_text(source.get("media_type")) else ""
    elif source.get("type") in {"text", "content"}:
        text = text_in({"text": source.get("data"), "content": source.get("content")})
    else:
        text = ""
    return text and text_in({"title": block.get("title"), "context": block.get("context"), "text": text})


def file_text(file: Mapping[str, Any]) -> str:
    """Returns the text of a file of OpenAI's APIs, with its name; empty: not text, or uploaded."""
    data = file.get("file_data")
    if not isinstance(data, str) or (head := _DATA_URL.match(data)) is None or not _is_text(head[1]):
        return ""
    text = _decoded(data[head.end() :])
    return text and text_in({"filename": file.get("filename"), "text": text})


def _is_text(media_type: object) -> bool:
    return isinstance(media_type, str) and media_type.lower().startswith(_TEXT_TYPES)


def _decoded(data: object) -> str:
    try:
        return base64.b64decode(data, validate=True).decode() if isinstance(data, str) else ""
    except (binascii.Error, ValueError):
        return ""
