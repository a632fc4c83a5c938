"""The request parameters that diffusers takes beside those of the API."""

from runner_svc.policy.parameters import EngineParameters, Number

MAX_SEQUENCE_TOKENS = 512
PARAMETERS = EngineParameters(
    engine="diffusers",
    # The arguments of the pipelines of version 0.42; each family has some of them (families.py).
    allowed={
        "clip_skip": Number(0, 11, whole=True),
        "eta": Number(0, 1),
        "guidance_rescale": Number(0, 1),
        "max_sequence_length": Number(1, MAX_SEQUENCE_TOKENS, whole=True),
        "output_compression": Number(0, 100, whole=True),
    },
)
