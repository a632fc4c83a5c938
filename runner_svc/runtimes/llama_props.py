"""Properties that llama.cpp's server reports at /props."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runner_svc.openai_upstream.client import OpenAiHttp
from runner_svc.openai_upstream.errors import JSON_FAULTS
from runner_svc.policy.template_capabilities import capabilities_of_templates
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities
from weft.kernel.requests.request_values import Skill

PROPS = "/props"
PROPS_TIMEOUT_SECONDS = 5.0
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProps:
    """Reported properties of a server and its model, which may differ from its flags. 0: unknown."""

    context_tokens: int = 0
    """Context of one slot, for prompt and answer together."""
    slots: int = 0
    """Number of concurrent requests of all clients."""
    build: str = ""
    """Version of the server."""
    capabilities: Capabilities = UNKNOWN


class _Settings(msgspec.Struct):
    n_ctx: int = 0


class _Answer(msgspec.Struct):
    total_slots: int = 0
    default_generation_settings: _Settings = msgspec.field(default_factory=_Settings)
    build_info: object = None
    modalities: object = None
    chat_template_caps: object = None
    chat_template: object = None
    chat_template_tool_use: object = None


async def read_props(http: OpenAiHttp) -> ServerProps:
    """Returns the response to GET /props; all unknown if it cannot be read."""
    answer = await http.answer_of(PROPS, PROPS_TIMEOUT_SECONDS)
    return parse_props(answer[1]) if answer is not None and answer[0] == 200 else ServerProps()


def parse_props(body: bytes) -> ServerProps:
    """Parses a response to GET /props."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except JSON_FAULTS:
        return ServerProps()
    return ServerProps(
        context_tokens=count_in_answer(answer.default_generation_settings.n_ctx),
        slots=count_in_answer(answer.total_slots),
        build=answer.build_info if isinstance(answer.build_info, str) else "",
        capabilities=reported_capabilities(
            modalities=answer.modalities,
            template_caps=answer.chat_template_caps,
            templates=(answer.chat_template, answer.chat_template_tool_use),
        ),
    )


def count_in_answer(number: object) -> int:
    """Returns a number of tokens or requests in a server's response; 0: invalid."""
    return number if type(number) is int and 0 < number <= MAX_COUNT else 0


def reported_capabilities(*, modalities: object, template_caps: object, templates: Sequence[object]) -> Capabilities:
    """Returns the capabilities that a server's properties show. Properties of an unexpected type are ignored."""
    texts = [text for text in templates if isinstance(text, str) and text]
    return (
        UNKNOWN.completed_by(_of_flags({"vision": Skill.IMAGE, "audio": Skill.AUDIO}, modalities))
        .completed_by(_of_template_caps(template_caps))
        .completed_by(capabilities_of_templates(texts))
    )


def _of_flags(names: dict[str, Skill], flags: object) -> Capabilities:
    values = {skill: flags.get(name) for name, skill in names.items()} if isinstance(flags, dict) else {}
    return Capabilities(
        skills=frozenset(skill for skill, value in values.items() if value is True),
        lacking=frozenset(skill for skill, value in values.items() if value is False),
    )


def _of_template_caps(caps: object) -> Capabilities:
    """Returns whether the template supports tools, by descriptions or at least by calls in earlier turns."""
    if not isinstance(caps, dict):
        return UNKNOWN
    values = [caps.get(name) for name in ("supports_tools", "supports_tool_calls")]
    tools = frozenset({Skill.TOOLS})
    if True in values:
        return Capabilities(skills=tools)
    return Capabilities(lacking=tools) if values == [False, False] else UNKNOWN
