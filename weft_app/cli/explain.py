"""`weft explain`: the scheduling decisions of one request."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC
from pathlib import Path
from typing import Annotated

import typer

from weft.api.common.v1.receipt_pb2 import DeviceUsage, Receipt
from weft.api.router.v1.request_pb2 import DecisionRecord, RequestRecord
from weft.client.requests import Requests, connect_requests
from weft.documents.codec import document_of, moment_of, word_of
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, PageOutputOption
from weft_app.cli.output import INDENT, Column, TextTable, page, print_page, safe_text
from weft_app.cli.templates import filled
from weft_app.cli.usage_text import has_tokens, work_parts

_CANDIDATES = (
    Column("", lambda candidate: "*" if candidate.chosen else " "),
    Column("MODEL", "{model}"),
    Column("RUNNER", "[{runner}|none yet]"),
    Column("SCORE", "{score:.3g}"),
    Column("GATE", lambda candidate: "; ".join(filter(None, (candidate.gate, candidate.engine_load)))),
)
_QUEUED = "queued at position {queued.position}: {queued.reason}[, about {queued.eta:wait} s]"
_LOADING = "loading[ ({loading.progress:.0%})]: {loading.stage}[, about {loading.eta:wait} s]"


def _state(request: RequestRecord) -> str:
    if request.state != RequestRecord.STATE_ENDED:
        waits = _QUEUED if request.HasField("queued") else _LOADING if request.HasField("loading") else "{state}"
        return filled(waits, request)
    arrived, ended = request.arrive_time.ToDatetime(tzinfo=UTC), moment_of(request, "end_time")
    took = f" after {(ended - arrived).total_seconds():.3g} s" if ended is not None else ""
    if not request.reason:
        return f"completed{took}"
    return f"{word_of(request, 'reason')}{took}" + (f": {request.message}" if request.message else "")


_REQUEST = (
    Column("Request", "{request_id}"),
    Column("Asked for", "[{asked_model}, an alias of ]{target}"),
    Column("Tenant", "{tenant}[, client {client_id}]"),
    Column("Priority", "{priority}"),
    Column("Arrived", "{arrive_time:local}"),
    Column("State", _state),
)
_DECISION = "+{age:.3f} s  {kind:spaced}[ by {policy}]: {detail}"
_ATTEMPT = "[{model} on ]{runner}: [{reason}|answered][: {message}]"
_OUTCOME = Column("Outcome", "{outcome}")
_USAGE = "{usage.prompt_tokens} in[ ({usage.cached_prompt_tokens} cached)], {usage.completion_tokens} out"
_ENGINE = (
    "[{engine_timings.wall_time:span} in its calls]"
    "[, {engine_timings.tokenize_time:span} to tokenize]"
    "[, {engine_timings.prefill_time:span} to the first token]"
    "[, {engine_timings.decode_time:span} from there to the last]"
    "[, {engine_timings.outside_time:span} outside of it]"
)
_DEVICE = "{device_usage.device_time:span} of device time"
_GAPS = {
    DeviceUsage.GAP_NOT_SAMPLED: "too short for the sampling interval, or no figures of the driver",
    DeviceUsage.GAP_FOREIGN_PROCESS: "a process of others used the device, or what ran there cannot be seen",
    DeviceUsage.GAP_OTHER_MODEL: "another model computed on the device at the same time",
}


def _device_usage(receipt: Receipt) -> str | None:
    """Returns the share in the work of accelerators, or why it is unknown; None: the engine held none."""
    usage = receipt.device_usage
    if not receipt.HasField("device_usage"):
        return None
    if not usage.HasField("device_time"):
        return f"unknown: {_GAPS.get(usage.gap, _GAPS[DeviceUsage.GAP_NOT_SAMPLED])}"
    if not usage.HasField("energy_millijoules"):
        return filled(_DEVICE, receipt) + ", energy unknown"
    return filled(_DEVICE, receipt) + f", {usage.energy_millijoules / 1e3:.3g} J"


def _tokens(receipt: Receipt) -> str | None:
    is_known = receipt.HasField("usage") and has_tokens(receipt.usage)
    return filled(_USAGE, receipt) if is_known else None


_COSTS = (
    Column("Waited", "{queue_wait:span} in the queue, {load_wait:span} for loads"),
    Column("First token", "[after {time_to_first_token:span}]"),
    Column("Engine", _ENGINE),
    Column("GPU", _device_usage),
    Column("Tokens", _tokens),
    Column("Work", lambda receipt: ", ".join(work_parts(receipt.usage)) or None),
    Column("Remote", "{left_premises:yes}"),
    Column("Cancelled", "[by {cancelled_by:actor}]"),
    Column("Router", lambda receipt: "none answered when it ended" if receipt.lacked_router else None),
)


def _last(requests: Requests) -> str:
    """Returns the id of the request that ended last. Raises NOT_FOUND."""
    for request in requests.ended(1).requests:
        return request.request_id
    raise WeftError(Reason.NOT_FOUND, "no request has ended lately; `weft get requests` lists those that run")


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="[REQUEST-ID]",
            help="Request id, as in the header x-request-id. Default: the request that ended last.",
            show_default=False,
        ),
    ] = "",
    output: PageOutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Explain the scheduling of a request: what it waited for, which runners could serve it, which one did.

    Routers keep requests for a week after they end (router.records), also over restarts. A router that is killed loses
    those of its last seconds; one that was under way then is shown as router_lost, until its gateway has reported how
    it ended.

    Example: weft explain req-5f0c1a
    """
    show_request(request_id, output, home)


def show_request(request_id: str, output: OutputFormat, home: Path) -> None:
    """Prints all that is known of a request; empty: of the one that ended last."""
    with connect_requests(home=home) as requests:
        found = requests.get(request_id or _last(requests))
    print_page(output, lambda: explanation(found), lambda: document_of(found))


def explanation(request: RequestRecord) -> str:
    """Returns all decisions as text."""
    lines = [*page(_REQUEST, request), *_section("Decisions", _decisions(request.decisions))]
    if request.HasField("receipt"):
        lines += receipt_lines(request.receipt)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def receipt_lines(receipt: Receipt) -> list[str]:
    """Returns the section on what a request has cost."""
    attempts = [column for place in range(len(receipt.attempts)) for column in _attempt(place)]
    lines = _section("Receipt", page([_OUTCOME, *attempts, *_COSTS], receipt))
    for number, attempt in enumerate(receipt.attempts, 1):
        lines += _section(f"Engine log before attempt {number} failed", map(safe_text, attempt.engine_log))
    return lines


def _attempt(place: int) -> tuple[Column, Column]:
    return (
        Column(f"Attempt {place + 1}", lambda receipt: filled(_ATTEMPT, receipt.attempts[place])),
        Column("Engine ended", lambda receipt: receipt.attempts[place].engine_exit or None),
    )


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = [f"{INDENT}{line}" for line in lines]
    return ["", title, *found] if found else []


def _decisions(decisions: Sequence[DecisionRecord]) -> Iterator[str]:
    for decision in decisions:
        yield safe_text(filled(_DECISION, decision))
        if decision.candidates:
            table = TextTable(_CANDIDATES).plain_text(decision.candidates)
            yield from (f"{INDENT * 2}{line}" for line in table.splitlines())
            more = decision.candidate_count - len(decision.candidates)
            if more > 0:
                yield f"{INDENT * 2}and {more} more"
