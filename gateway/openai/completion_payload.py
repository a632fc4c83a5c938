"""Legacy completion requests to payloads."""

from gateway.config import RequestLimits
from gateway.openai.completion_schema import CompletionRequest
from gateway.openai.extension_fields import fill_extra
from gateway.openai.prompts import fill_prompts
from gateway.openai.sampling import fill_sampling, require_choices, require_stream_options_fit
from weft.api.common.v1 import completion_pb2
from weft.kernel.errors import invalid_field


def to_payload(request: CompletionRequest, limits: RequestLimits) -> completion_pb2.CompletionPayload:
    """What the mesh is asked. Raises INVALID_ARGUMENT naming the field that is wrong."""
    require_stream_options_fit(request)
    payload = completion_pb2.CompletionPayload()
    fill_prompts(payload.prompts, request.prompt, "prompt", max_prompts=limits.max_prompts, allow_empty=True)
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
    """How many choices the answer has, over all prompts."""
    return len(payload.prompts) * (payload.choice_count or 1)
