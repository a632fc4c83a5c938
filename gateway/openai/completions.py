"""POST /v1/completions: the handler, the translation of prompts, and its answers."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeGuard

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import finite_logprob, new_identity, text_finish_reason
from gateway.answers.generation import Work, streamed, unary
from gateway.deps import Inference
from gateway.gateway_config import RequestLimits
from gateway.intake.body import body_of
from gateway.intake.request_model import TextsOrTokens
from gateway.openai.choices import ChoicesAnswer, ChunkStream, stop_member, stop_reason
from gateway.openai.extension_fields import fill_extra, unknown_fields
from gateway.openai.sampling import (
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    fill_sampling,
    require_choices,
    require_stream_options_fit,
    wants_events,
    wants_usage,
)
from weft.api.common.v1 import completion_pb2, event_pb2
from weft.dispatch.frames import texts_of
from weft.dispatch.payload_checks import MAX_PROMPTS
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer


class CompletionRequest(GenerationRequest):
    """A text completion."""

    prompt: TextsOrTokens
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    """At most `n`: answers are never generated and discarded."""


async def text_completions(
    deps: Inference, request: Request, params: Annotated[CompletionRequest, body_of(CompletionRequest)]
) -> Response:
    """Continues raw text, without a chat template."""
    scope = request.scope
    context = deps.context(
        scope, surface="completions", params=params, model=params.model, operation=Operation.COMPLETION
    )
    payload = to_payload(params, deps.config.limits)
    warnings = unknown_fields(params)
    identity = new_identity(deps.clock, "cmpl", params.model)
    count, logprobs = choice_count(payload), params.logprobs is not None
    if params.stream:
        encoder = CompletionStream(
            identity,
            choice_count=count,
            logprobs=logprobs,
            include_usage=wants_usage(params),
            include_events=wants_events(params),
        )
        return streamed(Work(deps, scope, context, payload, warnings), encoder)
    answer = CompletionAnswer(identity, choice_count=count, logprobs=logprobs)
    return unary(Work(deps, scope, context, payload, warnings), answer)


def to_payload(request: CompletionRequest, limits: RequestLimits) -> completion_pb2.CompletionPayload:
    """Returns the completion payload. Raises INVALID_ARGUMENT naming the wrong field."""
    require_stream_options_fit(request)
    payload = completion_pb2.CompletionPayload()
    fill_prompts(payload.prompts, request.prompt, "prompt", max_prompts=MAX_PROMPTS, allow_empty=True)
    fill_sampling(payload.sampling, request, request.max_tokens, limits)
    count = require_choices(request, limits)
    if count != 1:
        payload.choice_count = count
    if request.best_of is not None and request.best_of != count:
        raise invalid_field("best_of", "must equal 'n': every answer that is generated is returned")
    if request.logprobs is not None:
        payload.logprobs = request.logprobs
    payload.echo = bool(request.echo)
    if request.suffix is not None:
        payload.suffix = request.suffix
    fill_extra(payload.extra_parameters, request.model_extra or {})
    return payload


def choice_count(payload: completion_pb2.CompletionPayload) -> int:
    """Returns the number of choices, over all prompts."""
    return len(payload.prompts) * (payload.choice_count or 1)


@dataclass(slots=True)
class LogprobsWriter:
    """Writes log probabilities with the character offset of each token in its choice."""

    offset: int = field(default=0)

    def take(self, logprobs: Iterable[event_pb2.TokenLogprob]) -> dict[str, list[object]]:
        """Returns the four lists for the next tokens of the choice."""
        lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in logprobs:
            lists["tokens"].append(entry.token)
            lists["token_logprobs"].append(finite_logprob(entry.logprob))
            lists["top_logprobs"].append({top.token: finite_logprob(top.logprob) for top in entry.top})
            lists["text_offset"].append(self.offset)
            self.offset += len(entry.token)
        return lists


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[event_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_sequence: str = ""


class CompletionAnswer(ChoicesAnswer[_Choice]):
    """Builds one text completion."""

    _object = "text_completion"
    _constant: ClassVar[dict[str, object]] = {"system_fingerprint": None}

    def _add_delta(self, delta: event_pb2.Delta) -> None:
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = _Choice()
        # Reasoning is text here: see CompletionStream.
        choice.text += (delta.reasoning, delta.text)
        choice.logprobs += delta.logprobs
        if delta.finish_reason:
            self._close_choice(delta.index)
            choice.finish_reason = text_finish_reason(delta.finish_reason)
            choice.stop_sequence = delta.stop_sequence

    def _choice_json(self, index: int, choice: _Choice) -> dict[str, object]:
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": LogprobsWriter().take(choice.logprobs) if self._wants_logprobs else None,
            "finish_reason": choice.finish_reason,
            **stop_reason(choice.stop_sequence),
        }


_GOES_ON = b',"logprobs":null,"finish_reason":null}]}\n\n'


class CompletionStream(ChunkStream):
    """Encodes one streamed text completion."""

    _object = b"text_completion"
    _constant = b'"system_fingerprint":null,'
    _content = b'"text"'
    reads_joined_texts = True

    @cached_property
    def _writers(self) -> defaultdict[int, LogprobsWriter]:
        return defaultdict(LogprobsWriter)

    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        index = delta.index
        head = self._heads.get(index) or self._new_head(index)
        if delta.piece_lengths:
            out += (head, (_GOES_ON + head).join(map(encode_json, texts_of(delta))), _GOES_ON)
            return
        # This API has no field for reasoning; dropping it would hide billed tokens.
        text = delta.reasoning + delta.text
        if text or (self._wants_logprobs and delta.logprobs):
            out += (head, encode_json(text), self._tail(delta, index))
        if delta.finish_reason:
            self._close_choice(index)
            reason = text_finish_reason(delta.finish_reason).encode()
            out += (head, b'"","logprobs":null,"finish_reason":"', reason, b'"', stop_member(delta), b"}]}\n\n")

    def _tail(self, delta: event_pb2.Delta, index: int) -> bytes:
        if not (self._wants_logprobs and delta.logprobs):
            return _GOES_ON
        return (
            b',"logprobs":' + encode_json(self._writers[index].take(delta.logprobs)) + b',"finish_reason":null}]}\n\n'
        )


Prompts = str | list[str] | list[int] | list[list[int]]


def fill_prompts(
    target: "RepeatedCompositeFieldContainer[completion_pb2.PromptInput]",
    prompts: Prompts,
    field: str,
    *,
    max_prompts: int,
    allow_empty: bool,
) -> None:
    """Adds each prompt to `target`. Raises INVALID_ARGUMENT naming `field` for too many prompts, or an empty one."""
    if isinstance(prompts, str):
        _require_some(prompts, field, allow_empty=allow_empty)
        target.add(text=prompts)
        return
    if _are_tokens(prompts):
        target.add(tokens=completion_pb2.TokenIds(ids=prompts))
        return
    if len(prompts) > max_prompts:
        raise invalid_field(field, f"must have at most {max_prompts} entries")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            _require_some(prompt, f"{field}[{index}]", allow_empty=allow_empty)
            target.add(text=prompt)
        elif isinstance(prompt, list):
            _require_some(prompt, f"{field}[{index}]", allow_empty=False)
            target.add(tokens=completion_pb2.TokenIds(ids=prompt))


def prompt_count(prompts: Prompts) -> int:
    """Returns the number of prompts that `fill_prompts` adds."""
    return 1 if isinstance(prompts, str) or _are_tokens(prompts) else len(prompts)


def _are_tokens(prompts: list[str] | list[int] | list[list[int]]) -> TypeGuard[list[int]]:
    return isinstance(prompts[0], int)


def _require_some(prompt: str | list[int], field: str, *, allow_empty: bool) -> None:
    if not prompt and not allow_empty:
        raise invalid_field(field, "must not be empty")
