"""`weft figures`: what was counted in the last hour."""

import math
from collections.abc import Iterable, Sequence

from weft.api.router.v1.figures_pb2 import Figures, Percentiles, RequestFigures
from weft.client.requests import connect_requests
from weft.documents.codec import document_of
from weft.kernel.units import size_words
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, reporting
from weft_app.cli.output import Column, TextTable, print_document, say

_ALL = "all"
_Row = tuple[str, RequestFigures]


def _seconds(times: Percentiles) -> str:
    return f"{times.total_p50:.3g}s {times.total_p95:.3g}s" if times.HasField("total_p50") else "-"


_COLUMNS = (
    Column("MODEL", lambda row: row[0]),
    Column("COMPLETED", lambda row: str(sum(row[1].completed))),
    Column("FAILED", lambda row: str(sum(row[1].failed))),
    Column("REJECTED", lambda row: str(sum(row[1].rejected))),
    Column("CANCELLED", lambda row: str(sum(row[1].cancelled))),
    Column("TOKENS IN", lambda row: str(sum(row[1].prompt_tokens))),
    Column("CACHED", lambda row: str(sum(row[1].cached_prompt_tokens))),
    Column("OUT", lambda row: str(sum(row[1].completion_tokens))),
    Column("FIRST TOKEN P50 P95", lambda row: _seconds(row[1].time_to_first_token)),
    Column("PER TOKEN P50 P95", lambda row: _seconds(row[1].time_per_output_token)),
)


def figures(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show what was counted in the last hour: requests, tokens, percentiles of times, waits and devices.

    With -o json, each figure for each step of ten seconds.

    Example: weft figures -o json
    """
    with reporting():
        with connect_requests(home=home) as requests:
            found = requests.figures()
        if output is not OutputFormat.TABLE:
            print_document(document_of(found), output)
            return
        say("".join(f"{line}\n" for line in lines_of(found)))


def lines_of(found: Figures) -> Iterable[str]:
    """Yields the sums of all steps as a table, and the most that waited and ran."""
    rows: Sequence[_Row] = [*((model.model, model.requests) for model in found.models), (_ALL, found.all)]
    yield from TextTable(_COLUMNS).text(rows).splitlines()
    minutes = found.step_count * found.step.ToTimedelta().total_seconds() / 60
    waiting, running = max(found.waiting, default=0), max(found.running, default=0)
    yield ""
    yield f"{minutes:.0f} minutes; at most {waiting} requests waited and {running} ran at once"
    for device in found.devices:
        known = [share for share in device.utilization if not math.isnan(share)]
        used = f"computed {sum(known) / len(known):.0%} of the time" if known else "use unknown"
        yield f"{device.host} device {device.index} ({device.name}, {size_words(device.total_bytes)}): {used}"
