"""Content of images and recordings in stored outputs, and signed URLs in its place."""

from collections.abc import Callable, Sequence

from gateway.deps import InferenceDeps
from weft.api.router.v1 import task_pb2
from weft.durable.media import filled, referring_part
from weft.kernel.channels.rpc import MAX_MESSAGE_BYTES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

Link = Callable[[str], str]
"""Returns the signed URL of a result by the id of its file."""


def no_link(_file_id: str) -> str:
    """Raises UNSUPPORTED_OPERATION: this gateway signs no URLs."""
    raise WeftError(Reason.UNSUPPORTED_OPERATION, "this gateway cannot return result URLs")


async def with_content(
    deps: InferenceDeps, tenant: str, outputs: Sequence[task_pb2.TaskOutput], *, has_links: bool
) -> Sequence[task_pb2.TaskOutput]:
    """Returns stored outputs with the content of their images and recordings; unchanged if the answer has URLs.

    Raises NOT_FOUND if a result has expired.
    """
    refers = any(referring_part(event) is not None for output in outputs for event in output.events)
    if not refers or deps.files is None or (has_links and deps.links is not None):
        return outputs
    return await filled(deps.files, tenant, outputs, max_bytes=MAX_MESSAGE_BYTES)


def link_of(deps: InferenceDeps, base: str, tenant: str) -> Link:
    """Returns the function that signs URLs of a tenant's results; `base`: the gateway's URL for the caller."""
    links = deps.links
    return no_link if links is None else lambda file_id: links.link(base, tenant, file_id)
