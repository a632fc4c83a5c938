"""The endpoints of files, batches and results."""

from collections.abc import Mapping
from typing import Any

from gateway.batches import batch_handlers as batches
from gateway.batches.batch_handlers import (
    FILE_LIST_PARAMETERS,
    create_file,
    delete_file,
    get_content,
    get_file,
    list_files,
)
from gateway.batches.creation import BatchCreator
from gateway.batches.documents import BatchList, BatchObject, BatchRequest, DeletedFile, FileList, FileObject
from gateway.batches.results import PARAMETERS as RESULT_PARAMETERS
from gateway.batches.results import get_result
from gateway.deps import GatewayDeps
from gateway.http_api import HttpApi
from gateway.intake.concurrency_limit import ConcurrencyLimit
from gateway.openapi import answers, binary_content, form_body, json_body
from gateway.ports import GatewayPorts
from gateway.result_links import ResultLinks
from gateway.routing import ApiRouter
from gateway.tasks.task_apis import task_apis_of
from weft.durable.batches import BATCH_INPUT, MEDIA_INPUTS, BatchClient, FileClient
from weft.kernel.access.principal import EDIT_REQUESTS, USE_MODELS, VIEW_REQUESTS

_FILE = "/v1/files/{file_id}"
FILES = ApiRouter("openai")
FILES.add_post(
    "/v1/files",
    USE_MODELS,
    create_file,
    form_body(None, files=("file",), choices={"purpose": (BATCH_INPUT, *MEDIA_INPUTS)}) | answers(FileObject),
)
FILES.add_get("/v1/files", VIEW_REQUESTS, list_files, answers(FileList, query=FILE_LIST_PARAMETERS))
FILES.add_get(_FILE, VIEW_REQUESTS, get_file, answers(FileObject))
FILES.add_get(
    f"{_FILE}/content",
    VIEW_REQUESTS,
    get_content,
    binary_content("The content of the file", "application/octet-stream"),
)
FILES.add_delete(_FILE, EDIT_REQUESTS, delete_file, answers(DeletedFile))
RESULTS = ApiRouter("openai")
# The signature in the URL replaces a key.
RESULTS.add_get(
    "/v1/results/{id}",
    None,
    get_result,
    binary_content("The image or the recording", "image/*", "audio/*", query=RESULT_PARAMETERS),
    with_head=True,
)
_BATCH = "/v1/batches/{batch_id}"
BATCHES = ApiRouter("openai")
BATCHES.add_post("/v1/batches", USE_MODELS, batches.create_batch, json_body(BatchRequest) | answers(BatchObject))
BATCHES.add_get(
    "/v1/batches", VIEW_REQUESTS, batches.list_batches, answers(BatchList, query=batches.BATCH_LIST_PARAMETERS)
)
BATCHES.add_get(_BATCH, VIEW_REQUESTS, batches.get_batch, answers(BatchObject))
BATCHES.add_post(f"{_BATCH}/cancel", EDIT_REQUESTS, batches.cancel_batch, answers(BatchObject))


def _of_files(deps: GatewayDeps, ports: GatewayPorts) -> Mapping[Any, object] | None:
    if ports.files is None:
        return None
    most = deps.config.batches.max_uploads
    return {
        FileClient: ports.files,
        "uploads": ConcurrencyLimit(most, "files are being uploaded already (max_uploads)"),
    }


def _of_results(deps: GatewayDeps, ports: GatewayPorts) -> Mapping[Any, object] | None:
    return None if deps.links is None else {FileClient: ports.files, ResultLinks: deps.links}


def _of_batches(deps: GatewayDeps, ports: GatewayPorts) -> Mapping[Any, object] | None:
    if ports.files is None or ports.batches is None:
        return None
    most = deps.config.batches.max_creations
    return {
        FileClient: ports.files,
        BatchClient: ports.batches,
        BatchCreator: BatchCreator(ports.files, ports.batches, task_apis_of(deps, ports.extensions), deps=deps),
        "creations": ConcurrencyLimit(most, "batches are being created already (max_creations)"),
    }


FILE_API = HttpApi(router=FILES, collaborators=_of_files)
RESULT_API = HttpApi(router=RESULTS, collaborators=_of_results)
BATCH_API = HttpApi(router=BATCHES, collaborators=_of_batches)
