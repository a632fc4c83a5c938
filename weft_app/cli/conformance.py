"""`weft runner conformance`: checks of a running runner against its contract."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated

import typer

from weft.client._channel import security_from
from weft.client._home import mesh_address
from weft.kernel.errors.error_tree import invalid_field
from weft_app.cli.options import DEFAULT_HOME, EXIT_FAILED, HomeOption, OutputFormat, OutputOption
from weft_app.cli.output import Column, Listing
from weft_app.cli.terminal import is_err_terminal, note, say
from weft_testing.conformance.findings import Finding, Verdict
from weft_testing.conformance.runner_requests import Check
from weft_testing.conformance.runner_suite import CHECKS, examine
from weft_testing.conformance.runner_under_test import attach

_FINDINGS = Listing(
    columns=(
        Column("CHECK", "check", min_chars=18),
        Column("VERDICT", "verdict", min_chars=11),
        Column("SECONDS", lambda finding: f"{finding.seconds:.2f}", min_chars=7),
        Column("DETAIL", "detail"),
    ),
    kind="FindingList",
    document=asdict,
)


def conformance(
    runner: Annotated[str, typer.Argument(metavar="RUNNER", help="A runner's name, or its address.")],
    model: Annotated[str | None, typer.Option(help="Model of the runner. Default: the first.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this check (repeatable).")] = None,
    keep_loaded: Annotated[bool, typer.Option(help="Keep the model loaded: skip the checks that unload it.")] = False,
    output: OutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Check a runner of the mesh against each rule of its contract.

    It uses the model, so other requests may have to wait. Exit code 1 if a rule is broken; what cannot be checked here
    is reported and is not a failure.

    Example: weft runner conformance gaming-pc --keep-loaded
    """
    checks = tuple(check for check in _chosen(only or [], CHECKS) if not (keep_loaded and check.unloads))

    async def findings() -> AsyncGenerator[Finding]:
        async with (
            attach(mesh_address(home, "registry"), runner, model, security_from(os.environ)) as subject,
            aclosing(examine(subject, checks)) as examined,
        ):
            async for finding in examined:
                yield finding

    _report(findings(), output)


def _chosen(names: list[str], checks: tuple[Check, ...]) -> tuple[Check, ...]:
    known: Mapping[str, Check] = {check.name: check for check in checks}
    for name in names:
        if name not in known:
            raise invalid_field("--only", f"must be one of: {', '.join(known)}")
    return tuple(check for check in checks if not names or check.name in names)


def _report(examined: AsyncGenerator[Finding], output: OutputFormat) -> None:
    """Prints the findings; exits with EXIT_FAILED if a promise is broken."""
    findings = asyncio.run(_printed(examined, output))
    if output is not OutputFormat.TABLE:
        _FINDINGS.print(findings, output)
    broken = sum(finding.verdict is Verdict.BROKEN for finding in findings)
    honoured = sum(finding.verdict is Verdict.HONOURED for finding in findings)
    note(f"{honoured} kept, {broken} broken, {len(findings) - honoured - broken} not checked")
    if broken:
        raise typer.Exit(EXIT_FAILED)


async def _printed(examined: AsyncGenerator[Finding], output: OutputFormat) -> list[Finding]:
    """Returns all findings. A table shows each finding once its check has ended."""
    table = _FINDINGS.table(output)
    findings: list[Finding] = []
    async with aclosing(examined):
        async for finding in examined:
            if output is OutputFormat.TABLE:
                if not findings:
                    say(table.text(()))
                say(table.row(finding))
            elif is_err_terminal():
                note(f"{finding.check}: {finding.verdict}")
            findings.append(finding)
    return findings
