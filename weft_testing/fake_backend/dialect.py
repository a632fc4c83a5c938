"""Differences of other servers from llama-server: the fake's argument `--dialect`, as JSON."""

import msgspec


class Dialect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The differences of one server; the defaults are llama-server's."""

    owned_by: str = "llamacpp"
    other_models: tuple[str, ...] = ()
    """Additional models in the list."""
    refuses_other_names: bool = False
    """Whether a request for an unlisted model returns 404."""
    lacks: tuple[str, ...] = ()
    """Missing routes (404)."""
    answers: tuple[str, ...] = ()
    """Additional routes, which return 200 and an empty object; `FakeState.route_calls` lists the calls."""
    metrics: tuple[str, ...] = ()
    """Names of its gauges; empty: llama-server's page."""
    thinking_field: str = "reasoning_content"
    """Delta field for thinking."""
    counts_streams: bool = True
    """Whether streams end with usage if the request asks for it."""
    caches_prompts: bool = True
    """Whether it reuses the prefixes of earlier prompts."""
    notices_leaving: bool = True
    """Whether it stops working when the caller leaves."""


LLAMA_SERVER = Dialect()
