"""Lines of batches as tasks."""

from gateway.batches.creation import BatchLines, RawLine
from gateway.gateway_config import BatchEdgeConfig
from weft.api.router.v1 import task_pb2

PATH = "/v1/chat/completions"


def test_half_a_surrogate_pair_in_a_line_is_replaced_as_by_the_live_route() -> None:
    bodies: list[bytes] = []

    def to_spec(body: bytes) -> task_pb2.TaskSpec:
        bodies.append(body)
        return task_pb2.TaskSpec()

    lines = BatchLines(PATH, to_spec, BatchEdgeConfig(), max_depth=64)
    cut = rb'{"custom_id": "a", "method": "POST", "url": "%b", "body": {"prompt": "cut \ud83d"}}' % PATH.encode()
    taken = lines.take(RawLine(1, cut))
    assert (taken is not None, lines.errors) == (True, [])
    assert bodies == [rb'{"prompt": "cut \ufffd"}']
