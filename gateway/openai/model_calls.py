"""What models offer beside text and vectors: reranking, tokens, images and sound."""

from fastapi import FastAPI

from gateway.openai.audio import add_audio
from gateway.openai.images import add_images
from gateway.openai.rerank import add_rerank
from gateway.openai.tokenize import add_tokenize
from gateway.parts import InferenceParts


def add_model_calls(app: FastAPI, parts: InferenceParts) -> None:
    """Add their routes."""
    for add_routes in (add_rerank, add_tokenize, add_images, add_audio):
        add_routes(app, parts)
