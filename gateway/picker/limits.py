"""Limits of the endpoint picker: the section `picker` of weft.yaml, without its addresses."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from weft.kernel.lane_names import MAX_FALLBACKS
from weft.kernel.settings import PUBLIC, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerLimits:
    """How many requests the picker follows, and for how long."""

    max_open_requests: Annotated[int, Ge(1), Le(1_000_000), PUBLIC] = 10_000
    """Requests that wait for an endpoint or are answered; one more is refused with 429. Of as many that have ended the
    second witness is waited for."""
    fallbacks: Annotated[int, Ge(0), Le(MAX_FALLBACKS), PUBLIC] = 2
    """Further endpoints that the proxy may try, one after the other, while no byte of an answer has come."""
    foreign_fallbacks: Annotated[int, Ge(0), Le(MAX_FALLBACKS), PUBLIC] = 0
    """The same for gateways that show the picker the responses, as those of the Gateway API do: agentgateway takes one
    endpoint, and Envoys with the policy `override_host` take lists."""
    fairness_tenants: Annotated[bool, PUBLIC] = False
    """Whether the tenant of a request is the fairness id that the gateway writes (`x-llm-d-inference-fairness-id`, or
    `x-gateway-inference-fairness-id`), where the request names no tenant. Only behind a gateway that removes the
    headers from the requests of its callers; what a key may use is checked as ever."""
    report_wait_seconds: Seconds = 2.0
    """How long the second witness of an end is waited for: the runner's report after the proxy's log, and the other way
    round. The permit is given back with the first report of a runner."""
    end_report_limit_seconds: Annotated[Seconds, PUBLIC] = 30.0
    """How long after its deadline a request ends whose end neither the runner nor the proxy has reported; and how long
    after the last sign of life where the proxy sends them of requests that go on (`access_log_flush_interval`)."""
