"""How long a model stays loaded, as `weft ps` and `weft describe` show it."""

from google.protobuf.duration_pb2 import Duration

from weft.api.registry.v1.runner_pb2 import InstanceState
from weft_app.cli.ps import until_text

READY = InstanceState.PHASE_READY


def test_a_model_that_works_is_shown_with_its_keep_alive_and_never_only_without_one() -> None:
    assert until_text(InstanceState(phase=READY, keep_alive=Duration(seconds=2))) == "2.0s when idle"
    assert until_text(InstanceState(phase=READY)) == "never"
