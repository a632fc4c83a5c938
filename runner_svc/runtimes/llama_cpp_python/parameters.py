"""The request parameters that llama-cpp-python takes."""

from runner_svc.policy.parameters import MIROSTAT, EngineParameters, Grammar, Number

PARAMETERS = EngineParameters(
    engine="llama-cpp-python",
    # The arguments of create_completion in version 0.3, without those of samplers that llama.cpp has dropped.
    allowed={
        "grammar": Grammar(),
        "mirostat_mode": Number(0, 2, whole=True),
        **MIROSTAT,
        "typical_p": Number(0, 1),
    },
    untaken=frozenset({"parallel_tool_calls", "reasoning_effort"}),
    renamed={"temperature": "temp"},
    thinks_by_template=True,
)
