"""POST /v1/images/generations, /v1/images/edits and /v1/images/variations."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import new_identity
from gateway.answers.generation import Work, streamed, unary
from gateway.deps import Inference, InferenceDeps
from gateway.intake.body import body_of, is_form, read_model, read_multipart_body
from gateway.intake.multipart import Form
from gateway.media import RequestMedia
from gateway.openai.extension_fields import unknown_fields
from gateway.request_facts import facts_of
from weft.api.common.v1 import event_pb2, image_pb2
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.dispatch.call import Call, Layer, Proceed
from weft.dispatch.frames import Frame
from weft.durable.batches import MAX_PIECE_BYTES, RESULT, FileClient
from weft.durable.media import pieces_of
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft_extensions.media.image_answer import ImagesAnswer, ImageStream, facts_of_request
from weft_extensions.media.image_schema import (
    FILES,
    ImageEditRequest,
    ImageRequest,
    add_files,
    add_references,
    to_payload,
)


def kept_images(files: FileClient, tenant: str) -> Layer[Frame]:
    """Returns a layer that stores images as task results, and passes on the ids of their files.

    The layer raises REQUEST_TOO_LARGE and TOO_MANY_RESOURCES at the limits of `router.results`.
    """

    async def kept(event: event_pb2.InferenceEvent) -> event_pb2.InferenceEvent:
        if not event.HasField("image"):
            return event
        image = event.image
        new = file_pb.File(
            tenant=tenant,
            name=f"image-{image.index}.{image.image.media_type.rpartition('/')[2] or 'bin'}",
            purpose=RESULT,
            media_type=image.image.media_type,
        )
        file = await files.save(new, pieces_of(image.image.data, MAX_PIECE_BYTES))
        light = image_pb2.GeneratedImage(index=image.index, revised_prompt=image.revised_prompt)
        if image.HasField("seed"):
            light.seed = image.seed
        light.image.file_id, light.image.media_type = file.id, image.image.media_type
        return event_pb2.InferenceEvent(image=light)

    async def layer(call: Call[Frame], /, proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        async with aclosing(proceed(call)) as frames:
            async for frame in frames:
                yield [await kept(event) for event in frame]

    return layer


GENERATION, EDIT = "image_generation", "image_edit"
"""Prefixes of the types of streamed events."""


async def generate_images(
    deps: Inference, request: Request, params: Annotated[ImageRequest, body_of(ImageRequest)]
) -> Response:
    """Generates images from a prompt."""
    return _answered(request, deps, params, to_payload(params), None, GENERATION)


async def edit_images(deps: Inference, request: Request) -> Response:
    """Edits images by a prompt. The body is a form with files, or JSON with URLs."""
    scope = request.scope
    if not is_form(scope):
        params = await read_model(request, ImageEditRequest, deps.config)
        payload, media = to_payload(params), deps.request_media(params)
        add_references(payload, params, media)
        return _answered(request, deps, params, payload, media, EDIT)
    form = Form(
        await read_multipart_body(scope, request.receive, deps.config, max_bytes=deps.config.limits.max_image_bytes)
    )
    uploaded = form.read(ImageRequest, besides=FILES)
    payload = to_payload(uploaded)
    add_files(payload, form, deps.config.media)
    return _answered(request, deps, uploaded, payload, None, EDIT)


async def vary_images(request: Request) -> Response:
    """Not supported; the error message names the alternative."""
    facts_of(request.scope).surface = "images"
    message = "variations of images are not supported; use /v1/images/edits with a prompt"
    raise WeftError(Reason.UNSUPPORTED_OPERATION, message)


def _answered(
    request: Request,
    deps: InferenceDeps,
    params: ImageRequest,
    payload: image_pb2.ImagePayload,
    media: RequestMedia | None,
    prefix: str,
) -> Response:
    scope = request.scope
    if params.response_format == "url":
        _require_kept(deps, params)
    context = deps.context(scope, surface="images", params=params, model=params.model, operation=Operation.IMAGE)
    work = Work(deps, scope, context, payload, unknown_fields(params), media)
    identity, facts = new_identity(deps.clock, "img", params.model), facts_of_request(params)
    if params.stream:
        return streamed(work, ImageStream(identity, facts, prefix))
    if deps.files is None or deps.links is None or params.response_format != "url":
        return unary(work, ImagesAnswer(identity, facts))
    keeping = kept_images(deps.files, context.tenant)
    link = partial(deps.links.link, deps.links.base_of(scope), context.tenant)
    return unary(replace(work, layers=(keeping,)), ImagesAnswer(identity, facts, link))


def _require_kept(deps: InferenceDeps, params: ImageRequest) -> None:
    """Raises UNSUPPORTED_OPERATION or INVALID_ARGUMENT if images cannot have URLs."""
    if deps.files is None or deps.links is None:
        message = "'url' is not available: this gateway stores no images; use b64_json"
        raise FieldError("response_format", message, Reason.UNSUPPORTED_OPERATION)
    if params.stream:
        raise invalid_field("response_format", "must be b64_json with 'stream': true")
