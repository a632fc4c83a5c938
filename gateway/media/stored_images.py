"""Images of live requests that are answered by their addresses."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from weft.api.common.v1 import event_pb2, image_pb2
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.dispatch.call import Call, Layer, Proceed
from weft.dispatch.frames import Frame
from weft.durable.batches import MAX_PIECE_BYTES, RESULT, FilePort
from weft.durable.media import pieces_of
from weft.kernel.time_limit import store_answer


def kept_images(files: FilePort, tenant: str, timeout_seconds: float) -> Layer[Frame]:
    """Returns a layer that keeps images as results of tasks are, and passes on the ids of their files.

    The layer raises REQUEST_TOO_LARGE and TOO_MANY_RESOURCES as the bounds of `router.results` say.
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
        saving = files.save(new, pieces_of(image.image.data, MAX_PIECE_BYTES))
        file = await store_answer(timeout_seconds, saving, "file store", retry_after_seconds=2)
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
