"""What a response in the background brings with it: all that any gateway needs to render it, whenever it is asked for.

JSON: `body` is the request as it came; `items` is its input where that names items of other responses, which may be
gone by then; `warnings` are what the edge has to say beside the answer, each an encoded `common.v1.Warning`.
"""

from collections.abc import Sequence

import msgspec
from pydantic import TypeAdapter, ValidationError

from gateway.responses.background_answer import BackgroundRequest
from gateway.responses.item_schema import InputItem, Items
from gateway.responses.payload import own_items
from gateway.responses.schema import ResponsesRequest
from weft.api.common.v1 import warning_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

ORIGIN_KIND = "responses.background"
"""`TaskSpec.origin_kind` of a response in the background."""
_REFERENCE = "item_reference"

_items = TypeAdapter(Items)


_NONE = msgspec.Raw(b"")
"""In place of items: those of the body are as they were."""


class _Origin(msgspec.Struct, omit_defaults=True):
    body: msgspec.Raw
    items: msgspec.Raw = _NONE
    warnings: list[bytes] = []


class ReadOrigin:
    """An origin, read."""

    def __init__(self, raw: bytes, task_id: str) -> None:
        """Raises INTERNAL where it cannot be read; `task_id` says whose it is."""
        try:
            origin = msgspec.json.decode(raw, type=_Origin)
            asked = ResponsesRequest.model_validate_json(bytes(origin.body))
            self.items: Sequence[InputItem] = (
                _items.validate_json(bytes(origin.items)) if bytes(origin.items) else own_items(asked)
            )
            warnings = [warning_pb2.Warning.FromString(each) for each in origin.warnings]
        except (msgspec.MsgspecError, ValidationError, WeftError) as error:
            message = f"the request of task {task_id} cannot be read: {type(error).__name__}"
            raise WeftError(Reason.INTERNAL, message) from None
        self.request = BackgroundRequest(asked=asked, warnings=warnings)


def origin_of(
    raw: bytes, own: Sequence[InputItem], resolved: Sequence[InputItem], warnings: Sequence[warning_pb2.Warning]
) -> bytes:
    """The origin of a request. `own`: its input; `resolved`: the same, references replaced by what they name."""
    items = _NONE
    if any(item.kind == _REFERENCE for item in own):
        told = [item.model_dump(mode="json", exclude_none=True) for item in resolved]
        items = msgspec.Raw(msgspec.json.encode(told))
    encoded = [warning.SerializeToString(deterministic=True) for warning in warnings]
    return msgspec.json.encode(_Origin(body=msgspec.Raw(raw), items=items, warnings=encoded))
