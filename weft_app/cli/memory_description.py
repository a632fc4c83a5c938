"""What `weft describe` and `weft ps` say of a model's memory, its prefix cache and what may be set for a load."""

from collections.abc import Iterator
from datetime import UTC, datetime

from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1.load_pb2 import LoadParameter
from weft.documents.operation_messages import load_value, parameter_document
from weft.documents.statuses import MemoryStatus
from weft.kernel.units import size_words
from weft_app.cli.output import Column, seconds_ago

_ISOLATION_WORDS = {
    "slots": "each slot is one tenant's at a time",
    "whole": "the whole cache is one tenant's at a time",
    "salt": "the server is given a salt per tenant",
    "none": "not at all: the server shares its cache among tenants",
}


def _range(parameter: LoadParameter) -> str:
    document = parameter_document(parameter)
    if document.words:
        return ", ".join(document.words)
    low, high = document.minimum, document.maximum
    if document.type == "flag" or (low is None and high is None):
        return "true, false" if document.type == "flag" else document.type
    return f"{'' if low is None else f'{low:.15g}'} to {'' if high is None else f'{high:.15g}'}".strip()


PARAMETER_COLUMNS = (
    Column("NAME", lambda parameter: parameter.name),
    Column("MAY BE", _range),
    Column(
        "NOW", lambda parameter: str(load_value(parameter.default)) if parameter.HasField("default") else "engine's own"
    ),
    Column("MEANING", lambda parameter: parameter.description),
)


def cache_facts(described: pb.InstanceDescription) -> Iterator[tuple[str, str]]:
    """What is known of a model's prefix cache, as titles and texts."""
    isolation = pb.CacheIsolation.Name(described.cache_isolation).removeprefix("CACHE_ISOLATION_").lower()
    cache = described.cache
    asked = cache.hit_count + cache.miss_count
    if asked:
        share = cache.cached_token_count / max(1, cache.prompt_token_count)
        yield ("Prefix cache", f"{cache.hit_count} of {asked} requests hit, {share:.0%} of prompt tokens cached")
    if described.cache_isolation:
        yield ("Tenants apart", _ISOLATION_WORDS.get(isolation, isolation))
    if described.quantizations:
        yield ("Quantizations", ", ".join(described.quantizations))


def memory_words(memory: MemoryStatus) -> str:
    """What a model holds of accelerator memory, and what it would take."""
    if memory.leased_bytes:
        devices = ", ".join(map(str, memory.device_indexes))
        measured = "" if memory.measured_bytes is None else f", {size_words(memory.measured_bytes)} seen"
        return f"{size_words(memory.leased_bytes)} leased on device {devices}{measured}"
    if memory.estimated_bytes:
        return f"none held; would take {size_words(memory.estimated_bytes)} (from: {memory.estimate_source})"
    return "none held"


def until_words(unload_at: datetime | None, *, pinned: bool) -> str:
    """How long a model stays loaded."""
    if pinned:
        return "pinned"
    if unload_at is None:
        return "for ever"
    left = max(0.0, (unload_at - datetime.now(UTC)).total_seconds())
    return f"for {seconds_ago(left)}"
