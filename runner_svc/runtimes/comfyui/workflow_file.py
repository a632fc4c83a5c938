"""The file of a workflow document on the runner's machine: what the model answers by its own name."""

from pathlib import Path

from weft.api.common.v1 import workflow_pb2
from weft.dispatch.workflow_graph import to_canonical_workflow
from weft.documents.resources import WorkflowDocument
from weft.documents.yaml_documents import read_documents
from weft.kernel.errors import WeftError, invalid_field

MAX_FILE_BYTES = 1024 * 1024


def read_workflow(path: Path, where: str) -> workflow_pb2.Workflow:
    """Returns the workflow in a file. Raises INVALID_ARGUMENT naming `where`, the setting with the path."""
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise invalid_field(where, f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise invalid_field(where, f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        documents = [each.document for each in read_documents(raw.decode(), str(path))]
    except (UnicodeDecodeError, WeftError) as error:
        raise invalid_field(where, str(error)) from None
    if len(documents) != 1 or not isinstance(documents[0], WorkflowDocument):
        raise invalid_field(where, f"{path} must hold one document of kind workflow")
    workflow = documents[0].declared.workflow
    to_canonical_workflow(workflow, where)
    return workflow
