"""POST /v1/images/generations, /v1/images/edits and /v1/images/variations."""

from fastapi import FastAPI, Request, Response

from gateway.answers.unary_call import answered
from gateway.intake.body import read_json_body, read_multipart_body
from gateway.intake.forms import Form
from gateway.intake.json_guard import parse
from gateway.openai import image_payload
from gateway.openai.model_call_schemas import ImageRequest
from gateway.openapi import form_body, json_body
from gateway.parts import InferenceParts
from gateway.request_facts import facts_of
from weft.api.common.v1 import image_pb2, receipt_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

_FILES = frozenset({"image", "image[]", "mask"})


def add_images(app: FastAPI, parts: InferenceParts) -> None:
    """Add the routes."""
    limits = parts.config.limits

    async def generate_images(request: Request) -> Response:
        """Make images from words."""
        raw = await read_json_body(request.scope, request.receive, parts.config)
        asked = parse(ImageRequest, raw, max_depth=limits.max_json_depth)
        return _made(request, parts, asked, image_payload.to_payload(asked))

    async def edit_images(request: Request) -> Response:
        """Make images from words and images."""
        scope = request.scope
        form = Form(await read_multipart_body(scope, request.receive, parts.config, max_bytes=limits.max_image_bytes))
        asked = form.read(ImageRequest, file_fields=_FILES)
        payload = image_payload.to_payload(asked)
        image_payload.add_sources(payload, form)
        return _made(request, parts, asked, payload)

    async def vary_images(request: Request) -> Response:
        """Not offered."""
        facts_of(request.scope).surface = "images"
        message = "variations of images are not offered by any runner; use /v1/images/edits with words"
        raise WeftError(Reason.UNSUPPORTED_OPERATION, message)

    for action, endpoint, extra in (
        ("generations", generate_images, json_body(ImageRequest)),
        ("edits", edit_images, form_body(ImageRequest, files=("image",))),
        ("variations", vary_images, form_body(None, files=("image",))),
    ):
        app.add_api_route(f"/v1/images/{action}", endpoint, methods=["POST"], tags=["openai"], openapi_extra=extra)


def _made(request: Request, parts: InferenceParts, asked: ImageRequest, payload: image_pb2.ImagePayload) -> Response:
    scope = request.scope
    context = parts.context(scope, surface="images", asked=asked, model=asked.model, operation=Operation.IMAGE)

    def to_body(made: list[image_pb2.GeneratedImage], receipt: receipt_pb2.Receipt) -> bytes:
        return image_payload.to_body(made, int(parts.clock.utc_now().timestamp()), receipt.usage)

    return answered(parts, scope, context, lambda: parts.dispatcher.generate_images(context, payload), to_body)
