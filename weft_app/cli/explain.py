"""`weft explain`: the scheduling decisions of one request."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.units import dollars_words, size_words, time_words, wait_words
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, PageOutputOption
from weft_app.cli.output import FORMATS, INDENT, Column, TextTable, custom_columns, local, moment_in, page, print_page
from weft_app.cli.short_ids import REQUESTS, full_id
from weft_app.cli.terminal import safe_text

_CANDIDATES = (
    Column("", lambda candidate: "*" if candidate["chosen"] else " "),
    Column("MODEL", "model"),
    Column("RUNNER", lambda candidate: candidate.get("runner") or "none yet"),
    Column("SCORE", "score", "{:.3g}"),
    Column("GATE", lambda candidate: "; ".join(filter(None, map(candidate.get, ("gate", "engineLoad"))))),
)


def _state(request: Document) -> str:
    if request["state"] != "ended":
        return _waits(request)
    took = ""
    if "endedAt" in request:
        seconds = (moment_in(request["endedAt"]) - moment_in(request["arrivedAt"])).total_seconds()
        took = f" after {time_words(seconds)}"
    took += tries_words(request)
    if "reason" not in request:
        return f"completed{took}"
    return f"{request['reason']}{took}" + _after(": ", request.get("message"))


def _waits(request: Document) -> str:
    queued, loading = request.get("queued"), request.get("loading")
    if retry := retry_words(request):
        return retry
    if queued:
        words = f"queued at position {queued['position']}: {queued['reason']}"
    elif loading:
        share = f" ({loading['progress']:.0%})" if "progress" in loading else ""
        words = f"loading{share}: {loading['stage']}"
    else:
        return str(request["state"])
    eta = (queued or loading or {}).get("etaSeconds")
    return words if eta is None else f"{words}, about {wait_words(eta)} s"


def retry_words(work: Document) -> str:
    """Returns which attempts failed, why, and when the next one starts; empty: nothing is retried."""
    if (retry := work.get("retry")) is None:
        return ""
    error = retry["error"]
    failed = f"{retry['failedCount']} of {retry['maxAttempts']} attempts failed" if retry["failedCount"] else "retried"
    left = (moment_in(retry["nextAt"]) - datetime.now(UTC)).total_seconds() if "nextAt" in retry else 0.0
    when = f"the next one starts in {wait_words(left)} s" if left > 0 else "the next one starts with a free slot"
    return f"{failed} ({error['reason']}: {error['message']}); {when}"


def webhook_lines(event: Document | None) -> list[str]:
    """Returns an event for a webhook, and each attempt to deliver it; none without an event."""
    if event is None:
        return []
    ended = event.get("error", {}).get("message") or (f"next at {local(event['nextAt'])}" if "nextAt" in event else "")
    lines = [f"Webhook: {event['type']} {event['state']}" + _after(", ", ended)]
    for number, attempt in enumerate(event["attempts"], 1):
        error = attempt.get("error")
        words = "accepted" if error is None else f"{error['reason']}: {error['message']}"
        lines.append(f"  {number}. {local(attempt['startedAt'])}: {words}")
    return lines


def agent_words(request: Document) -> str | None:
    """Returns the coding agent that asked, and for what beside a turn; None: unknown."""
    labels = request.get("labels", {})
    purpose = labels.get("purpose", "turn")
    words = [labels.get("program"), labels.get("agent") == "sub" and "sub-agent", purpose != "turn" and purpose]
    return ", ".join(filter(None, words)) or None


def tries_words(request: Document) -> str:
    """Returns ", 5 attempts"; empty for at most one."""
    count = len(request.get("receipt", request).get("attempts", ()))
    return f", {count} attempts" if count > 1 else ""


def _alias(request: Document) -> str:
    return f"{request['askedModel']}, an alias of " if request.get("askedModel") else ""


def _after(words: str, value: object) -> str:
    """Returns a value prefixed with words; empty if there is none."""
    return f"{words}{value}" if value else ""


_REQUEST = custom_columns(
    "Request:requestId Asked_for Tenant Agent Priority:priority Arrived:arrivedAt:local State",
    Asked_for=lambda request: _alias(request) + request["target"],
    Tenant=lambda request: request["tenant"] + _after(", client ", request.get("clientId")),
    Agent=agent_words,
    State=_state,
)


_ENGINE = (
    ("wallSeconds", "in its calls"),
    ("tokenizeSeconds", "to tokenize"),
    ("prefillSeconds", "to the first token"),
    ("decodeSeconds", "from there to the last"),
    ("outsideSeconds", "outside of it"),
)
_NOT_SAMPLED = "not_sampled"
_GAPS = {
    _NOT_SAMPLED: "shorter than the sampling interval, or no figures from the driver",
    "foreign_process": "another process used the device, or its processes cannot be observed",
    "other_model": "another model used the device at the same time",
}


def _engine(receipt: Document) -> str | None:
    timings = receipt.get("engineTimings", {})
    return ", ".join(f"{time_words(timings[name])} {words}" for name, words in _ENGINE if name in timings) or None


def _device_usage(receipt: Document) -> str | None:
    """Returns the share of the accelerators' work, or why it is unknown; None: the engine held none."""
    usage = receipt.get("deviceUsage")
    if usage is None:
        return None
    if "deviceSeconds" not in usage:
        return f"unknown: {_GAPS.get(usage.get('gap', ''), _GAPS[_NOT_SAMPLED])}"
    energy = f"{usage['energyMillijoules'] / 1e3:.3g} J" if "energyMillijoules" in usage else "energy unknown"
    return f"{time_words(usage['deviceSeconds'])} of device time, {energy}"


def _tokens(receipt: Document) -> str | None:
    if "promptTokens" not in receipt or not has_tokens(receipt):
        return None
    cached = f" ({receipt['cachedPromptTokens']} cached)" if receipt.get("cachedPromptTokens") else ""
    about = "about " if receipt.get("promptEstimated") else ""
    return f"{about}{receipt['promptTokens']} in{cached}, {receipt['completionTokens']} out"


def _lowered(receipt: Document) -> str | None:
    """Returns the priority class if it was lowered; None: it is as requested."""
    lowered = receipt.get("loweredPriority")
    return None if lowered is None else f"{lowered}, the highest that its key or tenant allows"


def _price(receipt: Document) -> str | None:
    return dollars_words(receipt["priceNanodollars"]) if "priceNanodollars" in receipt else None


def _restored(receipt: Document) -> str | None:
    """Returns what was restored from a saved prompt; None: nothing."""
    if (restored := receipt.get("restoredPrompt")) is None:
        return None
    saved = f", about {time_words(restored['savedSeconds'])} saved" if "savedSeconds" in restored else ""
    return f"{restored['tokenCount']} tokens from {restored['source']}{saved}"


def _repaired(receipt: Document) -> str | None:
    """Returns how tool calls became valid; None: they were."""
    counts = {"repaired": receipt.get("repairedCallCount"), "made again": receipt.get("retriedCallCount")}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or None


def _compacted(receipt: Document) -> str | None:
    """Returns how the conversation was compacted; None: it was not."""
    if (compaction := receipt.get("compaction")) is None:
        return None
    if not compaction["passCount"]:
        return "the answer is a summary of the conversation"
    used = f"{compaction.get('promptTokens', 0)} + {compaction.get('completionTokens', 0)} tokens"
    return f"to a summary, number of calls before the answer: {compaction['passCount']} ({used})"


def _change(parameter: Document) -> str:
    return f"{parameter['name']} {'removed' if parameter.get('removed') else 'replaced'} by {parameter['author']}"


def _sent_out(receipt: Document) -> str | None:
    """Returns what a gateway's tools sent out of the mesh; None: nothing."""
    return (
        "; ".join(
            f"{run['tool']} to {safe_text(run['host'])}: {size_words(run.get('sentByteCount', 0))} sent, "
            f"{size_words(run.get('receivedByteCount', 0))} received, {run.get('resultCount', 0)} results"
            + (", failed" if run.get("failed") else "")
            for run in receipt.get("toolRuns", ())
            if run.get("host")
        )
        or None
    )


def _waited(receipt: Document) -> str:
    return f"{time_words(receipt['queueWaitSeconds'])} in the queue, {time_words(receipt['loadWaitSeconds'])} for loads"


def _first_token(receipt: Document) -> str | None:
    seconds = receipt.get("timeToFirstTokenSeconds")
    if seconds is None:
        return None
    promised = receipt.get("promisedWait")
    kept = (
        ""
        if promised is None
        else f", {'within' if promised['kept'] else 'later than'} the limit of {time_words(promised['limitSeconds'])}"
    )
    return f"after {time_words(seconds)}{kept}"


def _cancelled(receipt: Document) -> str | None:
    return f"by {FORMATS['actor'](receipt['cancelledBy'])}" if receipt.get("cancelledBy") else None


def _captured(receipt: Document) -> str:
    return f"yes; weft explain {receipt['requestId']} --content shows it" if receipt.get("captured") else "no"


def prompt_change(receipt: Document) -> str | None:
    """Returns where a prompt differs from earlier ones of its session, as text; None: it does not."""
    if (change := receipt.get("promptChange")) is None:
        return None
    count = f"{change['changeCount']} of {change['requestCount']} requests"
    if change.get("inTools"):
        return f"the tools of session {change['session']} change ({count})"
    begin, end = change["sameCharacterCount"] + 1, change["endCharacter"]
    return f"the system prompt of session {change['session']} changes between characters {begin} and {end} ({count})"


_OUTCOME = Column("Outcome", "outcome")
_COSTS = custom_columns(
    "Waited Priority Keep_alive Changed First_token Engine GPU Tokens Price Restored Compacted Tool_calls Sent_out "
    "Not_cached Work Captured Remote:leftPremises Cancelled Router",
    Waited=_waited,
    Priority=_lowered,
    Keep_alive=lambda receipt: "ignored: its key may not set it" if receipt.get("keepAliveIgnored") else None,
    Changed=lambda receipt: ", ".join(map(_change, receipt.get("changedParameters", ()))) or None,
    First_token=_first_token,
    Engine=_engine,
    GPU=_device_usage,
    Tokens=_tokens,
    Price=_price,
    Restored=_restored,
    Compacted=_compacted,
    Tool_calls=_repaired,
    Sent_out=_sent_out,
    Not_cached=prompt_change,
    Work=lambda receipt: ", ".join(work_parts(receipt)) or None,
    Captured=_captured,
    Cancelled=_cancelled,
    Router=lambda receipt: "no router answered when it ended" if receipt.get("lackedRouter") else None,
)


def _last(api: MeshApi) -> str:
    """Returns the id of the request that ended last. Raises NOT_FOUND."""
    for request in api.get("/v1/requests", limit=1, state="ended", allTenants=True)["items"]:
        return str(request["requestId"])
    raise WeftError(Reason.NOT_FOUND, "no request has ended recently; `weft get requests` lists running ones")


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="[REQUEST-ID]",
            help="Request id, as in the header x-request-id, or its beginning. Default: the last one that ended.",
            show_default=False,
        ),
    ] = "",
    content: Annotated[bool, typer.Option("--content", help="Show the captured prompt and answer (audited).")] = False,
    output: PageOutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Explain the scheduling of a request: what it waited for, which runners were candidates, which one served it.

    Routers keep requests for a week after they end (router.records), also over restarts. A router that is killed loses
    those of its last seconds; a request that was running then is shown as router_lost until its gateway has reported
    its end.

    Example: weft explain req-5f0c1a
    """
    show_request(request_id, output, home, content=content)


def show_request(request_id: str, output: OutputFormat, home: Path, *, content: bool = False) -> None:
    """Prints the details of a request, or its captured content; empty: of the one that ended last."""
    with connect(home) as api:
        whole = full_id(api, REQUESTS, request_id) if request_id else _last(api)
        found = api.get(f"/v1/admin/captures/{whole}" if content else f"/v1/requests/{whole}", allTenants=True)
        if task := found.get("receipt", {}).get("taskId"):
            with suppress(WeftError, KeyError):  # a deleted task, or one without an event
                found |= {"webhook": api.get(f"/v1/admin/tasks/{task}")["webhook"]}
    print_page(output, lambda: _content(found) if content else explanation(found), lambda: found)


def _content(capture: Document) -> str:
    """Returns a captured prompt and answer as text."""
    lines: list[str] = []
    for title in ("Prompt", "Answer"):
        cut = ["(cut off here)"] if capture[f"{title.lower()}Cut"] else []
        lines += _section(title, [*map(safe_text, capture[title.lower()].split("\n")), *cut])
    return "\n".join(lines[1:]) + "\n"


def explanation(request: Document) -> str:
    """Returns all decisions as text."""
    lines = [*page(_REQUEST, request)]
    tried = [page([Column(f"Attempt {at}", _attempt)], each) for at, each in enumerate(request.get("attempts", ()), 1)]
    lines += _section("Attempts", chain.from_iterable(tried))
    lines += _section("Event", webhook_lines(request.get("webhook")))
    lines += [*_section("Decisions", _decisions(request.get("decisions", ())))]
    if "receipt" in request:
        lines += receipt_lines(request["receipt"], request["requestId"])
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _attempt(attempt: Document) -> str:
    """Returns where and when an attempt ran, and how it ended."""
    where = (f"{attempt['model']} on " if attempt.get("model") else "") + (attempt["runner"] or "an unknown runner")
    times = [f"+{attempt['startSeconds']:.3f} s"] if "startSeconds" in attempt else []
    times += [f"for {time_words(attempt['durationSeconds'])}"] if "durationSeconds" in attempt else []
    has_ended = "durationSeconds" in attempt or "startSeconds" not in attempt
    ended = attempt.get("reason", "answered" if has_ended else "runs") + _after(": ", attempt.get("message"))
    return f"{where}{' (' + ', '.join(times) + ')' if times else ''}: {ended}"


def receipt_lines(receipt: Document, request_id: str) -> list[str]:
    """Returns the section about the costs of a request."""
    receipt = receipt | {"requestId": request_id}
    attempts = receipt.get("attempts", ())
    lines = [*page([_OUTCOME], receipt)]
    for number, attempt in enumerate(attempts, 1):
        lines += page(
            [
                Column(f"Attempt {number}", _attempt),
                Column("Engine ended", "engineExit"),
            ],
            attempt,
        )
    lines = _section("Summary", [*lines, *page(_COSTS, receipt)])
    for number, attempt in enumerate(attempts, 1):
        lines += _section(f"Engine log before attempt {number} failed", map(safe_text, attempt.get("engineLog", ())))
    return lines


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = [f"{INDENT}{line}" for line in lines]
    return ["", title, *found] if found else []


def _decisions(decisions: Sequence[Document]) -> Iterator[str]:
    for decision in decisions:
        kind = decision["kind"].replace("_", " ") + _after(" by ", decision.get("policy"))
        yield safe_text(f"+{decision['ageSeconds']:.3f} s  {kind}: {decision['detail']}")
        candidates = decision.get("candidates", ())
        if candidates:
            table = TextTable(_CANDIDATES, is_cut=False).plain_text(candidates)
            yield from (f"{INDENT * 2}{line}" for line in table.splitlines())
            more = decision.get("candidateCount", 0) - len(candidates)
            if more > 0:
                yield f"{INDENT * 2}and {more} more"


_PIXELS, _MILLISECONDS = 1e6, 1e3


def work_parts(usage: Mapping[str, Any]) -> list[str]:
    """Returns the work on images and recordings: "40 steps", "2.1 megapixels", "12.4 s of audio"; empty if none."""
    parts = []
    if steps := usage.get("imageSteps"):
        parts.append(f"{steps} {'step' if steps == 1 else 'steps'}")
    if pixels := usage.get("imagePixels"):
        parts.append(f"{pixels / _PIXELS:.3g} megapixels")
    if milliseconds := usage.get("audioMilliseconds"):
        parts.append(f"{milliseconds / _MILLISECONDS:.4g} s of audio")
    return parts


def has_tokens(usage: Mapping[str, Any]) -> bool:
    """Whether to show tokens: if there are some, or nothing else."""
    return bool(usage.get("promptTokens") or usage.get("completionTokens")) or not work_parts(usage)
