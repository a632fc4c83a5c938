"""`weft mesh usage`: what tenants, keys and models used."""

import csv
import io
from collections.abc import Sequence
from datetime import UTC
from itertools import chain
from typing import Annotated, Literal

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.values.units import dollars_words
from weft.kernel.values.unknown_names import MODEL_OR_POOL, unknown_name
from weft_app.cli.completion import complete_model
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption
from weft_app.cli.output import Column, TextTable, custom_columns, moment_in, print_document
from weft_app.cli.terminal import note, say

MAX_ROWS = 10_000
CALL_TIMEOUT_SECONDS = 30.0


UsageFormat = Literal["table", "wide", "csv", "json", "yaml"]
_NAMES = ("tenant", "key", "model", "asked", "program", "agent", "purpose")
_GROUPS = {name: name.upper() for name in _NAMES} | {"asked": "ASKED FOR"}
_TIMES = {"hour": ("HOUR (UTC)", "%Y-%m-%d %H:00"), "day": ("DAY (UTC)", "%Y-%m-%d")}
PRICE, SAVED = "priceNanodollars", "savedNanodollars"
_CSV_COUNTS = (
    *("completed_count", "failed_count", "cancelled_count", "rejected_count", "unknown_count", "retried_count"),
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "unknown_tokens_count", "gpu_seconds"),
    *("unknown_gpu_count", "remote_count", "remote_prompt_tokens", "remote_completion_tokens", "energy_millijoules"),
    *("measured_energy_count", "image_steps", "image_pixels", "audio_milliseconds"),
    *("price_nanodollars", "priced_count", "saved_nanodollars"),
)


def usage(
    by: Annotated[
        str,
        typer.Option(
            help="Group rows by tenant, key, model, asked, program, agent, purpose, hour or day, separated by commas."
        ),
    ] = "tenant",
    since: Annotated[
        str, typer.Option(help="Only requests that ended since a date, or in the last 12h or 30d.")
    ] = "30d",
    until: Annotated[
        str, typer.Option(help="Only requests that ended before a date, or before a time such as 12h ago.")
    ] = "",
    *,
    compare_with: Annotated[
        str,
        typer.Option(
            help="Remote model by whose price savings are computed. Default: the cheapest one with a known price.",
            autocompletion=complete_model,
        ),
    ] = "",
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    model: Annotated[str, typer.Option(help="Only this model.")] = "",
    output: Annotated[UsageFormat, typer.Option("--output", "-o", help="Output format.")] = "table",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show the usage of tenants, keys and models: requests, tokens, media, accelerator time, prices and savings.

    Whole hours are counted, in UTC. Values missing from receipts are counted as unknown, never as zero. SAVED is what
    the tokens that were not sent to a provider would have cost at a remote model.

    Example: weft mesh usage --by tenant,day --since 7d -o csv
    """
    groups = [word.strip() for word in by.split(",") if word.strip()]
    with connect(home) as api:
        found = api.get(
            "/v1/admin/usage",
            by=",".join(groups),
            since=since,
            until=until,
            tenant=tenant,
            model=model,
            compareWith=compare_with,
            limit=MAX_ROWS,
        )
    if model and not found["items"]:
        with connect(home) as mesh:
            names = set(chain(mesh.names(ResourceKind.MODEL), mesh.names(ResourceKind.POOL)))
        # A deleted model still has rows.
        if model not in names:
            note(unknown_name(MODEL_OR_POOL, model, names).message)
    if output == "csv":
        say(csv_text(found, groups))
    elif output in ("json", "yaml"):
        print_document(found, output)
    else:
        say(table_text(found, groups, is_wide=output == "wide"))
    if found.get("comparedWith") and output in ("table", "wide"):
        note(f"saved: by the price of {found['comparedWith']}")
    if found["hasMore"]:
        note(f"there are more than {MAX_ROWS} rows; choose a shorter period, a tenant or a model")


def table_text(found: Document, groups: Sequence[str], *, is_wide: bool = False) -> str:
    """Returns the table, with the sum of several rows last."""
    rows = list(found["items"])
    money = [each for each, name in zip(_MONEY, (PRICE, SAVED), strict=True) if any(name in row for row in rows)]
    columns = [*_group_columns(groups), *(_WIDE if is_wide else _COUNTS), *money]
    if len(rows) > 1 and groups:
        rows.append(total := found["total"] | ({SAVED: found[SAVED]} if SAVED in found else {}))
        first = columns[0]
        columns[0] = Column(first.title, lambda row: "total" if row is total else first.text(row))
    return TextTable(columns, is_cut=not is_wide, wider="-o wide").text(rows)


def csv_text(found: Document, groups: Sequence[str]) -> str:
    """Returns rows as CSV with a header, with times and sums as numbers, and unknown ones empty."""
    times = ["start"] if _TIMES.keys() & set(groups) else []
    names = [name for name in _GROUPS if name in groups]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*times, *names, *_CSV_COUNTS])
    for row in found["items"]:
        start = [_start(row, "%Y-%m-%dT%H:%MZ")] if times else []
        counts = (row.get(_key_of(name), "") for name in _CSV_COUNTS)
        writer.writerow([*start, *(_cell(row.get(name, "")) for name in names), *counts])
    return text.getvalue()


def _key_of(name: str) -> str:
    """Returns the document key of a count, such as "promptTokens"."""
    first, *others = name.removesuffix("_count").split("_")
    return first + "".join(map(str.capitalize, others))


def _cell(text: str) -> str:
    """Returns a name as a cell, escaped because spreadsheets would run a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _group_columns(groups: Sequence[str]) -> list[Column]:
    columns = [Column(title, name) for name, title in _GROUPS.items() if name in groups]
    for name, (title, pattern) in _TIMES.items():
        if name in groups:
            return [Column(title, lambda row, pattern=pattern: _start(row, pattern)), *columns]  # type: ignore[misc]
    return columns


def _start(row: Document, pattern: str) -> str:
    return f"{moment_in(row['start']).astimezone(UTC):{pattern}}" if "start" in row else ""


def _gpu(row: Document) -> str:
    known = f"{row['gpuSeconds']:.1f}" if "gpuSeconds" in row else "-"
    return f"{known} (+{row['unknownGpu']} unknown)" if row["unknownGpu"] else known


def _dollars(row: Document, name: str) -> str:
    return dollars_words(row[name]) if name in row else "-"


_OUTCOMES = ("completed", "failed", "cancelled", "rejected", "unknown")
_COUNTS = custom_columns(
    "REQUESTS COMPLETED:completed FAILED:failed CANCELLED:cancelled? REJECTED:rejected? IN:promptTokens "
    "CACHED:cachedPromptTokens? OUT:completionTokens GPU_SECONDS REMOTE:remote",
    REQUESTS=lambda row: str(sum(row[name] for name in _OUTCOMES)),
    GPU_SECONDS=_gpu,
)
_MONEY = custom_columns("COST SAVED", COST=lambda row: _dollars(row, PRICE), SAVED=lambda row: _dollars(row, SAVED))
_WIDE = _COUNTS + custom_columns(
    "WATT_HOURS IMAGE_STEPS:imageSteps MEGAPIXELS AUDIO_SECONDS REMOTE_IN:remotePromptTokens "
    "REMOTE_OUT:remoteCompletionTokens UNKNOWN:unknown RETRIED:retried TOKENS_UNKNOWN:unknownTokens",
    WATT_HOURS=lambda row: f"{row['energyMillijoules'] / 3.6e6:.2f}" if "energyMillijoules" in row else "-",
    MEGAPIXELS=lambda row: f"{row['imagePixels'] / 1e6:.2f}",
    AUDIO_SECONDS=lambda row: f"{row['audioMilliseconds'] / 1e3:.1f}",
)
