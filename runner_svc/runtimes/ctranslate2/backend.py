"""The backend of the runtime ctranslate2: the library in a host process that the runner starts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from runner_svc.backend.port import CallInfo, LoadOrder
from runner_svc.engine_host.request import PreparedRequest
from runner_svc.environments.ctranslate2.environment import ENVIRONMENT
from runner_svc.openai_upstream.request import warning_frame
from runner_svc.policy.load_plan import LoadParameter
from runner_svc.policy.parameters import ParameterWarning
from runner_svc.runtimes.ctranslate2.arguments import HOST_PROGRAM, host_arguments, load_parameters
from runner_svc.runtimes.ctranslate2.parameters import BEAM_SIZE, PARAMETERS, UNUSED_BY_BEAMS
from runner_svc.runtimes.ctranslate2.settings import CTranslate2Model
from runner_svc.runtimes.hosted_engine import HostedBackend
from weft.dispatch.frames import GenerationPayload
from weft.kernel.request import Operation

OPERATIONS = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE})


class CTranslate2Backend(HostedBackend[CTranslate2Model]):
    """A Backend over one host process."""

    program = HOST_PROGRAM
    engine_parameters = PARAMETERS
    engine_environment = ENVIRONMENT
    missing_library = "CTranslate2 and tokenizers cannot be loaded; run: weft runtime install ctranslate2"

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return load_parameters(self.model)

    @override
    def sleeps_in_place(self, order: LoadOrder) -> bool:
        # With a lease its memory is given back now, and a process keeps some of a device for as long as it runs.
        return self.model.sleeps_in_place and not order.shares

    @override
    def arguments(self, order: LoadOrder, socket: Path) -> list[str]:
        return host_arguments(self.model, socket, order)

    @override
    def operations(self) -> frozenset[Operation]:
        return OPERATIONS

    @override
    async def prepared(self, payload: GenerationPayload, call: CallInfo) -> PreparedRequest:
        prepared = await super().prepared(payload, call)
        sampling = prepared.request.sampling
        if sampling.get(BEAM_SIZE, self.model.beam_size) <= 1:
            return prepared
        warnings = [
            ParameterWarning(field=name, message=f"{name} is not used by a beam search")
            for name in UNUSED_BY_BEAMS
            if name in sampling
        ]
        if not call.whole:
            message = "a beam search has no text before it ends: the answer was not streamed"
            warnings.append(ParameterWarning(field=BEAM_SIZE, message=message))
        return replace(prepared, warnings=[*prepared.warnings, *warning_frame(warnings)])
