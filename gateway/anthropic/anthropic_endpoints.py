"""The endpoints of Anthropic's API."""

from gateway.anthropic.messages import count_tokens, create_message
from gateway.http_api import HttpApi
from gateway.routing import ApiRouter
from weft.kernel.access.principal import USE_MODELS

ANTHROPIC = ApiRouter("anthropic", error="AnthropicError")
ANTHROPIC.add_post("/v1/messages", USE_MODELS, create_message)
ANTHROPIC.add_post("/v1/messages/count_tokens", USE_MODELS, count_tokens)
API = HttpApi(router=ANTHROPIC)
