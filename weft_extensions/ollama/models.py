"""GET /api/tags, /api/ps, /api/version and /, POST /api/show: models and the server in Ollama's format.

Unknown facts are left out, and those in which the members of a pool differ. The texts in `details`, which clients
expect to be present, are then empty, as Ollama's are for models that are not on its disk.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from gateway.answers.unary import json_response
from gateway.deps import Gateway
from gateway.errors import OLLAMA_JSON
from gateway.intake.body import read_model
from gateway.intake.headers import tenant_of
from gateway.openai.extension_fields import unknown_fields
from gateway.openai.models import asked_entry, model_list, not_available, visible_entry, visible_list
from gateway.request_facts import facts_of
from gateway.workbench.serving import PAGE
from weft.api.registry.v1 import model_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.agents import name_asked_for
from weft.dispatch.fleet import FleetView, ModelView, capabilities_in, file_in
from weft.kernel.access.principal import VIEW_MODELS
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import ThinkingMode
from weft.kernel.requests.request_values import Skill
from weft.kernel.text.json_lines import encode_json
from weft_extensions.ollama.answers import timestamp
from weft_extensions.ollama.names import SURFACE, mesh_name
from weft_extensions.ollama.schema import OllamaShowRequest

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
INSTEAD = {
    "create": "models are made by weft.yaml or `weft apply`; one with a system prompt and parameters is an agent",
    "copy": "a second name of a model is another model of weft.yaml with the same file, or a pool or a route",
    "push": "models are not uploaded: their files stay where they are",
    "delete": "remove models with `weft delete model NAME`, and their files with `weft models rm`",
    "blob": "files are not uploaded: `weft pull` takes a folder, a URL or a name on the hub",
}
"""What to use instead, by unsupported action."""


async def refuse(what: str, request: Request) -> Response:
    """Not supported; the error message names the alternative."""
    facts_of(request.scope).surface = SURFACE
    raise WeftError(Reason.UNSUPPORTED_OPERATION, f"not supported over Ollama's API: {INSTEAD[what]}")


async def refuse_blob(request: Request) -> Response:
    """Not supported; the error message names the alternative."""
    if _DIGEST.fullmatch(request.path_params["digest"]) is None:
        raise invalid_field("digest", "must be sha256: and 64 hex digits")
    return await refuse("blob", request)


refuse_create, refuse_copy, refuse_push, refuse_delete = (
    partial(refuse, what) for what in ("create", "copy", "push", "delete")
)


API_VERSION = "0.12.11"
"""The newest version of Ollama whose inference requests are supported. Clients enable features by it."""
ARCHITECTURE = "weft"
"""Prefix of keys in `model_info`: clients look up the context length under the name of the architecture."""
_CAPABILITIES = {"chat": "completion", "completion": "completion", "embedding": "embedding"}
_SKILLS = {Skill.IMAGE: "vision", Skill.AUDIO: "audio", Skill.TOOLS: "tools"}
_IN_MEMORY = frozenset({InstanceState.PHASE_READY, InstanceState.PHASE_DRAINING})
_RUNNING = "weft is running. It speaks the APIs of OpenAI (/v1), Anthropic (/v1/messages) and Ollama (/api).\n"


async def list_tags(deps: Gateway, request: Request) -> Response:
    """Lists all models that `GET /v1/models` lists, in Ollama's format."""
    facts = facts_of(request.scope)
    facts.surface = SURFACE
    view = deps.fleet.view
    listed = visible_list(model_list(view, tenant_of(request.scope)), facts.principal)
    return _json({"models": [_tag(view, entry) for entry in listed["data"]]})


async def show_model(deps: Gateway, request: Request) -> Response:
    """Returns the details of one model, in Ollama's format."""
    facts = facts_of(request.scope)
    facts.surface = SURFACE
    params = await read_model(request, OllamaShowRequest, deps.config)
    given = params.model or params.name
    if not given:
        raise invalid_field("model", "is required")
    view = deps.fleet.view
    asked = deps.asked(request.scope, mesh_name(view, given))
    facts.principal.require_name(VIEW_MODELS, name_asked_for(asked.model))
    entry = asked_entry(view, asked)
    if entry is None:
        raise not_available(view, mesh_name(view, given))
    entry = visible_entry(entry, facts.principal)
    members = _members(view, entry)
    context, file = entry["meta"]["context_tokens"], _file(view, members)
    architecture = file.architecture or ARCHITECTURE
    information = {
        "general.architecture": architecture,
        "general.basename": entry["id"],
        **({"general.parameter_count": file.parameter_count} if file.parameter_count else {}),
        **({f"{architecture}.context_length": context} if context else {}),
    }
    return json_response(
        {
            "details": _details(entry, file),
            "model_info": information,
            "capabilities": _capabilities(view, entry, members),
            "modified_at": timestamp(entry["created"]),
            "meta": entry["meta"],
        },
        media_type=OLLAMA_JSON,
        warnings=unknown_fields(params),
    )


async def list_running(deps: Gateway, request: Request) -> Response:
    """Lists the loaded models, in Ollama's format."""
    facts = facts_of(request.scope)
    facts.surface = SURFACE
    view = deps.fleet.view
    listed = visible_list(model_list(view), facts.principal)
    entries = (entry for entry in listed["data"] if not {"agent", "route", "workflow"} & set(entry["meta"]))
    running = ((entry, _loaded(view, _members(view, entry))) for entry in entries)
    now = deps.clock.utc_now()
    return _json({"models": [_running(view, entry, loaded, now) for entry, loaded in running if loaded]})


async def get_version(request: Request) -> Response:
    """Returns the supported version of Ollama's API, and the version of weft."""
    facts_of(request.scope).surface = SURFACE
    return _json({"version": API_VERSION, "server": "weft", "server_version": version("weft")})


async def get_root(request: Request) -> Response:
    """Returns one line of text that weft is running; redirects browsers to the workbench. Needs no key."""
    facts_of(request.scope).surface = SURFACE
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(PAGE, status_code=303, headers={"vary": "accept"})
    return PlainTextResponse(_RUNNING)


def _json(body: object) -> Response:
    return json_response(body, media_type=OLLAMA_JSON)


def _members(view: FleetView, entry: dict[str, Any]) -> list[ModelView]:
    return [view.models[name] for name in entry["meta"]["members"] if name in view.models]


def _tag(view: FleetView, entry: dict[str, Any]) -> dict[str, object]:
    members = _members(view, entry)
    file = _file(view, members)
    return {
        "name": entry["id"],
        "model": entry["id"],
        "modified_at": timestamp(entry["created"]),
        **({"size": file.size_bytes} if file.size_bytes else {}),
        "digest": _digest(entry, members),
        "details": _details(entry, file),
        "capabilities": _capabilities(view, entry, members),
        "meta": entry["meta"],
    }


def _running(
    view: FleetView, entry: dict[str, Any], loaded: Sequence[InstanceState], now: datetime
) -> dict[str, object]:
    """Returns the entry of a model with these loaded instances."""
    members = _members(view, entry)
    memory = [instance.memory for instance in loaded if instance.HasField("memory")]
    held = sum(one.measured_bytes if one.HasField("measured_bytes") else one.leased_bytes for one in memory)
    resident = [one.resident_bytes for one in memory if one.HasField("resident_bytes")]
    ends = [_end(instance, now) for instance in loaded if instance.HasField("keep_alive")]
    contexts = [instance.context_tokens for instance in loaded if instance.context_tokens]
    return {
        "name": entry["id"],
        "model": entry["id"],
        "digest": _digest(entry, members),
        "details": _details(entry, _file(view, members)),
        **({"size": held + sum(resident)} if len(resident) == len(loaded) else {}),
        **({"size_vram": held} if len(memory) == len(loaded) else {}),
        # A model that is never unloaded automatically has no expiry.
        **({"expires_at": _moment(max(ends))} if len(ends) == len(loaded) else {}),
        **({"context_length": min(contexts)} if contexts else {}),
    }


def _end(instance: InstanceState, now: datetime) -> datetime:
    """Returns when an instance is unloaded; for a busy one, assumes that its requests end now."""
    if instance.HasField("unload_time"):
        return instance.unload_time.ToDatetime(UTC)
    return now + instance.keep_alive.ToTimedelta()


def _moment(time: datetime) -> str:
    return time.replace(microsecond=0).isoformat().replace("+00:00", "Z")


def _loaded(view: FleetView, members: Iterable[ModelView]) -> list[InstanceState]:
    found = []
    for model in members:
        runner = view.runners.get(model.runner)
        instance = runner.instances.get(model.name) if runner is not None and runner.active else None
        if instance is not None and instance.phase in _IN_MEMORY:
            found.append(instance)
    return found


def _digest(entry: dict[str, Any], members: Sequence[ModelView]) -> str:
    """Returns the digest of the file that all members have, otherwise a digest of the names and file digests.

    Clients print its first characters, and detect changes of the model by it.
    """
    files = {model.digest for model in members}
    if len(files) == 1 and "" not in files:
        return files.pop().removeprefix("sha256:")
    # The creation time is left out: it may be the time of a start.
    facts = [entry["id"], *entry["meta"]["members"], *sorted(files)]
    return hashlib.sha256(encode_json(facts)).hexdigest()


def _details(entry: dict[str, Any], file: model_pb2.ModelFile) -> dict[str, object]:
    bases = entry["meta"].get("base_models", ())
    return {
        "parent_model": bases[0] if bases else "",
        "format": file.format,
        "family": file.architecture,
        "families": [file.architecture] if file.architecture else [],
        "parameter_size": _parameters(file.parameter_count),
        "quantization_level": file.quantization.upper(),
    }


def _file(view: FleetView, members: Sequence[ModelView]) -> model_pb2.ModelFile:
    """Returns the facts about their files in which all members agree."""
    files = [file_in(view, model) for model in members]
    common = model_pb2.ModelFile()
    for field in model_pb2.ModelFile.DESCRIPTOR.fields:
        values = {getattr(file, field.name) for file in files}
        if len(values) == 1:
            setattr(common, field.name, values.pop())
    return common


def _parameters(count: int) -> str:
    """Returns a parameter count in Ollama's format, such as "134.52M" or "8B"; empty: unknown."""
    for unit, word, digits in ((1_000_000_000, "B", 1), (1_000_000, "M", 2)):
        if count >= unit:
            return f"{count / unit:.{0 if count % unit == 0 else digits}f}{word}"
    return f"{count / 1000:.0f}K" if count >= 1000 else str(count or "")


def _capabilities(view: FleetView, entry: dict[str, Any], members: Sequence[ModelView]) -> list[str]:
    found = [_CAPABILITIES[name] for name in entry["meta"]["operations"] if name in _CAPABILITIES]
    known = [capabilities_in(view, model) for model in members]
    found += [word for skill, word in _SKILLS.items() if any(skill in one.skills for one in known)]
    if any(ThinkingMode.ENABLED in one.thinking_modes for one in known):
        found.append("thinking")
    return list(dict.fromkeys(found))
