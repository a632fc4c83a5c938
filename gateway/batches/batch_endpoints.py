"""The endpoints of files, batches and results."""

from gateway.batches import batch_handlers as batches
from gateway.batches.batch_handlers import (
    FILE_LIST_PARAMETERS,
    create_file,
    delete_file,
    get_content,
    get_file,
    list_files,
)
from gateway.batches.documents import BatchList, BatchObject, BatchRequest, DeletedFile, FileList, FileObject
from gateway.batches.results import PARAMETERS as RESULT_PARAMETERS
from gateway.batches.results import get_result
from gateway.openapi import answers, binary_content, form_body, json_body
from gateway.routing import ApiRouter
from weft.durable.batches import BATCH_INPUT, MEDIA_INPUTS
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
