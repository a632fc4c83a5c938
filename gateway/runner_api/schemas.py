"""What the runner API takes, strictly: camelCase, nothing unknown, a bound on everything."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from weft.kernel.names import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS

MAX_MODEL_ID_CHARS = 256
MAX_TOKEN_CHARS = 16 * 1024
MAX_TAG_CHARS = 64
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._-]+$"

ModelId = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_ID_CHARS)]


def _token(value: object) -> object:
    """Either form of an operation token: one string, or the envelope as it is."""
    if not isinstance(value, str | dict):
        raise ValueError("must be a string or an object")  # noqa: TRY004 - pydantic turns only this into an error
    if isinstance(value, str) and len(value) > MAX_TOKEN_CHARS:
        raise ValueError(f"must be at most {MAX_TOKEN_CHARS} characters")
    return value


OperationToken = Annotated[Any, AfterValidator(_token)]
RequestId = Annotated[str, Field(pattern=REQUEST_ID_PATTERN, min_length=1, max_length=MAX_REQUEST_ID_CHARS)]


class _Body(BaseModel):
    model_config = ConfigDict(
        strict=True, allow_inf_nan=False, extra="forbid", frozen=True, alias_generator=to_camel, validate_by_name=False
    )

    verified_op_token: OperationToken | None = None
    """What governance asks for; see docs/governance.md."""
    request_id: RequestId | None = None
    """The same on every repeat of one call; the header Idempotency-Key does the same."""


class LoadBody(_Body):
    """POST /v1/models/load."""

    model_id: ModelId
    """A model of this runner, by its name in the mesh."""
    quantization: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """One of the model's declared variants."""
    max_context_length: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Context of one slot, in tokens."""
    gpu_memory_budget_mb: Annotated[int, Field(ge=1, le=16_777_216)] | None = Field(
        default=None, alias="gpuMemoryBudgetMB"
    )
    """The most accelerator memory it may take, in MiB."""
    evict_model: ModelId | None = None
    """A model of this runner that is unloaded first."""


class UnloadBody(_Body):
    """POST /v1/models/unload."""

    model_id: ModelId
    """A model of this runner, by its name in the mesh."""


class FlushBody(_Body):
    """POST /v1/cache/flush."""

    scope: Literal["all", "model", "tenant", "tag"]
    """What is forgotten."""
    model_id: ModelId | None = None
    """Only of this model; required for scope model."""
    tenant_id: Annotated[str, Field(min_length=1, max_length=MAX_TENANT_CHARS)] | None = None
    """Required for scope tenant."""
    tag: Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARS)] | None = None
    """Required for scope tag."""
