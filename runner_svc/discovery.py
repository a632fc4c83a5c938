"""Finds running engines on their usual local ports, and identifies them by their endpoints.

Answers are untrusted: every request has a timeout and a size limit, all ports are queried concurrently, and a weft mesh
is never taken for an engine.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runner_svc.openai_upstream.probe import WEFT, Answer, get
from runner_svc.policy.model_names import MAX_NAME_CHARS, ListedModels, listed_models

OLLAMA, LM_STUDIO, LLAMA_CPP, VLLM, SGLANG, OTHER = "ollama", "lmstudio", "llama-cpp", "vllm", "sglang", "server"
TITLES = {
    OLLAMA: "Ollama",
    LM_STUDIO: "LM Studio",
    LLAMA_CPP: "llama.cpp",
    VLLM: "vLLM",
    SGLANG: "SGLang",
    OTHER: "OpenAI-compatible server",
}
MAX_VERSION_CHARS = 64
_OK = 200
_NEEDS_KEY = frozenset({401, 403})
_OWNERS = {"llamacpp": LLAMA_CPP, "vllm": VLLM, "sglang": SGLANG}
"""Engines by the owner in their model list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """A running server."""

    program: str
    """Such as "ollama"; "server" if the engine is unknown."""
    url: str
    """Base URL without the API version."""
    version: str = ""
    """As it reports; empty: unknown."""
    models: tuple[str, ...] = ()
    """Its listed models, by its own names."""
    why_empty: str = ""
    """Why its models are unknown; empty: it lists them."""

    @property
    def title(self) -> str:
        """Name and version for people."""
        return f"{TITLES[self.program]} {self.version}".rstrip()


async def find_servers(addresses: Sequence[str], seconds: float) -> list[FoundServer]:
    """Returns the servers that answer at these `HOST:PORT` addresses, in order. Never raises.

    `seconds` is the timeout of each request; a server gets at most four requests.
    """
    found = await asyncio.gather(*(_server_at(f"http://{address}", seconds) for address in addresses))
    return [each for each in found if each is not None]


async def _server_at(url: str, seconds: float) -> FoundServer | None:
    """Returns the server at an address; None: there is none, or it is not an engine."""
    listed = await get(f"{url}/v1/models", seconds)
    if listed.status is None:
        return None
    models = listed_models(listed.body) if listed.status == _OK else ListedModels(names=(), is_list=False)
    if WEFT in models.owners:
        return None
    version = _json(await get(f"{url}/api/version", seconds))
    if version.get("server") == WEFT:
        return None
    program, said = await _identified(url, seconds, models, version)
    if program is None:
        if listed.status in _NEEDS_KEY:
            return FoundServer(
                program=OTHER, url=url, why_empty="it requires an API key: weft models attach URL --api-key-env NAME"
            )
        if not models.is_list:
            return None
        program = OTHER
    why = "" if models.is_list else f"it does not list them (status {listed.status})"
    return FoundServer(program=program, url=url, version=said, models=models.names, why_empty=why)


async def _identified(
    url: str, seconds: float, models: ListedModels, version: dict[str, Any]
) -> tuple[str | None, str]:
    """Returns the engine and its reported version; None: unknown engine."""
    owners = [program for owner, program in _OWNERS.items() if owner in models.owners]
    if owners == [LLAMA_CPP]:
        return LLAMA_CPP, _text(_json(await get(f"{url}/props", seconds)).get("build_info"))
    if owners:
        # Both have the route; SGLang's answer has no version.
        return owners[0], _text(_json(await get(f"{url}/version", seconds)).get("version"))
    if isinstance(version.get("version"), str):
        return OLLAMA, _text(version["version"])
    if isinstance(_json(await get(f"{url}/api/v0/models", seconds)).get("data"), list):
        return LM_STUDIO, ""
    props = _json(await get(f"{url}/props", seconds))
    if "default_generation_settings" in props:
        return LLAMA_CPP, _text(props.get("build_info"))
    return None, ""


def _json(answer: Answer) -> dict[str, Any]:
    """Returns the object in a JSON answer, or an empty one."""
    if answer.status != _OK:
        return {}
    try:
        found = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str:
    """Returns a server's text, sanitized for a terminal."""
    text = value if isinstance(value, str) else ""
    return "".join(character for character in text if character.isprintable())[:MAX_VERSION_CHARS]


def shown_models(names: Sequence[str], most: int) -> str:
    """Returns the first model names in one line, sanitized for a terminal."""
    safe = ["".join(c if c.isprintable() else "?" for c in name)[:MAX_NAME_CHARS] for name in names[:most]]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(safe) + more
