"""What the processes of a mesh run, and what of it does not go together. Pure.

Neighbouring releases run together: decision 0001. A process whose database has a newer schema than it knows goes on
until it is restarted, and is refused then.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weft_app.cli.findings import Finding, Verdict, failed

CHECK = "mesh"
PROCESS_CHECK = "process"
MAX_NAMED = 4
_VERSION = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSchema:
    """The schema of one service's tables, as a process knows it and as its database has it."""

    service: str
    known: str
    found: str = ""
    """Empty: the process has not opened the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshProcess:
    """One process of a mesh."""

    name: str
    """Such as `registry`, `gateway@edge-1` or `runner/gpu-0`."""
    version: str
    """Empty: it is of a release that does not say it."""
    schemas: tuple[KnownSchema, ...] = ()


def release_of(version: str) -> tuple[int, int] | None:
    """Returns the major and minor number of a version; None where it has none."""
    found = _VERSION.match(version)
    return None if found is None else (int(found[1]), int(found[2]))


def are_neighbours(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two releases run together: the same one, or the one before or after it."""
    return one[0] == other[0] and abs(one[1] - other[1]) <= 1


def examine_versions(processes: Sequence[MeshProcess]) -> Iterator[Finding]:
    """Yields a finding for each process, then what the mesh mixes, and the schemas that are too new for a process."""
    for process in processes:
        schemas = "".join(f", {each.service} schema {each.known}" for each in process.schemas)
        version = f"weft {process.version}" if process.version else "of a release that does not say its version"
        verdict = Verdict.OK if process.version else Verdict.WARNING
        remedy = "" if process.version else "upgrade it"
        yield Finding(check=PROCESS_CHECK, verdict=verdict, detail=f"{process.name}: {version}{schemas}", remedy=remedy)
    yield _mix(processes)
    yield from _schemas(processes)


def _mix(processes: Sequence[MeshProcess]) -> Finding:
    releases = {process.name: release_of(process.version) for process in processes}
    known = sorted({release for release in releases.values() if release is not None})
    if len(known) <= 1:
        versions = sorted({process.version for process in processes if process.version})
        return Finding(check=CHECK, verdict=Verdict.OK, detail=f"one release: {', '.join(versions) or 'unknown'}")
    oldest, newest = known[0], known[-1]
    behind = _named(name for name, release in releases.items() if release == oldest)
    if are_neighbours(oldest, newest):
        detail = f"two neighbouring releases, {_words(oldest)} and {_words(newest)}, which run together"
        return Finding(check=CHECK, verdict=Verdict.OK, detail=detail, remedy=f"to end the upgrade: {behind}")
    detail = f"releases {_words(oldest)} to {_words(newest)}: only neighbouring ones run together"
    return failed(CHECK, detail, f"upgrade first: {behind}")


def _schemas(processes: Sequence[MeshProcess]) -> Iterator[Finding]:
    found: dict[str, str] = {}
    for process in processes:
        for schema in process.schemas:
            # Revisions are numbers of the same width.
            found[schema.service] = max(found.get(schema.service, ""), schema.found)
    for process in processes:
        for schema in process.schemas:
            newest = found[schema.service]
            if schema.known < newest:
                detail = (
                    f"{process.name}: the {schema.service} database has the schema {newest}, and weft "
                    f"{process.version} knows {schema.known}; it does not open that database again"
                )
                yield failed("schema", detail, f"upgrade {process.name}")


def _words(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _named(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more
