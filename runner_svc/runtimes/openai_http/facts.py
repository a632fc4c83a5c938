"""The facts that a server that runs already tells about itself and a model. What it does not tell stays unknown."""

from contextlib import suppress
from dataclasses import dataclass

import msgspec

from runner_svc.openai_upstream.client import MODELS, OpenAiHttp
from runner_svc.openai_upstream.errors import JSON_FAULTS
from runner_svc.policy.model_names import listed_models
from runner_svc.runtimes.llama_props import read_props
from weft.kernel.abilities import UNKNOWN, Abilities
from weft.kernel.errors import WeftError
from weft.kernel.request import Skill

SHOW = "/api/show"
"""Ollama's route of what is known of a model."""
FACT_SECONDS = 5.0
"""Timeout of one route."""
MAX_CONTEXT_TOKENS = 2**31 - 1
_OLLAMA_OWNER = "library"
"""Owner of Ollama's own models in its list; those of a user have that user's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server tells. 0: unknown."""

    context_tokens: int = 0
    """Context of one request, prompt and answer together."""
    slots: int = 0
    """Requests that the server works on at once, over all its clients."""
    abilities: Abilities = UNKNOWN


class _Listed(msgspec.Struct):
    id: str = ""
    owned_by: object = None
    max_model_len: object = None


class _List(msgspec.Struct):
    data: list[_Listed]


class _Shown(msgspec.Struct):
    capabilities: list[str]


async def read_facts(http: OpenAiHttp, name: str) -> ServerFacts:
    """Returns what the server tells about the model `name`, its own name of it. Never raises."""
    answer = await http.answer_of(MODELS, FACT_SECONDS)
    status, body = (None, b"") if answer is None else answer
    listed = _entries(body) if status == 200 else []
    # The properties of llama.cpp's server are those of its one model.
    if len(listed) <= 1:
        props = await read_props(http)
        facts = ServerFacts(context_tokens=props.context_tokens, slots=props.slots, abilities=props.abilities)
        if facts != ServerFacts():
            return facts
    if any(entry.owned_by == _OLLAMA_OWNER for entry in listed):
        return ServerFacts(abilities=await _shown_by_ollama(http, name))
    return ServerFacts(context_tokens=_longest(listed, body, name))


def _entries(body: bytes) -> list[_Listed]:
    with suppress(*JSON_FAULTS):
        return msgspec.json.decode(body, type=_List).data
    return []


def _longest(listed: list[_Listed], body: bytes, name: str) -> int:
    """Returns the context of a model by vLLM's `max_model_len`; 0: unknown."""
    own = [entry for entry in listed if entry.id == name]
    if not own and len(listed) == 1 and listed_models(body).has(name):
        own = listed
    length = own[0].max_model_len if own else None
    is_count = isinstance(length, int) and not isinstance(length, bool)
    return length if is_count and isinstance(length, int) and 0 < length <= MAX_CONTEXT_TOKENS else 0


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
