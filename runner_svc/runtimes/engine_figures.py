"""The figures of an engine's load as a runner reports them, with the time of their sample. Pure."""

from google.protobuf.timestamp_pb2 import Timestamp

from weft.api.registry.v1 import runner_pb2

STEP_SECONDS = 10
"""Steps of the time of a sample: a report changes no more often for the time alone."""


def with_sample_time(load: runner_pb2.EngineLoad, at_seconds: float) -> runner_pb2.EngineLoad:
    """Returns figures with the time of their sample (UTC), unless the engine has no request: they say nothing then."""
    counts = (load.running_count, load.waiting_count)
    knows_count = load.HasField("running_count") or load.HasField("waiting_count")
    if not (any(counts) if knows_count else load.kv_cache_share):
        return load
    stamped = runner_pb2.EngineLoad()
    stamped.CopyFrom(load)
    stamped.sample_time.CopyFrom(Timestamp(seconds=int(at_seconds) // STEP_SECONDS * STEP_SECONDS))
    return stamped
