"""`weft usage`: what tenants, keys and models used."""

import csv
import io
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.api.router.v1.usage_pb2 import UsageCounts, UsageRow
from weft.api.router.v1.usage_service_pb2 import ListUsageResponse
from weft.client.resources import connect_registry
from weft.client.usage import connect_usage
from weft.documents.codec import document_of
from weft.documents.resource_kinds import ResourceKind
from weft.durable.usage import MAX_ROWS, moment_of
from weft.kernel.timestamps import datetime_of, seconds_of
from weft.kernel.unknown_names import MODEL_OR_POOL, unknown_name
from weft_app.cli.options import DEFAULT_HOME, HomeOption, naming_fields, note, reporting
from weft_app.cli.output import Column, TextTable, print_document, say


class UsageFormat(StrEnum):
    """Output format of usage."""

    TABLE = "table"
    WIDE = "wide"
    CSV = "csv"
    JSON = "json"
    YAML = "yaml"


_GROUPS = {"tenant": "TENANT", "key": "KEY", "model": "MODEL", "asked": "ASKED FOR"}
_HOUR, _DAY = "%Y-%m-%d %H:00", "%Y-%m-%d"
_CSV_COUNTS = tuple(field.name for field in UsageCounts.DESCRIPTOR.fields)
OPTIONS = {"by": "--by", "since": "--since", "until": "--until", "tenant": "--tenant", "model": "--model"}


def usage(
    by: Annotated[
        str,
        typer.Option("--by", help="What rows are kept apart by: tenant, key, model, asked, hour or day, with commas."),
    ] = "tenant",
    since: Annotated[
        str, typer.Option("--since", help="Requests that ended in this time, such as 12h or 30d, or since a date.")
    ] = "30d",
    until: Annotated[str, typer.Option("--until", help="Requests that ended before; a time ago, or a date.")] = "",
    tenant: Annotated[str, typer.Option("--tenant", help="Only this tenant.")] = "",
    model: Annotated[str, typer.Option("--model", help="Only this model.")] = "",
    output: Annotated[UsageFormat, typer.Option("--output", "-o", help="How to print.")] = UsageFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show what tenants, keys and models used: requests, tokens, media, accelerator time, remote requests.

    Whole hours are counted, in UTC. What receipts do not know is counted as not known, never as zero.

    Example: weft usage --by tenant,day --since 7d -o csv
    """
    with reporting():
        now = datetime.now(UTC)
        groups = [word.strip() for word in by.split(",") if word.strip()]
        with naming_fields(lambda field: OPTIONS.get(field, field)), connect_usage(home=home) as client:
            found = client.list(
                groups,
                since=datetime_of(moment_of(since, "since", now)) if since else None,
                until=datetime_of(moment_of(until, "until", now)) if until else None,
                tenant=tenant,
                model=model,
                limit=MAX_ROWS,
            )
        if model and not found.rows:
            _note_unknown(model, home)
        if output is UsageFormat.CSV:
            say(csv_text(found, groups))
        elif output in (UsageFormat.JSON, UsageFormat.YAML):
            print_document(document_of(found), output)
        else:
            say(table_text(found, groups, is_wide=output is UsageFormat.WIDE))
        if found.has_more:
            note(f"there are more than {MAX_ROWS} rows; name a shorter time, a tenant or a model")


def _note_unknown(model: str, home: Path) -> None:
    """Says on standard error that no model has this name; one that was used and deleted has rows."""
    with connect_registry(home=home) as registry:
        names = {*registry.names(ResourceKind.MODEL), *registry.names(ResourceKind.POOL)}
    if model not in names:
        note(unknown_name(MODEL_OR_POOL, model, names).message)


def table_text(found: ListUsageResponse, groups: Sequence[str], *, is_wide: bool = False) -> str:
    """Returns the table, the sum of several rows last."""
    columns = [*_group_columns(groups), *(_WIDE if is_wide else _COUNTS)]
    rows: list[UsageRow] = list(found.rows)
    if len(rows) > 1 and groups:
        rows.append(UsageRow(counts=found.total))
        first, total = columns[0], rows[-1]
        columns[0] = Column(first.title, lambda row: "total" if row is total else first.text(row))
    return TextTable(columns).text(rows)


def csv_text(found: ListUsageResponse, groups: Sequence[str]) -> str:
    """Returns rows as CSV with a header, by the names of the API; times and sums as numbers."""
    times = ["start"] if {"hour", "day"} & set(groups) else []
    names = [name for name in _GROUPS if name in groups]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*times, *names, *("gpu_seconds" if name == "gpu_time" else name for name in _CSV_COUNTS)])
    for row in found.rows:
        start = [datetime_of(row.start_time).strftime("%Y-%m-%dT%H:%MZ")] if times else []
        writer.writerow([*start, *(_cell(getattr(row, name)) for name in names), *_numbers(row.counts)])
    return text.getvalue()


def _cell(text: str) -> str:
    """Returns a name as a cell; spreadsheets would run one that begins like a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _numbers(counts: UsageCounts) -> list[object]:
    """Returns the counts; the time of accelerators in seconds, it and their energy empty where they are not known."""
    found: dict[str, object] = {name: getattr(counts, name) for name in _CSV_COUNTS}
    found["gpu_time"] = seconds_of(counts.gpu_time) if counts.HasField("gpu_time") else ""
    if not counts.HasField("energy_millijoules"):
        found["energy_millijoules"] = ""
    return list(found.values())


def _group_columns(groups: Sequence[str]) -> list[Column]:
    columns = [Column(_GROUPS[name], _group(name)) for name in _GROUPS if name in groups]
    if "hour" in groups:
        return [Column("HOUR (UTC)", lambda row: _time(row, _HOUR)), *columns]
    if "day" in groups:
        return [Column("DAY (UTC)", lambda row: _time(row, _DAY)), *columns]
    return columns


def _time(row: UsageRow, pattern: str) -> str:
    return datetime_of(row.start_time).strftime(pattern) if row.HasField("start_time") else ""


def _group(name: str) -> Callable[[UsageRow], str]:
    return lambda row: str(getattr(row, name))


def _requests(counts: UsageCounts) -> int:
    done = counts.completed_count + counts.failed_count + counts.cancelled_count
    return done + counts.rejected_count + counts.unknown_count


def _count(name: str, title: str) -> Column:
    return Column(title, lambda row: str(getattr(row.counts, name)))


def _gpu(row: UsageRow) -> str:
    counts = row.counts
    known = f"{seconds_of(counts.gpu_time):.1f}" if counts.HasField("gpu_time") else "-"
    return f"{known} (+{counts.unknown_gpu_count} unknown)" if counts.unknown_gpu_count else known


def _energy(row: UsageRow) -> str:
    counts = row.counts
    return f"{counts.energy_millijoules / 3_600_000:.2f}" if counts.HasField("energy_millijoules") else "-"


def _audio(row: UsageRow) -> str:
    return f"{row.counts.audio_milliseconds / 1e3:.1f}"


def _megapixels(row: UsageRow) -> str:
    return f"{row.counts.image_pixels / 1e6:.2f}"


_COUNTS = (
    Column("REQUESTS", lambda row: str(_requests(row.counts))),
    _count("completed_count", "COMPLETED"),
    _count("failed_count", "FAILED"),
    _count("cancelled_count", "CANCELLED"),
    _count("rejected_count", "REJECTED"),
    _count("prompt_tokens", "IN"),
    _count("cached_prompt_tokens", "CACHED"),
    _count("completion_tokens", "OUT"),
    Column("GPU SECONDS", _gpu),
    _count("remote_count", "REMOTE"),
)
_WIDE = (
    *_COUNTS,
    Column("WATT HOURS", _energy),
    _count("image_steps", "IMAGE STEPS"),
    Column("MEGAPIXELS", _megapixels),
    Column("AUDIO SECONDS", _audio),
    _count("remote_prompt_tokens", "REMOTE IN"),
    _count("remote_completion_tokens", "REMOTE OUT"),
    _count("unknown_count", "UNKNOWN"),
    _count("retried_count", "RETRIED"),
    _count("unknown_tokens_count", "TOKENS UNKNOWN"),
)
