"""The request parameters of ComfyUI: each workflow declares its own, which are checked with it."""

from runner_svc.policy.parameters import EngineParameters

PARAMETERS = EngineParameters(engine="ComfyUI")
