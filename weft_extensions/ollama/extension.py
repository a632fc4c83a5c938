"""Ollama's API at `/api`, for clients that speak no other."""

from weft.extension import ApiHook, Extension

EXTENSION = Extension(
    name="ollama",
    summary="Ollama's HTTP API, for clients that speak no other.",
    docs="docs/ollama.md",
    apis=(
        ApiHook(
            place="weft_extensions.ollama.endpoints:API",
            paths=(
                "/",
                "/api/chat",
                "/api/generate",
                "/api/embed",
                "/api/embeddings",
                "/api/tags",
                "/api/show",
                "/api/ps",
                "/api/version",
                "/api/pull",
                "/api/create",
                "/api/copy",
                "/api/push",
                "/api/delete",
                "/api/blobs/",
            ),
        ),
    ),
)
