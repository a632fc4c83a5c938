"""Reads a model folder's tokenizer files (chat templates, first and last token), with size limits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner_svc.model_files.gguf import MAX_NAMED_TEMPLATES, MAX_TEXT_BYTES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of additional templates, which are named like their files."""
MAX_CONFIG_BYTES = 32 * 1024 * 1024
"""Maximum size of the configuration, which may list every special token of a large vocabulary."""
_USUAL = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFolder:
    """A model folder's facts about prompts. Empty texts: missing."""

    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Additional templates by name, such as `tool_use`."""
    bos_token: str = ""
    eos_token: str = ""


def read_tokenizer_folder(folder: Path) -> TokenizerFolder:
    """Returns the facts of a folder, as far as its files have them.

    Raises INVALID_ARGUMENT for a malformed or too large file, OSError for an unreadable one.
    """
    config = _config(folder / CONFIG_FILE)
    named = _named(config.get("chat_template"))
    if isinstance(config.get("chat_template"), str):
        named[_USUAL] = config["chat_template"]
    if (folder / TEMPLATE_FILE).is_file():
        named[_USUAL] = _text(folder / TEMPLATE_FILE, MAX_TEXT_BYTES)
    further = sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    for file in further[:MAX_NAMED_TEMPLATES]:
        named[file.stem] = _text(file, MAX_TEXT_BYTES)
    return TokenizerFolder(
        chat_template=named.pop(_USUAL, None),
        named_templates=named,
        bos_token=_token(config.get("bos_token")),
        eos_token=_token(config.get("eos_token")),
    )


def _named(templates: object) -> dict[str, str]:
    """Returns the templates in a list of names and texts, the older form."""
    if not isinstance(templates, list):
        return {}
    entries = [entry for entry in templates[:MAX_NAMED_TEMPLATES] if isinstance(entry, dict)]
    return {str(entry.get("name")): str(entry["template"]) for entry in entries if "template" in entry}


def _token(token: object) -> str:
    """Returns the text of a token, which may be an object with further properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_text(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        raise _broken(path, "is not valid JSON") from None
    return config if isinstance(config, dict) else {}


def _text(path: Path, limit_bytes: int) -> str:
    with path.open("rb") as file:
        raw = file.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise _broken(path, f"is over {limit_bytes} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _broken(path, "is not UTF-8 text") from None


def _broken(path: Path, why: str) -> WeftError:
    return WeftError(Reason.INVALID_ARGUMENT, f"the model's file {path.name} {why}")
