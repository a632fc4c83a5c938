"""Bodies of loads, unloads and cache flushes under `/v1/admin`."""

from typing import Annotated

from pydantic import Field

from gateway.operations import MAX_AUTHORIZATION_CHARS
from weft.documents.document_base import DocumentPart, ModelName, Name
from weft.documents.operation_actions import MAX_TAG_CHARS, FlushScope, Form, LoadSettings
from weft.kernel.model_source import MAX_SOURCE_CHARS


class LoadBody(LoadSettings):
    """Options of a load."""

    evict_model: ModelName | None = None
    """A model to unload first."""
    replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    """For a pool: the number of members that are loaded afterwards."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """The signatures that `weft keys sign` and `weft keys approve` made, where governance requires them."""


class SourceLoadBody(LoadSettings):
    """A model that is served and loaded by its source, without a line in weft.yaml."""

    source: Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARS)]
    """What it is, such as `hf:Qwen/Qwen3-8B-GGUF:Q4_K_M`; a path or a URL needs `models:edit`. The address of a server
    attaches that server; its `parameters` are `api_key_env`, which needs `secrets:create` too, and `remote`."""
    name: ModelName | None = None
    """Its name in the mesh, or the server's. Default: made from the source."""
    runner: Name | None = None
    """The runner that serves it. Default: the only one that can."""
    evict_model: ModelName | None = None
    """A model to unload first."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """The signatures that `weft keys sign` and `weft keys approve` made, where governance requires them."""


class PullBody(DocumentPart):
    """The files of a model that are pulled into the store of a runner's home."""

    source: Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARS)]
    """What is pulled, such as `hf:Qwen/Qwen3-8B-GGUF:Q4_K_M`; a path or a URL needs `models:edit`."""
    runner: Name | None = None
    """The runner. Default: the only one that can."""
    form: Form | None = None
    """`gguf` or `folder`. Default: GGUF where there is one."""
    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """The signatures that `weft keys sign` and `weft keys approve` made, where governance requires them."""


class UnloadBody(DocumentPart):
    """Options of an unload."""

    authorization: Annotated[str, Field(max_length=MAX_AUTHORIZATION_CHARS)] = ""
    """The signatures that `weft keys sign` and `weft keys approve` made, where governance requires them."""


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
    """The signatures that `weft keys sign` and `weft keys approve` made, where governance requires them."""
