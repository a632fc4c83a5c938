"""`weft conformance`: checks of a running runner against the contract."""

import asyncio
import os
import sys
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.client._channel import mesh_address, security_from
from weft.kernel.errors import invalid_field
from weft_app.cli.options import DEFAULT_HOME, EXIT_FAILED, HomeOption, OutputFormat, OutputOption, note
from weft_app.cli.output import Column, Listing, say
from weft_testing.conformance.runner_requests import Check, Finding, Verdict
from weft_testing.conformance.runner_suite import CHECKS, examine
from weft_testing.conformance.runner_under_test import attach

_FINDINGS = Listing(
    columns=(
        Column("CHECK", lambda finding: finding.check, min_chars=18),
        Column("VERDICT", lambda finding: str(finding.verdict), min_chars=11),
        Column("SECONDS", lambda finding: f"{finding.seconds:.2f}", min_chars=7),
        Column("DETAIL", lambda finding: finding.detail),
    ),
    kind="FindingList",
    document=asdict,
)


def conformance(
    runner: Annotated[str, typer.Argument(metavar="RUNNER", help="A runner's name, or its address.")],
    model: Annotated[str | None, typer.Option(help="Model of the runner. Default: the first.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this check (repeatable).")] = None,
    keep_loaded: Annotated[bool, typer.Option(help="Skip the checks that unload the model.")] = False,
    output: OutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Check a runner of the mesh against the contract. The check uses the model: other requests may have to wait.

    Exit code 1 when a promise is broken; what cannot be checked here is reported and is no failure.

    Example: weft conformance gaming-pc --keep-loaded
    """
    checks = _chosen(only or [], keep_loaded)
    findings = asyncio.run(_findings(home, runner, model, checks, output))
    if output is not OutputFormat.TABLE:
        _FINDINGS.print(findings, output)
    broken = sum(finding.verdict is Verdict.BROKEN for finding in findings)
    honoured = sum(finding.verdict is Verdict.HONOURED for finding in findings)
    note(f"{honoured} honoured, {broken} broken, {len(findings) - honoured - broken} not checked")
    if broken:
        raise typer.Exit(EXIT_FAILED)


def _chosen(names: list[str], keep_loaded: bool) -> tuple[Check, ...]:
    known = {check.name: check for check in CHECKS}
    for name in names:
        if name not in known:
            raise invalid_field("--only", f"must be one of: {', '.join(known)}")
    chosen = [check for check in CHECKS if not names or check.name in names]
    return tuple(check for check in chosen if not (keep_loaded and check.unloads))


async def _findings(
    home: Path, runner: str, model: str | None, checks: tuple[Check, ...], output: OutputFormat
) -> list[Finding]:
    """Runs the checks and returns all findings; in a table each is printed as soon as it is known."""
    table = _FINDINGS.table(output)
    findings = []
    async with attach(mesh_address(home, "registry"), runner, model, security_from(os.environ)) as subject:
        if output is OutputFormat.TABLE:
            say(table.text(()))
        async with aclosing(examine(subject, checks)) as examined:
            async for finding in examined:
                findings.append(finding)
                if output is OutputFormat.TABLE:
                    say(table.row(finding))
                elif sys.stderr.isatty():
                    note(f"{finding.check}: {finding.verdict}")
    return findings
