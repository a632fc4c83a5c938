"""The request parameters that faster-whisper takes: the fields of a transcription, and no others."""

from runner_svc.policy.parameters import EngineParameters

PARAMETERS = EngineParameters(engine="faster-whisper")
