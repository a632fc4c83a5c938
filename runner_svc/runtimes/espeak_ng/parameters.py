"""The request parameters that espeak-ng takes."""

from runner_svc.policy.parameters import EngineParameters

PARAMETERS = EngineParameters(engine="espeak-ng")
