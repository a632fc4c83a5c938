"""Facts that an external server reports about itself and a model. What it does not report remains unknown."""

from contextlib import suppress

import msgspec

from runner_svc.openai_upstream.client import OpenAiHttp
from runner_svc.openai_upstream.errors import JSON_FAULTS
from runner_svc.openai_upstream.server_probes import MODELS
from runner_svc.policy.model_names import listed_models
from runner_svc.runtimes.llama_props import ServerProps, count_in_answer, read_props
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities
from weft.kernel.requests.request_values import Skill

SHOW = "/api/show"
"""Ollama's route for a model's properties."""
SERVER_INFO = "/server_info?config_format=json"
"""Configuration route of vLLM (only with VLLM_SERVER_DEV_MODE=1) and SGLang."""
OLD_SERVER_INFO = "/get_server_info"
"""Configuration route of older versions of SGLang."""
FACT_SECONDS = 5.0
_OLLAMA_OWNER = "library"
"""Owner of Ollama's own models in its list; a user's models have the user's name."""


class _Listed(msgspec.Struct):
    id: str = ""
    owned_by: object = None
    max_model_len: object = None


class _List(msgspec.Struct):
    data: list[_Listed]


class _Shown(msgspec.Struct):
    capabilities: list[str]


class _Scheduler(msgspec.Struct):
    max_num_seqs: object = None


class _VllmConfig(msgspec.Struct):
    scheduler_config: _Scheduler = msgspec.field(default_factory=_Scheduler)


class _VllmInfo(msgspec.Struct):
    vllm_config: _VllmConfig


class _SglangState(msgspec.Struct):
    effective_max_running_requests_per_dp: object = None


class _SglangInfo(msgspec.Struct):
    internal_states: list[_SglangState]
    """One per data-parallel rank, or only the first rank's."""
    dp_size: object = None


async def read_facts(http: OpenAiHttp, name: str) -> ServerProps:
    """Returns what the server reports about the model, which it calls `name`. Never raises."""
    answer = await http.answer_of(MODELS, FACT_SECONDS)
    status, body = (None, b"") if answer is None else answer
    listed = _entries(body) if status == 200 else []
    # llama.cpp's server reports the properties of its only model.
    if len(listed) <= 1:
        props = await read_props(http)
        if props != ServerProps():
            return props
    if any(entry.owned_by == _OLLAMA_OWNER for entry in listed):
        return ServerProps(capabilities=await _shown_by_ollama(http, name))
    # Only vLLM and SGLang list the context of their models and have these routes.
    is_known = any(entry.max_model_len is not None for entry in listed)
    slots = await _slots_by_configuration(http) if is_known else 0
    return ServerProps(context_tokens=_longest(listed, body, name), slots=slots)


def _entries(body: bytes) -> list[_Listed]:
    with suppress(*JSON_FAULTS):
        return msgspec.json.decode(body, type=_List).data
    return []


def _longest(listed: list[_Listed], body: bytes, name: str) -> int:
    """Returns the context of a model from vLLM's `max_model_len`; 0: unknown."""
    own = [entry for entry in listed if entry.id == name]
    if not own and len(listed) == 1 and listed_models(body).has(name):
        own = listed
    return count_in_answer(own[0].max_model_len) if own else 0


async def _slots_by_configuration(http: OpenAiHttp) -> int:
    """Returns the number of concurrent requests in the configuration of vLLM or SGLang; 0: unknown."""
    for route in (SERVER_INFO, OLD_SERVER_INFO):
        answer = await http.answer_of(route, FACT_SECONDS)
        if answer is not None and answer[0] == 200:
            return slots_of_configuration(answer[1])
    return 0


def slots_of_configuration(body: bytes) -> int:
    """Returns the number of concurrent requests in a configuration response; 0: unknown."""
    with suppress(*JSON_FAULTS):
        return count_in_answer(msgspec.json.decode(body, type=_VllmInfo).vllm_config.scheduler_config.max_num_seqs)
    with suppress(*JSON_FAULTS):
        info = msgspec.json.decode(body, type=_SglangInfo)
        counts = [count_in_answer(state.effective_max_running_requests_per_dp) for state in info.internal_states]
        return count_in_answer(sum(counts) * (count_in_answer(info.dp_size) or 1 if len(counts) == 1 else 1))
    return 0


async def _shown_by_ollama(http: OpenAiHttp, name: str) -> Capabilities:
    with suppress(WeftError, *JSON_FAULTS):
        status, body = await http.call_route("POST", SHOW, FACT_SECONDS, msgspec.json.encode({"model": name}))
        if status == 200:
            return capabilities_from_ollama(msgspec.json.decode(body, type=_Shown).capabilities)
    return UNKNOWN


def capabilities_from_ollama(capabilities: list[str]) -> Capabilities:
    """Returns Ollama's capabilities of a model; audio is unknown unless listed."""
    if "completion" not in capabilities:
        return UNKNOWN
    words = {"vision": Skill.IMAGE, "tools": Skill.TOOLS, "audio": Skill.AUDIO}
    named = frozenset(skill for word, skill in words.items() if word in capabilities)
    return Capabilities(skills=named | {Skill.TEXT}, lacking=frozenset({Skill.IMAGE, Skill.TOOLS}) - named)
