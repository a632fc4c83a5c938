"""`weft models trial`: the comparison of two models by requests of a tenant, and the switch from one to the other."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from weft.documents.kinds.trial import DEFAULT_MAX_PAIRS, MAX_PAIRS
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_of
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import DEFAULT_TENANT, require_name
from weft_app.cli.columns import label_of
from weft_app.cli.completion import complete_chat_target, complete_trial
from weft_app.cli.declare import UNCHANGED, post_apply
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, naming_fields
from weft_app.cli.output import Column, TextTable, custom_columns, page, print_document, text_at
from weft_app.cli.terminal import note, say

DEFAULT_SHARE = "10%"
TITLE_CHARS = 18
_PERCENTAGE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?) ?%?")

app = typer.Typer()

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The trial.", autocompletion=complete_trial)]

_FACTS = custom_columns(
    "Pairs Equal_tool_calls Length_ratio:summary.lengthRatio:{:.2f} Equally_good:summary.same Stopped:stopped",
    Pairs=lambda report: "{answered} answered, {waiting} waiting, {failed} failed".format(**report["summary"]),
    Equal_tool_calls=lambda report: _count(report["summary"], "sameToolCalls", "withToolCalls"),
)
_PAIRS = custom_columns(
    "TASK:task STATE:state VERDICT:verdict SCHEMA EQUAL_CALLS:checks.sameToolCalls LENGTH:checks.lengthRatio:{:.2f} "
    "TOKENS/S ERROR:error?",
    **{
        "SCHEMA": lambda pair: _both(pair, "checks.{}Valid"),
        "TOKENS/S": lambda pair: _both(pair, "checks.{}Speed.tokensPerSecond", "{:.1f}"),
    },
)


@app.command("start")
def start(
    candidate: Annotated[
        str, typer.Argument(metavar="NEW", help="What answers again.", autocompletion=complete_chat_target)
    ],
    *,
    against: Annotated[
        str, typer.Option(metavar="OLD", help="What has answered: a model, pool, agent, route or alias.")
    ],
    tenant: Annotated[
        str, typer.Option(help="Tenant whose requests are used; it needs capture. Default: that of your requests.")
    ] = "",
    share_percent: Annotated[
        str, typer.Option("--share", metavar="PERCENT", help="Share of the requests that are answered again.")
    ] = DEFAULT_SHARE,
    max_pairs: Annotated[
        int, typer.Option("--pairs", min=1, max=MAX_PAIRS, help="Pairs to collect.")
    ] = DEFAULT_MAX_PAIRS,
    name: Annotated[str, typer.Option(help="Name of the trial. Default: NEW-vs-OLD.")] = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Declare a trial: NEW answers a share of a tenant's requests again, in idle capacity, after OLD has answered them.

    Only requests of a tenant that is declared with capture are used. Prompts and answers are stored as tasks of the
    tenant, not encrypted, until their retention ends. Another start with the same name keeps the verdicts. End it
    with weft delete trial/NAME.

    Example: weft models trial start qwen3-8b --against chat --share 10% --tenant acme
    """
    share = _percent(share_percent)
    with connect(home) as api:
        tenant = tenant or api.get("/api/v1/caller").get("tenant", DEFAULT_TENANT)
        _require_capture(api, tenant)
        alias = _alias_of(api, against, tenant)
        target = alias["target"] if alias else against
        found = name or f"{candidate}-vs-{target}".replace("/", "-")
        trial = {
            "kind": ResourceKind.TRIAL.value,
            "name": require_name(found, "--name"),
            "candidate": candidate,
            "against": target,
            "tenant": tenant,
            "sharePercent": share,
            "maxPairs": max_pairs,
            **({"alias": alias["name"]} if alias else {}),
        }
        (result,) = post_apply(api, [trial])
    say(f"{label_of(result)} {result['outcome']}\n")
    note(
        f"{candidate} answers {share:g} % of the requests of {tenant} to {target} again; "
        f"see: weft models trial report {found}"
    )


@app.command("report")
def report(name: NameArgument, output: OutputOption = OutputFormat.TABLE, home: HomeOption = DEFAULT_HOME) -> None:
    """Show what a trial has found: checks of both models' answers, verdicts of people, and its pairs.

    People judge pairs on the page Trials of the workbench (weft ui), without seeing which model wrote which answer.

    Example: weft models trial report qwen3-8b-vs-qwen3-4b
    """
    require_name(name, "NAME")
    with connect(home) as api:
        found = api.get(f"/v1/trials/{name}")
    if output is not OutputFormat.TABLE:
        print_document(found, output)
        return
    say(report_text(found))
    unjudged = sum(pair["state"] == "answered" and not pair.get("verdict") for pair in found["pairs"])
    if unjudged:
        note(f"{unjudged} answered pairs are not judged; judge them in the workbench: weft ui")


@app.command("switch")
def switch(name: NameArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Point the alias of a trial to its candidate. Running requests finish where they are.

    Example: weft models trial switch qwen3-8b-vs-qwen3-4b
    """
    _point(home, name, "candidate", "revert")


@app.command("revert")
def revert(name: NameArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Point the alias of a trial back to the model that its candidate was compared with.

    Example: weft models trial revert qwen3-8b-vs-qwen3-4b
    """
    _point(home, name, "against", "switch")


def report_text(report: Document) -> str:
    """Returns a report as text: its facts, the checks of both models, and its pairs."""
    candidate, against = (Column(report[side], side) for side in ("candidate", "against"))
    facts = "".join(f"{line}\n" for line in page(_FACTS, report, TITLE_CHARS))
    checks = TextTable((Column("CHECK", "check"), candidate, against)).text(_checks(report["summary"]))
    pairs = TextTable(_PAIRS).text(report["pairs"]) if report["pairs"] else ""
    return "\n".join(filter(None, (facts, checks, pairs)))


def _point(home: Path, name: str, side: str, opposite: str) -> None:
    """Points the alias of a trial to one of its two sides, unless the alias has changed meanwhile."""
    require_name(name, "NAME")
    with connect(home) as api:
        trial = api.document(ResourceKind.TRIAL, name)
        alias_name, target = trial.get("alias", ""), trial[side]
        if not alias_name:
            raise invalid_field(
                "NAME",
                f"trial/{name} has no alias, so callers name {trial['against']} themselves. Declare an alias, and set "
                f"it with: weft config edit trial/{name}",
            )
        before = declared_of(api.document(ResourceKind.ALIAS, alias_name))
        (result,) = post_apply(api, [before | {"target": target}], expected=(before,))
    if result["outcome"] == UNCHANGED:
        say(f"alias/{alias_name} already points to {target}\n")
        return
    say(f"alias/{alias_name} points to {target} instead of {before['target']}\n")
    note(f"undo it with: weft models trial {opposite} {name}")


def _require_capture(api: MeshApi, tenant: str) -> None:
    """Raises PERMISSION_DENIED, naming the next command, if a tenant has no `capture`."""
    try:
        with naming_fields(lambda _: "--tenant"):
            if api.document(ResourceKind.TENANT, tenant).get("capture"):
                return
        following = f"weft config edit tenant/{tenant}, and set capture: true"
    except WeftError as error:
        if error.reason is not Reason.NOT_FOUND:
            raise
        following = rf"printf 'kind: tenant\nname: {tenant}\ncapture: true\n' | weft apply -f -"
    raise WeftError(
        Reason.PERMISSION_DENIED,
        f"the tenant {tenant} has no capture, so none of its requests may be answered again. Set it with: {following}",
    )


def _alias_of(api: MeshApi, name: str, tenant: str) -> Document | None:
    """Returns the alias that a tenant's requests name; None: it is none."""
    aliases = [each for each in api.documents(ResourceKind.ALIAS) if each.get("tenant", "") in ("", tenant)]
    # The alias of one tenant is asked before that of all.
    aliases.sort(key=lambda each: not each.get("tenant"))
    return next((each for key in ("pattern", "name") for each in aliases if each[key] == name), None)


def _percent(text: str) -> float:
    found = _PERCENTAGE.fullmatch(text)
    if found is None or not 0 < float(found[1]) <= 100:
        raise invalid_field("--share", "must be a percentage above 0% and at most 100%, such as 10%")
    return float(found[1])


def _checks(summary: Document) -> Iterator[dict[str, str | None]]:
    """Yields the rows of the two models that are compared."""
    rows = {
        "preferred": ("{}Preferred", "", ""),
        "valid by schema": ("{}Valid", "withSchema", ""),
        "first token": ("{}Speed.firstTokenSeconds", "", "time"),
        "tokens/s": ("{}Speed.tokensPerSecond", "", "{:.1f}"),
    }
    for check, (path, total, form) in rows.items():
        sides = {side: path.format(side) for side in ("candidate", "against")}
        texts = {
            side: _count(summary, own, total) if total else text_at(summary, own, form) for side, own in sides.items()
        }
        yield {"check": check, **texts}


def _count(summary: Document, key: str, total: str) -> str | None:
    return f"{summary[key]} of {summary[total]}" if summary[total] else None


def _both(pair: Document, path: str, form: str = "") -> str | None:
    """Returns a value of the candidate and of the other answer."""
    found = [text_at(pair, path.format(side), form) for side in ("candidate", "against")]
    return " / ".join(text or "-" for text in found) if any(found) else None
