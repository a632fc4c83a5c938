"""The sections of the configuration file about who asks: tenants, clients, and how much they may ask for."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from weft.kernel.errors import FieldError
from weft.kernel.names import MAX_CLIENT_CHARS, MAX_TENANT_CHARS, is_token
from weft.kernel.units import MAX_RATES, parse_any_rate, parse_rates
from weft_app.config.config_section import Name, Seconds, Section


def _tenant(text: str) -> str:
    return _token(text, MAX_TENANT_CHARS)


def _client(text: str) -> str:
    return _token(text, MAX_CLIENT_CHARS)


def _token(text: str, max_chars: int) -> str:
    if not is_token(text, max_chars):
        raise ValueError(
            f"must be 1 to {max_chars} letters, digits or '._:@/+=-', starting with a letter or digit",
        )
    return text


def _any_rate(text: str) -> str:
    try:
        parse_any_rate(text, "rate")
    except FieldError as error:
        raise ValueError(error.message.removeprefix("rate: ")) from None
    return text


def _fit_together(texts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        parse_rates(texts, "rates")
    except FieldError as error:
        raise ValueError(error.message.removeprefix("rates: ")) from None
    return texts


TenantName = Annotated[str, AfterValidator(_tenant)]
ClientName = Annotated[str, AfterValidator(_client)]
AnyRateText = Annotated[str, AfterValidator(_any_rate)]
"""A rate such as `100req/min` or `20000tok/min`."""
Rates = Annotated[tuple[AnyRateText, ...], Field(max_length=MAX_RATES, strict=False), AfterValidator(_fit_together)]
"""Rates that hold at once."""


class RouterRatesSection(Section):
    """How much tenants may ask for, counted before anything is queued, over HTTP and gRPC."""

    default: Rates | None = None
    """For tenants that are not named, such as `[50req/min, 20000tok/min]` (or `/sec`, `/hour`). Tokens are those of
    prompts, as they are estimated, and are set right when the answer is there. Default: `[50req/min]` where
    `multi_tenant` is on, else none."""
    tenants: dict[TenantName, Rates] = Field(default={}, max_length=10_000)
    """By tenant, as in X-Tenant-ID."""
    max_tenants: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """Tenants that are counted one by one besides those that are named; those beyond share what one may ask for."""


class TenantSection(Section):
    """One tenant."""

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Its share of what is scarce, against the others'."""
    max_in_flight: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Its requests that may run at once; more wait. 0: no limit."""
    allow_remote: Literal["never", "on_request", "always"] = "on_request"
    """Whether its requests may leave the premises: `on_request` where a request itself has `allow_remote`."""


class ClientSection(Section):
    """One client, by the id in X-Client-Id or `x_client_id`."""

    priority: Literal["high", "normal", "low"] = "normal"
    """The band of its requests that name none."""
    route: Name | None = None
    """Where its requests for the model `auto` go."""
    rates: Rates = ()
    """How much it may ask for, in each tenant on its own, such as `[10req/min]`. Default: as much as its tenant."""
    cooldown_after_refusals: Annotated[int, Field(ge=0, le=10_000)] = 10
    """After so many refusals in a row for asking too often it is refused for a while, uncounted. 0: never."""
    cooldown_seconds: Seconds = 10.0
    """For how long at first; each time again twice as long ..."""
    max_cooldown_seconds: Seconds = 300.0
    """... up to this."""

    @model_validator(mode="after")
    def _grows(self) -> "ClientSection":
        if self.max_cooldown_seconds < self.cooldown_seconds:
            raise ValueError("max_cooldown_seconds must not be less than cooldown_seconds")
        return self
