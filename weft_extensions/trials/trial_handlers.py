"""`/v1/trials`: what a trial has found, its pairs, and the verdicts of people."""

from typing import Annotated, Literal

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.deps import Gateway, GatewayDeps
from gateway.intake.headers import tenant_of
from gateway.intake.query import begin_read
from gateway.operation_client import read_body
from gateway.registry_client import RegistryService
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from weft.api.gateway.v1.trial_report_pb2 import TrialReport
from weft.api.registry.v1.trial_pb2 import Trial, Verdict
from weft.api.registry.v1.trial_service_pb2 import JudgePairRequest, JudgePairResponse
from weft.documents.codec import document_of
from weft.documents.document_base import DocumentPart
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.values.names import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, require_token
from weft.kernel.values.unknown_names import unknown_name
from weft_extensions.trials.comparison import summarize
from weft_extensions.trials.pair_tasks import REQUEST_KEY, is_candidate_first
from weft_extensions.trials.pairs import Pair, TrialPairs, shown_pair

SURFACE = "trials"

Pairs = Annotated[TrialPairs, collaborator(TrialPairs)]
Judges = Annotated[RegistryService, collaborator("trials")]


class VerdictBody(DocumentPart):
    """The verdict about a pair."""

    verdict: Literal["a", "b", "same"]
    """The better answer, as the pair shows them; `same`: neither is better."""


async def get_trial_report(deps: Gateway, pairs: Pairs, request: Request) -> Response:
    """Returns the pairs of a trial of the caller's tenant with their checks, and the summary of the answered ones."""
    begin_read(request, SURFACE)
    trial = _trial_of(deps, request)
    found = await pairs.report(trial)
    report = TrialReport(
        name=trial.manifest.name,
        candidate=trial.manifest.candidate,
        against=trial.manifest.against,
        summary=summarize(found, trial.verdicts.values()),
        pairs=found,
        stopped=_stopped(deps, trial, len(found)),
    )
    return json_response(document_of(report))


async def get_trial_pair(deps: Gateway, pairs: Pairs, request: Request) -> Response:
    """Returns the request and both answers of a pair; it tells whose they are once it is judged."""
    begin_read(request, SURFACE)
    trial = _trial_of(deps, request)
    return _shown(trial, await pairs.pair(trial, _task_of(request)))


async def judge_trial_pair(deps: Gateway, pairs: Pairs, judges: Judges, request: Request) -> Response:
    """Records the verdict about a pair, in place of an earlier one. The answer tells whose the answers are."""
    wanted = await read_body(request, deps.config, VerdictBody, SURFACE)
    trial, task_id = _trial_of(deps, request), _task_of(request)
    pair = await pairs.pair(trial, task_id)
    request_id = pair.details.task.metadata.get(REQUEST_KEY, "")
    prefers_candidate = (wanted.verdict == "a") == is_candidate_first(trial.manifest.name, request_id)
    verdict = Verdict.VERDICT_CANDIDATE if prefers_candidate else Verdict.VERDICT_AGAINST
    judged: JudgePairResponse = await judges.JudgePair(
        JudgePairRequest(
            trial=trial.manifest.name,
            task=task_id,
            verdict=Verdict.VERDICT_SAME if wanted.verdict == "same" else verdict,
            tenant=trial.manifest.tenant,
        )
    )
    return _shown(judged.trial, pair)


def _shown(trial: Trial, pair: Pair) -> Response:
    response = json_response(document_of(shown_pair(trial, pair)))
    response.headers["cache-control"] = "no-store"
    return response


def _trial_of(deps: GatewayDeps, request: Request) -> Trial:
    """Returns the trial in the path. Raises NOT_FOUND, also for one of another tenant that the caller may not name."""
    name = require_token(request.path_params["name"], "name", MAX_NAME_CHARS)
    trial = deps.fleet.view.trials.get(name)
    may_see_all = facts_of(request.scope).principal.names_tenants
    if trial is None or not (may_see_all or trial.manifest.tenant == tenant_of(request.scope)):
        raise unknown_name(ResourceKind.TRIAL.value, name)
    return trial


def _task_of(request: Request) -> str:
    return require_token(request.path_params["task"], "task", MAX_REQUEST_ID_CHARS)


def _stopped(deps: GatewayDeps, trial: Trial, count: int) -> str:
    """Returns why a trial with so many pairs gets no further ones; empty: it does get them."""
    manifest, view = trial.manifest, deps.fleet.view
    if count >= manifest.max_pairs:
        return f"it has its {manifest.max_pairs:,} pairs"
    tenant = view.tenants.get(manifest.tenant)
    if tenant is None or not tenant.manifest.capture:
        return f"the tenant {manifest.tenant} has no capture; set capture: true in its declaration"
    return ""
