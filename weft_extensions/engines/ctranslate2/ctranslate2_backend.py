"""Backend of the runtime ctranslate2: a server program around the library, started by the runner."""

from collections.abc import Sequence
from typing import get_args

from typing_extensions import override

from runner_svc.backend.port import CallInfo
from runner_svc.memory.estimate import FileForecast
from runner_svc.openai_upstream.openai_request import PreparedBody, warning_frame
from runner_svc.policy.load_options import context_parameter, word_parameter
from runner_svc.policy.parameters import ParameterWarning
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, file_engine, forecast_model
from runner_svc.runtimes.runtime_settings import ComputeType
from weft.dispatch.frames import GenerationPayload
from weft.kernel.models.load_parameters import LoadParameter
from weft_extensions.engines.ctranslate2.runtime import (
    BEAM_SIZE,
    RUNTIME,
    UNUSED_BY_BEAMS,
    CTranslate2Model,
)
from weft_extensions.engines.text_server import TextServer


class CTranslate2Backend(TextServer[CTranslate2Model]):
    """Backend of one server process."""

    runtime = RUNTIME
    missing_library = "CTranslate2 and tokenizers cannot be loaded; run: weft runtime install ctranslate2"
    noun = "CTranslate2"

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        # The model's files do not contain its trained context.
        return (
            context_parameter(self.model.slot_context_tokens, 0),
            word_parameter("compute_type", "Data type of the weights.", get_args(ComputeType)),
        )

    @override
    async def prepared(self, payload: GenerationPayload, call: CallInfo) -> PreparedBody:
        prepared = await super().prepared(payload, call)
        if prepared.body.get(BEAM_SIZE, self.model.beam_size) <= 1:
            return prepared
        warnings = [
            ParameterWarning(field=name, message=f"{name} is not used by a beam search")
            for name in UNUSED_BY_BEAMS
            if name in prepared.body
        ]
        if not call.whole:
            message = "a beam search has no text until it ends: the answer was not streamed"
            warnings.append(ParameterWarning(field=BEAM_SIZE, message=message))
        return PreparedBody(prepared.body, [*prepared.warnings, *warning_frame(warnings)])


def build(model: CTranslate2Model, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    return file_engine(
        model,
        context,
        CTranslate2Backend,
        FileForecast(forecast_model(model, RUNTIME.habits, model.device_values), context.estimator),
        operations=CTranslate2Backend.operations,
    )
