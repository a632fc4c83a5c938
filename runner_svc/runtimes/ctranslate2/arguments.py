"""The command line of the server program of CTranslate2: from a model's settings and a load's order."""

from typing import get_args

from runner_svc.backend.devices import uses_no_device
from runner_svc.backend.port import LoadOrder
from runner_svc.policy.load_plan import context_parameter, word_parameter
from runner_svc.runtimes.ctranslate2.settings import ComputeType, CTranslate2Model
from weft.kernel.load_parameters import LoadParameter

SERVER_PROGRAM = "runner_svc.runtimes.ctranslate2.server"


def server_arguments(model: CTranslate2Model, order: LoadOrder, port: int) -> list[str]:
    """Returns the command line after the program."""
    context = order.parameters.get("context_tokens", model.slot_context_tokens)
    return [
        *("--port", str(port), "--model", str(order.model_path or model.file)),
        *("--context-tokens", str(context), "--threads", str(model.engine_threads), "--slots", str(model.slots)),
        *("--device", "cpu" if uses_no_device(order) else model.device),
        *("--compute-type", str(order.parameters.get("compute_type", model.compute_type))),
        *("--beam-size", str(model.beam_size), "--prefix-cache-tokens", str(model.kept_tokens)),
        *model.extra_arguments,
    ]


def load_parameters(model: CTranslate2Model) -> tuple[LoadParameter, ...]:
    """Returns the load parameters of a model. Its files do not tell the context for which it was trained."""
    return (
        context_parameter(model.slot_context_tokens, 0),
        word_parameter("compute_type", "Type of the weights.", get_args(ComputeType)),
    )
