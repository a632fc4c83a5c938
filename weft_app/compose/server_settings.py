"""What the servers behind several runtimes have in common in the configuration: where they are, how long to wait."""

import ipaddress
import re

from yarl import URL

from runner_svc.policy.timeouts import TimeoutProfile
from weft.kernel.errors import invalid_field
from weft_app.config.runner_sections import ModelSection, RunnerSection

_NAMES_OF_ONES_OWN = (
    ".lan",
    ".local",
    ".localdomain",
    ".localhost",
    ".home",
    ".home.arpa",
    ".internal",
    ".intranet",
    ".corp",
)
"""Endings of names that no public name has, by custom or by RFC 6762, 8375 and ICANN's word on .internal."""

_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+")
"""A name that resolvers take for an IPv4 address: 134744072 is 8.8.8.8."""


def engine_timeouts(section: RunnerSection) -> TimeoutProfile:
    """The limits of a runner's section."""
    return TimeoutProfile(
        connect_seconds=section.connect_timeout_seconds,
        headers_seconds=section.headers_timeout_seconds,
        first_token_seconds=section.first_token_timeout_seconds,
        prefill_liveness_seconds=section.prefill_liveness_timeout_seconds,
        idle_stream_seconds=section.idle_stream_timeout_seconds,
        absolute_seconds=section.absolute_timeout_seconds,
        probe_interval_seconds=section.liveness_probe_interval_seconds,
    )


def said_context(model: ModelSection) -> int:
    """The context of a server that weft does not start, where somebody says it; 0: unknown.

    A default would be a guess, and requests are refused by it.
    """
    return model.context_tokens if "context_tokens" in model.model_fields_set else 0


def is_remote_server(url: str, model: ModelSection, field: str) -> bool:
    """Whether serving it sends bytes off the premises, as its section says; a server nearby need not be told of.

    Raises INVALID_ARGUMENT for an address that may be anywhere and of which nothing is said.
    """
    if "remote" not in model.model_fields_set and not looks_near(URL(url).host or ""):
        raise invalid_field(
            field,
            "must be said, for the server's address is not one of a network of your own: true where it is off the "
            "premises (only requests with allow_remote get there then), else false",
        )
    return model.remote


def looks_near(host: str) -> bool:
    """Whether an address can be told from its look to be on a network of one's own."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        name = host.rstrip(".").lower()
        is_alone = "." not in name and _NUMBER.fullmatch(name) is None
        return is_alone or name.endswith(_NAMES_OF_ONES_OWN)


def base_url(text: str | None, field: str) -> str:
    """A base URL. The message does not repeat it: it may hold what nobody else is to see."""
    if text is None or not is_http_url(text):
        raise invalid_field(field, "must be an http or https URL with a host")
    url = URL(text)
    if url.user is not None or url.password is not None:
        raise invalid_field(field, "must not hold credentials; name an environment variable in api_key_env")
    if url.raw_query_string or url.raw_fragment:
        raise invalid_field(field, "must end with its path, without a query and a fragment")
    return text


def is_http_url(text: str) -> bool:
    """Whether it is an http or https URL with a host."""
    try:
        url = URL(text)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.host)
