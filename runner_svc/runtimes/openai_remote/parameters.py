"""The request parameters that a provider takes."""

from runner_svc.policy.parameters import EngineParameters, OneOf

PARAMETERS = EngineParameters(
    engine="a provider off the premises",
    # OpenAI's own, for those who follow it: they refuse what they do not know.
    allowed={
        "verbosity": OneOf(("low", "medium", "high")),
    },
    untaken=frozenset({"min_p", "repeat_penalty", "top_k"}),
    is_strict=True,
)
