"""The size of models that are asked for by their source: facts of the files and of the machine for the policy."""

import asyncio

from runner_svc.memory.estimate import ModelFiles, known_model, loaded_facts
from runner_svc.policy.model_sizing import AskedSize, ChosenSize, MachineMemory, Place, SizedModel, choose_size
from weft.api.runner.v1 import added_model_pb2, load_pb2
from weft.kernel.model_source import shown_source
from weft_app.compose.added_models import Sized, SizingRequest

CONTEXT_TOKENS, SLOTS = "context_tokens", "slots"
"""Load parameters by which a caller asks for a size."""


async def size_by_memory(request: SizingRequest) -> Sized:
    """Returns the size that `policy/model_sizing.py` chooses: a SizeModel. Raises INSUFFICIENT_MEMORY."""
    memory = await request.memory()
    model = await asyncio.to_thread(_sized_model, request)
    chosen = choose_size(model, memory, asked_size(request.options))
    return Sized(sizing=sizing_message(chosen, memory), reasons=chosen.reasons)


def _sized_model(request: SizingRequest) -> SizedModel:
    """Reads the files of a model. Blocks."""
    facts = loaded_facts(ModelFiles(path=request.path, projector=request.projector))
    return SizedModel(
        known=known_model(shown_source(request.source), facts),
        trained_context_tokens=facts.context_tokens,
        habits=request.runtime.habits,
        places=request.runtime.places,
    )


def asked_size(options: load_pb2.LoadOptions) -> AskedSize:
    """Returns what the options of a load ask for; other parameters are checked when it is loaded."""
    return AskedSize(context_tokens=_positive(options, CONTEXT_TOKENS), slots=_positive(options, SLOTS))


def _positive(options: load_pb2.LoadOptions, name: str) -> int | None:
    value = options.parameters[name].integer if name in options.parameters else 0
    return value if value > 0 else None


def sizing_message(chosen: ChosenSize, memory: MachineMemory) -> added_model_pb2.ModelSizing:
    """Returns a choice as the added model keeps it: layers only if the engine would place them otherwise."""
    sizing = added_model_pb2.ModelSizing(context_tokens=chosen.context_tokens, slots=chosen.slots)
    if chosen.place is Place.SPLIT or (chosen.place is Place.HOST and memory.devices):
        sizing.gpu_layers = chosen.gpu_layers
    return sizing
