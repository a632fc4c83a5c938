"""The schemas of requests and answers that the OpenAPI document publishes."""

from pydantic import BaseModel

from gateway.admin.keys_port import KeyList, NewKeyBody, NewKeyDocument, RotateBody
from gateway.admin.schemas import AdminModelList, FlushBody, GpuMemoryAnswer, LoadBody, UnloadBody
from gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from gateway.batches.documents import BatchList, BatchObject, BatchRequest, DeletedFile, FileList, FileObject
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.embeddings import EmbeddingRequest
from gateway.openai.model_call_schemas import (
    ImageRequest,
    RerankRequest,
    SpeechRequest,
    TokenizeRequest,
    TranscriptionRequest,
)
from gateway.resources.documents import (
    AgentList,
    ApplyAnswer,
    ApplyRequest,
    EventList,
    MeshConfig,
    ModelList,
    PoolList,
    PoolMembersAnswer,
    RouteList,
    RunnerList,
)
from gateway.responses.schema import DeletedResponse, ResponseItemList, ResponseObject, ResponsesRequest
from gateway.tasks.submission import NewTaskBody, TaskList, TaskObject
from weft.documents.operation_documents import AuditList, OperationList
from weft.documents.request_documents import ClientList, RequestList

PUBLISHED: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    TokenizeRequest,
    ImageRequest,
    SpeechRequest,
    TranscriptionRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    ResponseObject,
    DeletedResponse,
    ResponseItemList,
    FileObject,
    FileList,
    DeletedFile,
    BatchRequest,
    BatchObject,
    BatchList,
    ApplyRequest,
    ApplyAnswer,
    PoolMembersAnswer,
    ModelList,
    AgentList,
    RunnerList,
    PoolList,
    RouteList,
    EventList,
    MeshConfig,
    KeyList,
    NewKeyBody,
    NewKeyDocument,
    RotateBody,
    AdminModelList,
    GpuMemoryAnswer,
    LoadBody,
    UnloadBody,
    FlushBody,
    OperationList,
    AuditList,
    RequestList,
    ClientList,
    NewTaskBody,
    TaskObject,
    TaskList,
)
