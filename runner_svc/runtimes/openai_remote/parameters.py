"""The request parameters that providers take."""

from runner_svc.policy.parameters import EngineParameters, OneOf

PARAMETERS = EngineParameters(
    engine="a remote provider",
    # OpenAI's own, for those who follow it: they refuse what they do not know.
    allowed={
        "verbosity": OneOf(("low", "medium", "high")),
    },
    untaken=frozenset({"min_p", "repeat_penalty", "top_k"}),
    is_strict=True,
)

MESSAGES_PARAMETERS = EngineParameters(engine="a provider with Anthropic's API", is_strict=True)
"""What is sent there is decided by `runner_svc.anthropic_upstream.request`."""
