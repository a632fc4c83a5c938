"""The endpoints of the OpenAI API: method, path, access, handler and documentation of each."""

from gateway.openai import models
from gateway.openai.chat import chat_completions
from gateway.openai.completions import text_completions
from gateway.openai.embeddings import create_embeddings
from gateway.openai.quotes import create_quotes
from gateway.openai.rerank import rerank_documents
from gateway.openai.tokenize import tokenize
from gateway.openapi import answers
from gateway.routing import ApiRouter
from weft.api.router.v1.placement_service_pb2 import QuoteResponse
from weft.kernel.access.principal import USE_MODELS, VIEW_MODELS

OPENAI = ApiRouter("openai")
OPENAI.add_post("/v1/chat/completions", USE_MODELS, chat_completions)
OPENAI.add_post("/v1/completions", USE_MODELS, text_completions)
OPENAI.add_post("/v1/embeddings", USE_MODELS, create_embeddings)
OPENAI.add_post("/v1/rerank", USE_MODELS, rerank_documents)
OPENAI.add_post("/rerank", USE_MODELS, rerank_documents)
OPENAI.add_post("/tokenize", USE_MODELS, tokenize)
OPENAI.add_post("/v1/tokenize", USE_MODELS, tokenize)
OPENAI.add_get("/v1/models", VIEW_MODELS, models.list_models, with_head=True, by_name=True)
OPENAI.add_get("/v1/models/agent/{agent}", VIEW_MODELS, models.get_agent, with_head=True, by_name=True)
OPENAI.add_get("/v1/models/route/{route}", VIEW_MODELS, models.get_route, with_head=True, by_name=True)
OPENAI.add_get("/v1/models/workflow/{workflow}", VIEW_MODELS, models.get_workflow, with_head=True, by_name=True)
OPENAI.add_get("/v1/models/{model:name}", VIEW_MODELS, models.get_model, with_head=True, by_name=True)

QUOTES = ApiRouter("quotes")
QUOTES.add_post("/v1/quotes", USE_MODELS, create_quotes, answers(QuoteResponse))
