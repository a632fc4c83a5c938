"""The request parameters that piper takes."""

from runner_svc.policy.parameters import EngineParameters

PARAMETERS = EngineParameters(engine="piper")
