"""What llama.cpp's server says about itself once it has loaded: what is really in force, whatever it was told."""

from dataclasses import dataclass

import msgspec

from runner_svc.backends.engine_json import JSON_FAULTS
from runner_svc.backends.openai_http import OpenAiHttp
from weft.kernel.errors import WeftError

PROPS = "/props"
TIMEOUT_SECONDS = 5.0
_MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProps:
    """Figures that are 0 are not known."""

    context_tokens: int = 0
    """Of one slot."""
    slots: int = 0


class _Settings(msgspec.Struct):
    n_ctx: int = 0


class _Answer(msgspec.Struct):
    total_slots: int = 0
    default_generation_settings: _Settings = msgspec.field(default_factory=_Settings)


async def read_props(http: OpenAiHttp) -> ServerProps:
    """The answer to GET /props; of a server that gives none of use, nothing is known."""
    try:
        status, body = await http.ask("GET", PROPS, TIMEOUT_SECONDS)
    except WeftError:
        return ServerProps()
    return parse_props(body) if status == 200 else ServerProps()


def parse_props(body: bytes) -> ServerProps:
    """What is known from an answer's body."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except JSON_FAULTS:
        return ServerProps()
    return ServerProps(context_tokens=_sane(answer.default_generation_settings.n_ctx), slots=_sane(answer.total_slots))


def _sane(number: int) -> int:
    return number if 0 < number <= _MAX_NUMBER else 0
