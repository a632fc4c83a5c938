"""`weft mesh figures`: what was counted in the last hour."""

from collections.abc import Callable, Iterator

from weft.kernel.values.units import size_words, time_words
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption
from weft_app.cli.output import TextTable, custom_columns, print_document
from weft_app.cli.terminal import say


def _summed(key: str) -> Callable[[Document], str]:
    return lambda row: str(sum(row[key]))


def _seconds(key: str) -> Callable[[Document], str]:
    def words(row: Document) -> str:
        times = row[f"{key}Seconds"]
        return f"{time_words(times['totalP50'])}, {time_words(times['totalP95'])}" if "totalP50" in times else "-"

    return words


_COLUMNS = custom_columns(
    "MODEL:model COMPLETED FAILED REJECTED? CANCELLED? RETRIES? TOKENS_IN CACHED? OUT FIRST_TOKEN_P50_P95 "
    "PER_TOKEN_P50_P95",
    COMPLETED=_summed("completed"),
    FAILED=_summed("failed"),
    REJECTED=_summed("rejected"),
    CANCELLED=_summed("cancelled"),
    RETRIES=_summed("retried"),
    TOKENS_IN=_summed("promptTokens"),
    CACHED=_summed("cachedPromptTokens"),
    OUT=_summed("completionTokens"),
    FIRST_TOKEN_P50_P95=_seconds("timeToFirstToken"),
    PER_TOKEN_P50_P95=_seconds("timePerOutputToken"),
)


def figures(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show figures of the last hour: requests, tokens, latency percentiles, waits and devices.

    With -o json, each figure for each step of ten seconds.

    Example: weft mesh figures -o json
    """
    with connect(home) as api:
        found = api.get("/v1/admin/figures")
    if output is not OutputFormat.TABLE:
        print_document(found, output)
        return
    say("".join(f"{line}\n" for line in _lines(found)))


def _lines(found: Document) -> Iterator[str]:
    """Yields the sums of all steps as a table, and the peaks of waiting and running requests."""
    yield from TextTable(_COLUMNS).text([*found["models"], found["all"] | {"model": "all"}]).splitlines()
    minutes = found["stepCount"] * found["stepSeconds"] / 60
    waiting, running = max(found["waiting"], default=0), max(found["running"], default=0)
    yield ""
    yield f"{minutes:.0f} minutes; peak {waiting} waiting and {running} running"
    for device in found["devices"]:
        known = [share for share in device["utilization"] if share is not None]
        used = f"computed {sum(known) / len(known):.0%} of the time" if known else "use unknown"
        name = f"{device['host']} device {device['index']} ({device['name']}, {size_words(device['totalBytes'])})"
        yield f"{name}: {used}"
