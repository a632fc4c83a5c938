"""Bodies of loads, unloads and cache flushes under `/v1/admin`."""

from typing import Annotated

from pydantic import Field

from gateway.operation_client import MAX_AUTHORIZATION_CHARS
from weft.documents.document_base import DocumentPart, ModelName, Name
from weft.documents.operation_actions import MAX_TAG_CHARS, FlushScope, Form, LoadSettings
from weft.kernel.models.model_source import MAX_SOURCE_CHARS


class LoadBody(LoadSettings):
    """Options of a load."""

    evict_model: ModelName | None = None
    """Model to unload first."""
    replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    """For a pool: number of members to keep loaded."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """Token of `weft keys sign`, if governance requires one."""


class SourceLoadBody(LoadSettings):
    """A model to add by its source, without an entry in weft.yaml."""

    source: Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARS)]
    """Source, such as `hf:Qwen/Qwen3-8B-GGUF:Q4_K_M`; a path or a URL needs `models:edit`. The address of a server
    attaches that server; its `parameters` are `api_key_env`, which needs `secrets:create` too, and `remote`."""
    name: ModelName | None = None
    """Name of the model or the server in the mesh. Default: derived from the source."""
    runner: Name | None = None
    """Runner that serves it. Default: the only one that can."""
    evict_model: ModelName | None = None
    """Model to unload first."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """Token of `weft keys sign`, if governance requires one."""


class PullBody(DocumentPart):
    """A model whose files are pulled into a runner's model store."""

    source: Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARS)]
    """Source, such as `hf:Qwen/Qwen3-8B-GGUF:Q4_K_M`; a path or a URL needs `models:edit`."""
    runner: Name | None = None
    """Runner. Default: the only one that can pull."""
    form: Form | None = None
    """`gguf` or `folder`. Default: GGUF if available."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """Token of `weft keys sign`, if governance requires one."""


class UnloadBody(DocumentPart):
    """Options of an unload."""

    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """Token of `weft keys sign`, if governance requires one."""


class FlushBody(DocumentPart):
    """The cached prefixes to delete."""

    scope: FlushScope
    """`all`, `model`, `tenant` or `tag`."""
    model: ModelName | None = None
    """The model; with another scope, the flush is limited to this model."""
    tenant: Annotated[str, Field(max_length=64)] = ""
    """The tenant, for scope `tenant`."""
    tag: Annotated[str, Field(max_length=MAX_TAG_CHARS)] = ""
    """The tag, for scope `tag`."""
    runner: Name | None = None
    """Limits the flush to this runner."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """Token of `weft keys sign`, if governance requires one."""
