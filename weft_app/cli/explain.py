"""`weft explain`: the scheduling decisions of one request."""

from collections.abc import Iterator, Sequence
from datetime import UTC
from typing import Annotated

import typer

from weft.api.common.v1.receipt_pb2 import Receipt
from weft.api.router.v1.request_pb2 import DecisionRecord, RequestRecord
from weft.client.requests import connect_requests
from weft.documents.codec import document_of, moment_of, seconds_of, word_of
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, reporting
from weft_app.cli.output import INDENT, Column, TextTable, fact, local_time, print_document, safe_text, say

_CANDIDATES = (
    Column("", lambda candidate: "*" if candidate.chosen else " "),
    Column("MODEL", lambda candidate: candidate.model),
    Column("RUNNER", lambda candidate: candidate.runner or "none yet"),
    Column("SCORE", lambda candidate: f"{candidate.score:.3g}"),
    Column("GATE", lambda candidate: candidate.gate or "-"),
)


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST-ID", help="Request id, as in the header x-request-id.")],
    output: Annotated[OutputFormat, typer.Option("--output", "-o", help="Output format; table is text.")] = (
        OutputFormat.TABLE
    ),
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Explain the scheduling of a request: what it waited for, which runners could serve it, which one did.

    Routers keep requests for an hour after they end, and not across a restart.

    Example: weft explain req-5f0c1a
    """
    with reporting():
        with connect_requests(home=home) as requests:
            found = requests.get(request_id)
        if output is OutputFormat.TABLE:
            say(explanation(found))
        else:
            print_document(document_of(found), output)


def explanation(request: RequestRecord) -> str:
    """Returns all decisions as text."""
    lines = [*_header(request), *_decisions(request.decisions)]
    if request.HasField("receipt"):
        lines += _receipt(request.receipt)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _header(request: RequestRecord) -> Iterator[str]:
    client = f", client {request.client_id}" if request.client_id else ""
    yield fact("Request", request.request_id)
    yield fact("Asked for", request.target)
    yield fact("Tenant", f"{request.tenant}{client}")
    yield fact("Priority", word_of(request, "priority"))
    yield fact("Arrived", local_time(request.arrive_time))
    yield fact("State", _state(request))


def _state(request: RequestRecord) -> str:
    if request.state != RequestRecord.STATE_ENDED:
        return _awaited(request)
    arrived, ended = request.arrive_time.ToDatetime(tzinfo=UTC), moment_of(request, "end_time")
    took = f" after {(ended - arrived).total_seconds():.3g} s" if ended is not None else ""
    if not request.reason:
        return f"completed{took}"
    return f"{word_of(request, 'reason')}{took}" + (f": {request.message}" if request.message else "")


def _awaited(request: RequestRecord) -> str:
    if request.HasField("queued"):
        word = f"queued at position {request.queued.position}: {request.queued.reason}"
        eta = seconds_of(request.queued, "eta")
    elif request.HasField("loading"):
        share = f" ({request.loading.progress:.0%})" if request.loading.HasField("progress") else ""
        word = f"loading{share}: {request.loading.stage}"
        eta = seconds_of(request.loading, "eta")
    else:
        return word_of(request, "state")
    return word + ("" if eta is None else f", about {eta:.0f} s")


def _decisions(decisions: Sequence[DecisionRecord]) -> Iterator[str]:
    if not decisions:
        return
    yield ""
    yield "Decisions"
    for decision in decisions:
        policy = f" by {decision.policy}" if decision.policy else ""
        kind = word_of(decision, "kind").replace("_", " ")
        yield safe_text(f"{INDENT}+{seconds_of(decision, 'age') or 0.0:.3f} s  {kind}{policy}: {decision.detail}")
        yield from _candidates(decision)


def _candidates(decision: DecisionRecord) -> Iterator[str]:
    if not decision.candidates:
        return
    for line in TextTable(_CANDIDATES).plain_text(decision.candidates).splitlines():
        yield INDENT * 3 + line
    more = decision.candidate_count - len(decision.candidates)
    if more > 0:
        yield f"{INDENT * 3}and {more} more"


def _receipt(receipt: Receipt) -> Iterator[str]:
    yield ""
    yield "Receipt"
    yield INDENT + fact("Outcome", word_of(receipt, "outcome"))
    for number, attempt in enumerate(receipt.attempts, start=1):
        model = f"{attempt.model} on " if attempt.model else ""
        ended = word_of(attempt, "reason") if attempt.reason else "answered"
        yield INDENT + fact(f"Attempt {number}", f"{model}{attempt.runner}: {ended}")
    queued, loading = seconds_of(receipt, "queue_wait") or 0.0, seconds_of(receipt, "load_wait") or 0.0
    yield INDENT + fact("Waited", f"{queued:.3g} s in the queue, {loading:.3g} s for loads")
    first = seconds_of(receipt, "time_to_first_token")
    if first is not None:
        yield INDENT + fact("First token", f"after {first:.3g} s")
    usage = receipt.usage
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    if receipt.HasField("usage"):
        yield INDENT + fact("Tokens", f"{usage.prompt_tokens} in{cached}, {usage.completion_tokens} out")
    yield INDENT + fact("Off premises", "yes" if receipt.left_premises else "no")
