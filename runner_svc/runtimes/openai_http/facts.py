"""The facts that a server that runs already tells about itself and a model. What it does not tell stays unknown."""

from contextlib import suppress

import msgspec

from runner_svc.openai_upstream.client import MODELS, OpenAiHttp
from runner_svc.openai_upstream.errors import JSON_FAULTS
from runner_svc.policy.model_names import listed_models
from runner_svc.runtimes.llama_props import ServerProps, count_in_answer, read_props
from weft.kernel.abilities import UNKNOWN, Abilities
from weft.kernel.errors import WeftError
from weft.kernel.request import Skill

SHOW = "/api/show"
"""Ollama's route of what is known of a model."""
SERVER_INFO = "/server_info?config_format=json"
"""The route of the configuration: of vLLM, only with VLLM_SERVER_DEV_MODE=1, and of SGLang."""
OLD_SERVER_INFO = "/get_server_info"
"""The same of older versions of SGLang."""
FACT_SECONDS = 5.0
"""Timeout of one route."""
_OLLAMA_OWNER = "library"
"""Owner of Ollama's own models in its list; those of a user have that user's name."""


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
    """One of each rank of data parallelism, or of the first one alone."""
    dp_size: object = None


async def read_facts(http: OpenAiHttp, name: str) -> ServerProps:
    """Returns what the server tells about the model `name`, its own name of it. Never raises."""
    answer = await http.answer_of(MODELS, FACT_SECONDS)
    status, body = (None, b"") if answer is None else answer
    listed = _entries(body) if status == 200 else []
    # The properties of llama.cpp's server are those of its one model.
    if len(listed) <= 1:
        props = await read_props(http)
        if props != ServerProps():
            return props
    if any(entry.owned_by == _OLLAMA_OWNER for entry in listed):
        return ServerProps(abilities=await _shown_by_ollama(http, name))
    # vLLM and SGLang list the context of their models, and no other server has these routes.
    is_known = any(entry.max_model_len is not None for entry in listed)
    slots = await _slots_by_configuration(http) if is_known else 0
    return ServerProps(context_tokens=_longest(listed, body, name), slots=slots)


def _entries(body: bytes) -> list[_Listed]:
    with suppress(*JSON_FAULTS):
        return msgspec.json.decode(body, type=_List).data
    return []


def _longest(listed: list[_Listed], body: bytes, name: str) -> int:
    """Returns the context of a model by vLLM's `max_model_len`; 0: unknown."""
    own = [entry for entry in listed if entry.id == name]
    if not own and len(listed) == 1 and listed_models(body).has(name):
        own = listed
    return count_in_answer(own[0].max_model_len) if own else 0


async def _slots_by_configuration(http: OpenAiHttp) -> int:
    """Returns how many requests vLLM or SGLang works on by its configuration; 0: unknown."""
    for route in (SERVER_INFO, OLD_SERVER_INFO):
        answer = await http.answer_of(route, FACT_SECONDS)
        if answer is not None and answer[0] == 200:
            return slots_of_configuration(answer[1])
    return 0


def slots_of_configuration(body: bytes) -> int:
    """Returns how many requests a server works on, by its answer to the request for its configuration; 0: unknown."""
    with suppress(*JSON_FAULTS):
        return count_in_answer(msgspec.json.decode(body, type=_VllmInfo).vllm_config.scheduler_config.max_num_seqs)
    with suppress(*JSON_FAULTS):
        info = msgspec.json.decode(body, type=_SglangInfo)
        counts = [count_in_answer(state.effective_max_running_requests_per_dp) for state in info.internal_states]
        return count_in_answer(sum(counts) * (count_in_answer(info.dp_size) or 1 if len(counts) == 1 else 1))
    return 0


async def _shown_by_ollama(http: OpenAiHttp, name: str) -> Abilities:
    with suppress(WeftError, *JSON_FAULTS):
        status, body = await http.call_route("POST", SHOW, FACT_SECONDS, msgspec.json.encode({"model": name}))
        if status == 200:
            return abilities_of_capabilities(msgspec.json.decode(body, type=_Shown).capabilities)
    return UNKNOWN


def abilities_of_capabilities(capabilities: list[str]) -> Abilities:
    """Returns what Ollama's list of a model's capabilities says; of audio it says nothing where it does not name it."""
    if "completion" not in capabilities:
        return UNKNOWN
    words = {"vision": Skill.IMAGE, "tools": Skill.TOOLS, "audio": Skill.AUDIO}
    named = frozenset(skill for word, skill in words.items() if word in capabilities)
    return Abilities(skills=named | {Skill.TEXT}, lacking=frozenset({Skill.IMAGE, Skill.TOOLS}) - named)
