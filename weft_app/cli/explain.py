"""`weft explain`: the scheduling decisions of one request."""

from collections.abc import Iterator
from typing import Annotated

import typer

from weft.client.requests import connect_requests
from weft.documents.request_documents import DecisionDocument, ReceiptDocument, RequestDocument
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, reporting
from weft_app.cli.output import Column, TextTable, print_document, safe_text, say

KEY_CHARS = 13
INDENT = "  "

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
            print_document(found.model_dump(mode="json", by_alias=True, exclude_none=True), output)


def explanation(request: RequestDocument) -> str:
    """Returns all decisions as text."""
    lines = [*_header(request), *_decisions(request.decisions)]
    if request.receipt is not None:
        lines += _receipt(request.receipt)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _header(request: RequestDocument) -> Iterator[str]:
    client = f", client {request.client_id}" if request.client_id else ""
    yield _fact("Request", request.request_id)
    yield _fact("Asked for", request.target)
    yield _fact("Tenant", f"{request.tenant}{client}")
    yield _fact("Priority", request.priority)
    yield _fact("Arrived", f"{request.arrived_at.astimezone():%Y-%m-%d %H:%M:%S}")
    yield _fact("State", _state(request))


def _state(request: RequestDocument) -> str:
    if request.state != "ended":
        return _awaited(request)
    took = f" after {(request.ended_at - request.arrived_at).total_seconds():.3g} s" if request.ended_at else ""
    if request.reason is None:
        return f"completed{took}"
    return f"{request.reason}{took}" + (f": {request.message}" if request.message else "")


def _awaited(request: RequestDocument) -> str:
    if request.queued is not None:
        word = f"queued at position {request.queued.position}: {request.queued.reason}"
        eta = request.queued.eta_seconds
    elif request.loading is not None:
        share = request.loading.progress
        word = f"loading{'' if share is None else f' ({share:.0%})'}: {request.loading.stage}"
        eta = request.loading.eta_seconds
    else:
        return request.state
    return word + ("" if eta is None else f", about {eta:.0f} s")


def _decisions(decisions: tuple[DecisionDocument, ...]) -> Iterator[str]:
    if not decisions:
        return
    yield ""
    yield "Decisions"
    for decision in decisions:
        policy = f" by {decision.policy}" if decision.policy else ""
        kind = decision.kind.replace("_", " ")
        yield safe_text(f"{INDENT}+{decision.age_seconds:.3f} s  {kind}{policy}: {decision.detail}")
        yield from _candidates(decision)


def _candidates(decision: DecisionDocument) -> Iterator[str]:
    if not decision.candidates:
        return
    for line in TextTable(_CANDIDATES).plain_text(decision.candidates).splitlines():
        yield INDENT * 3 + line
    more = decision.candidate_count - len(decision.candidates)
    if more > 0:
        yield f"{INDENT * 3}and {more} more"


def _receipt(receipt: ReceiptDocument) -> Iterator[str]:
    yield ""
    yield "Receipt"
    yield INDENT + _fact("Outcome", receipt.outcome)
    for number, attempt in enumerate(receipt.attempts, start=1):
        model = f"{attempt.model} on " if attempt.model else ""
        yield INDENT + _fact(f"Attempt {number}", f"{model}{attempt.runner}: {attempt.reason or 'answered'}")
    yield INDENT + _fact("Waited", f"{receipt.queue_wait_seconds:.3g} s in the queue, {_loads(receipt)}")
    if receipt.time_to_first_token_seconds is not None:
        yield INDENT + _fact("First token", f"after {receipt.time_to_first_token_seconds:.3g} s")
    cached = f" ({receipt.cached_prompt_tokens} cached)" if receipt.cached_prompt_tokens else ""
    if receipt.prompt_tokens is not None:
        yield INDENT + _fact("Tokens", f"{receipt.prompt_tokens} in{cached}, {receipt.completion_tokens} out")
    yield INDENT + _fact("Off premises", "yes" if receipt.left_premises else "no")


def _loads(receipt: ReceiptDocument) -> str:
    return f"{receipt.load_wait_seconds:.3g} s for loads"


def _fact(key: str, value: str) -> str:
    return safe_text(f"{key + ':':<{KEY_CHARS}} {value}")
