"""What other server programs do otherwise than llama-server: the argument `--dialect` of the fake, as JSON."""

import msgspec


class Dialect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The differences of one server program; the default is llama-server."""

    owned_by: str = "llamacpp"
    """`owned_by` of the models in the list."""
    other_models: tuple[str, ...] = ()
    """Further models in the list."""
    refuses_other_names: bool = False
    """Whether a request for a model that is not listed is answered with 404."""
    lacks: tuple[str, ...] = ()
    """Routes that it does not have: 404."""
    answers: tuple[str, ...] = ()
    """Further routes, answered with 200 and an empty object; `FakeState.route_calls` lists the calls."""
    metrics: tuple[str, ...] = ()
    """Names of its gauges; empty: llama-server's page."""
    thinking_field: str = "reasoning_content"
    """Field of a delta that holds the thinking."""
    counts_streams: bool = True
    """Whether streams end with usage where it is asked for."""
    caches_prompts: bool = True
    """Whether it reuses the prefixes of earlier prompts."""
    notices_leaving: bool = True
    """Whether it stops the work for a caller who has left."""


LLAMA_SERVER = Dialect()
