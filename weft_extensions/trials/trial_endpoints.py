"""The endpoints of trials."""

from collections.abc import Mapping
from typing import Any

from gateway.deps import GatewayDeps
from gateway.http_api import HttpApi
from gateway.openapi import answers, json_body
from gateway.ports import GatewayPorts
from gateway.routing import ApiRouter
from weft.api.gateway.v1.trial_report_pb2 import TrialPairDetails, TrialReport
from weft.kernel.access.principal import EDIT_REQUESTS, VIEW_REQUESTS
from weft_extensions.trials import trial_handlers as trials
from weft_extensions.trials.pairs import TrialPairs
from weft_extensions.trials.trial_handlers import VerdictBody

_TRIAL, _PAIR = "/v1/trials/{name}", "/v1/trials/{name}/pairs/{task}"
_DETAILS = answers(TrialPairDetails)

TRIALS = ApiRouter("trials")
TRIALS.add_get(_TRIAL, VIEW_REQUESTS, trials.get_trial_report, answers(TrialReport))
TRIALS.add_get(_PAIR, VIEW_REQUESTS, trials.get_trial_pair, _DETAILS)
TRIALS.add_post(f"{_PAIR}/verdict", EDIT_REQUESTS, trials.judge_trial_pair, json_body(VerdictBody) | _DETAILS)


def _collaborators(_deps: GatewayDeps, ports: GatewayPorts) -> Mapping[Any, object] | None:
    if ports.tasks is None or ports.trials is None:
        return None
    return {TrialPairs: TrialPairs(ports.tasks), "trials": ports.trials}


API = HttpApi(router=TRIALS, collaborators=_collaborators)
