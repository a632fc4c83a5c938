"""What candidates must have to serve a request, and why no candidate of a queue can."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from router_svc.policy.endpoints.candidates import Candidate, Needs, Readiness
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import ThinkingMode, takes_mode, untaken_words
from weft.kernel.requests.request_values import Operation, Skill

REMOTE = "remote, and the request has no permit"
NO_FALLBACK = "remote, and the mesh does not fall back to such models"
MAX_DETAILS_IN_MESSAGE = 8
_BY_SECTION = "from an openai_http server whose model section names it in `operations`"
_HOW_OFFERED = {
    Operation.RERANK: f"from a llama_server started with --reranking, or {_BY_SECTION}",
    Operation.TOKENIZE: f"from llama.cpp, or {_BY_SECTION}",
    Operation.IMAGE: f"from the runtimes diffusers and comfyui, or {_BY_SECTION}",
    Operation.TRANSCRIPTION: f"from the runtime faster_whisper, or {_BY_SECTION}",
    Operation.SPEECH: f"from the runtime piper, or {_BY_SECTION}",
}
_GATES_IN_ORDER = ("operation", "remote", "skills", "tools", "labels", "context")


@dataclass(frozen=True, slots=True)
class Profile:
    """The capabilities that needs are compared with. Candidates with equal profiles serve the same requests."""

    operations: frozenset[Operation]
    remote: bool
    skills: frozenset[Skill] | None
    thinking_modes: frozenset[ThinkingMode]
    tools: frozenset[str]
    labels: frozenset[str]
    context_tokens: int
    """Rounded down to a power of two, as in `Needs`."""


def profile_of(candidate: Candidate) -> Profile:
    """Return the profile of a candidate."""
    context = candidate.context_tokens
    return Profile(
        operations=candidate.operations,
        remote=candidate.remote,
        skills=candidate.skills,
        thinking_modes=candidate.thinking_modes,
        tools=candidate.tools,
        labels=candidate.labels,
        context_tokens=1 << (context.bit_length() - 1) if context > 0 else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSummary:
    """Why no member of a queue can serve a request, now or later."""

    reason: Reason
    message: str
    gates: Mapping[str, int]
    """Number of excluded members by gate."""


def gate(candidate: Candidate | Profile, needs: Needs) -> str:
    """Return the need that a candidate lacks, one of `_GATES_IN_ORDER`; empty: it meets all needs."""
    if needs.operation not in candidate.operations:
        return "operation"
    if candidate.remote and not needs.allow_remote:
        return "remote"
    if not _takes(candidate, needs):
        return "skills"
    if not needs.tools <= candidate.tools:
        return "tools"
    if not needs.labels <= candidate.labels:
        return "labels"
    is_long = candidate.context_tokens and needs.context_tokens > candidate.context_tokens
    return "context" if is_long else ""


def _takes(candidate: Candidate | Profile, needs: Needs) -> bool:
    """Whether a candidate supports the request's skills and thinking mode."""
    if candidate.skills is not None and not needs.skills <= candidate.skills:
        return False
    return needs.thinking is ThinkingMode.DEFAULT or takes_mode(candidate.thinking_modes, needs.thinking)


def fits(candidate: Candidate | Profile, needs: Needs) -> str:
    """Return why a candidate can never serve such a request, as text; empty: it can."""
    words = ""
    match gate(candidate, needs):
        case "operation":
            words = f"does not offer {needs.operation.name.lower()}"
        case "remote":
            words = REMOTE
        case "skills":
            lacking = frozenset[Skill]() if candidate.skills is None else needs.skills - candidate.skills
            words = untaken_words(lacking, candidate.thinking_modes, needs.thinking)
        case "tools":
            words = f"its runner lacks {', '.join(sorted(needs.tools - candidate.tools))}"
        case "labels":
            words = f"lacks the label {', '.join(sorted(needs.labels - candidate.labels))}"
        case "context":
            words = f"its context of {candidate.context_tokens} tokens is too short"
    return words


def summarize(name: str, members: Iterable[Candidate], stripped: Iterable[Candidate], needs: Needs) -> GateSummary:
    """Explain why no candidate can serve a request for the target `name`.

    `stripped`: remote fallbacks that the mesh's settings exclude. Members are filtered by one need after the other; the
    reason is the need that leaves none, so that it names what to change.
    """
    left = list(members)
    left_out = [candidate for candidate in stripped if gate(candidate, needs) in ("", "remote")]
    gates = Counter(fits(candidate, needs) or _readiness_gate(candidate) for candidate in left)
    del gates[""]
    lacking = ""
    for name_of_gate in _GATES_IN_ORDER:
        having = [candidate for candidate in left if gate(candidate, needs) != name_of_gate]
        if left and not having:
            lacking = name_of_gate
            break
        left = having
    if left_out and (lacking or not left):
        lacking = "guard"
        gates[NO_FALLBACK] += len(left_out)
    return _summary(name, lacking, needs, left, gates)


def _readiness_gate(candidate: Candidate) -> str:
    if candidate.clock_refused:
        return "its clock is wrong"
    return "no heartbeat" if candidate.readiness is Readiness.DOWN else ""


def _not_offered(name: str, operation: Operation, members: Iterable[Candidate]) -> str:
    """Return the error message, with how a runner can offer the operation if not every server offers it."""
    message = f"{name} does not offer {operation.name.lower()}"
    how = _HOW_OFFERED.get(operation)
    if how is None:
        return message
    offered: set[Operation] = set().union(*(member.operations for member in members))
    others = ", ".join(each.name.lower() for each in sorted(offered)) or "nothing"
    return f"{message}; it supports {others}. To get it, use a model {how}"


def _summary(name: str, lacking: str, needs: Needs, left: list[Candidate], gates: Mapping[str, int]) -> GateSummary:
    match lacking:
        case "operation":
            reason, message = Reason.UNSUPPORTED_OPERATION, _not_offered(name, needs.operation, left)
        case "remote":
            reason = Reason.PERMISSION_DENIED
            message = f"{name} is {REMOTE}: see allow_remote, its own and its tenant's"
        case "guard":
            reason = Reason.PERMISSION_DENIED
            message = f"only remote models could answer for {name}, and the mesh does not fall back to them"
        case "skills":
            reason, message = Reason.MODALITY_UNSUPPORTED, f"{name} {fits(left[0], needs)}"
        case "tools":
            reason = Reason.TOOL_UNAVAILABLE
            message = f"no runner that serves {name} has all of {', '.join(sorted(needs.tools))}"
        case "context":
            longest = max(candidate.context_tokens for candidate in left)
            reason = Reason.CONTEXT_LENGTH_EXCEEDED
            message = f"the prompt is longer than the context of {name}, which is {longest} tokens"
        case _:
            is_clock = any(candidate.clock_refused for candidate in left)
            reason = Reason.CLOCK_OFF if is_clock else Reason.NO_RUNNER_AVAILABLE
            message = f"no runner that serves {name} {'takes requests' if is_clock else 'is up'}{_details(left)}"
    return GateSummary(reason=reason, message=message, gates=dict(gates))


def _details(members: Iterable[Candidate]) -> str:
    details = sorted({f"{member.runner or member.model}: {member.detail}" for member in members if member.detail})
    more = "; ..." if len(details) > MAX_DETAILS_IN_MESSAGE else ""
    return f" ({'; '.join(details[:MAX_DETAILS_IN_MESSAGE])}{more})" if details else ""
