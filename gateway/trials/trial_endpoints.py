"""The endpoints of trials."""

from gateway.openapi import answers, json_body
from gateway.routing import ApiRouter
from gateway.trials import trial_handlers as trials
from gateway.trials.trial_handlers import VerdictBody
from weft.api.gateway.v1.trial_report_pb2 import TrialPairDetails, TrialReport
from weft.kernel.access.principal import EDIT_REQUESTS, VIEW_REQUESTS

_TRIAL, _PAIR = "/v1/trials/{name}", "/v1/trials/{name}/pairs/{task}"
_DETAILS = answers(TrialPairDetails)

TRIALS = ApiRouter("trials")
TRIALS.add_get(_TRIAL, VIEW_REQUESTS, trials.get_trial_report, answers(TrialReport))
TRIALS.add_get(_PAIR, VIEW_REQUESTS, trials.get_trial_pair, _DETAILS)
TRIALS.add_post(f"{_PAIR}/verdict", EDIT_REQUESTS, trials.judge_trial_pair, json_body(VerdictBody) | _DETAILS)
