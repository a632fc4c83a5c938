"""What a configured model of somebody else's server can be asked for."""

from weft.kernel.errors import invalid_field
from weft.kernel.request import TEXT_OPERATIONS, Operation
from weft_app.config.runner_sections import ModelSection, RunnerSection


def attached_operations(model: ModelSection) -> frozenset[Operation]:
    """Of a server that weft did not start: as its section says, else what they all offer."""
    if model.operations:
        return _said(model)
    return TEXT_OPERATIONS if model.embeddings else TEXT_OPERATIONS - {Operation.EMBEDDING}


def provider_operations(model: ModelSection) -> frozenset[Operation]:
    """Of a provider: as its section says, else chats, and embeddings where it says so."""
    if model.operations:
        return _said(model)
    gives_embeddings = model.embeddings and "embeddings" in model.model_fields_set
    return frozenset({Operation.CHAT, Operation.EMBEDDING} if gives_embeddings else {Operation.CHAT})


def require_operations_fit(section: RunnerSection, model: ModelSection, where: str) -> None:
    """Raises INVALID_ARGUMENT naming the field for operations of an engine that says itself what it offers."""
    if not model.operations:
        return
    if section.starts_engines:
        message = "cannot be set: engines that weft starts say it themselves (reranking: extra_arguments [--reranking])"
        raise invalid_field(f"{where}.operations", message)
    if "embeddings" in model.model_fields_set and model.embeddings != ("embedding" in model.operations):
        raise invalid_field(f"{where}.embeddings", "must say the same as operations; leave it out")


def _said(model: ModelSection) -> frozenset[Operation]:
    return frozenset(Operation[word.upper()] for word in model.operations)
