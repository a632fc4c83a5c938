"""The request parameters that the n-gram server takes."""

from runner_svc.policy.parameters import EngineParameters

PARAMETERS = EngineParameters(
    engine="the n-gram server",
    untaken=frozenset({"min_p", "top_k", "top_p", "repeat_penalty", "presence_penalty", "frequency_penalty"}),
)
