"""Backend of the runtime comfyui: an external or started ComfyUI."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CallInfo, ExitReport, LoadOrder, not_offered
from runner_svc.memory.estimate import DeclaredForecast, manifest_bytes_of
from runner_svc.openai_upstream.address import base_url, require_known_location
from runner_svc.openai_upstream.client import OpenAiHttp
from runner_svc.openai_upstream.media import finished_frame, png_pixels
from runner_svc.openai_upstream.openai_request import warning_frame
from runner_svc.policy.parameters import ParameterWarning
from runner_svc.runtimes.engine_figures import with_sample_time
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from runner_svc.runtimes.placeholders import PORT, filled, placeholders_of
from runner_svc.runtimes.started_server import StartedServer, StartLog
from runner_svc.supervise.socket_folder import SocketFolder
from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2, usage_pb2, workflow_pb2
from weft.api.registry.v1 import runner_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.workflow_graph import (
    InputFile,
    InputValues,
    filled_graph,
    first_seed,
    input_values,
    to_canonical_workflow,
    with_seed,
)
from weft.documents.resource_kinds import ResourceKind
from weft.documents.yaml_documents import read_documents
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.media_types import image_type_of
from weft_extensions.comfyui import messages
from weft_extensions.comfyui.api import UPLOAD_FOLDER, ComfyApi, ComfyUnreachableError
from weft_extensions.comfyui.messages import OutputFile
from weft_extensions.comfyui.prompt_run import PromptRun, RunLimits, StepCounter, foreign_count
from weft_extensions.comfyui.runtime import FOLDERS, PARAMETERS, ComfyUiModel, check_template

MAX_FILE_BYTES = 1024 * 1024


def read_workflow(path: Path, where: str) -> workflow_pb2.Workflow:
    """Reads a workflow file. Raises INVALID_ARGUMENT naming `where`, the setting with the path."""
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
    if len(documents) != 1 or documents[0].kind is not ResourceKind.WORKFLOW:
        raise invalid_field(where, f"{path} must contain one document of kind workflow")
    workflow: workflow_pb2.Workflow = documents[0].declared.workflow
    to_canonical_workflow(workflow, where)
    return workflow


log = get_logger("weft.comfyui")

STATS = "/system_stats"
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 1.0
PROBE_SECONDS = 5.0
START_SECONDS = 600.0
"""Maximum start time of a busy process; `load_stall_seconds` limits the time without signs of work."""
LOAD_SAMPLE_SECONDS = 10.0
FREED_SLACK_BYTES = 512 * 1024 * 1024
"""Accelerator memory that ComfyUI may keep after its models are unloaded."""
MAX_DRAWN_SEED = 2**32

FOLDER_PREFIX = "weft-comfyui-"
_OK = 200
_Result = TypeVar("_Result")


class ComfyUiBackend(StartedServer[ComfyUiModel]):
    """Backend of one ComfyUI. Starts a process if the model has no `url`."""

    takes_workflows = True
    engine_parameters = PARAMETERS
    operations = frozenset({Operation.IMAGE})
    noun = "ComfyUI"
    needs_port = True
    health_path = STATS
    key_variable = ""

    def __init__(
        self,
        model: ComfyUiModel,
        context: ModelContext,
        command: Sequence[str],
        workflow: workflow_pb2.Workflow | None,
        limits: RunLimits | None = None,
    ) -> None:
        """`command` may contain placeholders; empty: external. `workflow`: for requests for the model by name."""
        super().__init__(model, replace(context, command=()))
        self.folder = None if model.working_folder is None else model.working_folder.expanduser()
        self._command = tuple(command)
        self._workflow = workflow
        self._limits = limits or RunLimits()
        self._api: ComfyApi | None = None
        self._clients: set[str] = set()
        self._folder: SocketFolder | None = None
        """Folder for its files; None: external."""
        self._free_before: int | None = None
        """Free accelerator memory before the first request, in bytes; None: unknown."""
        self._sampling: asyncio.Task[None] | None = None

    @property
    def is_attached(self) -> bool:
        """Whether the ComfyUI is external."""
        return self.model.url is not None

    @override
    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        # Checked first: a rejected order must not end a sleeping process.
        if order is not None and order.model_path is not None:
            raise invalid_field("quantization", "cannot be set: the workflow decides what ComfyUI loads")
        return await super().start(order)

    @override
    async def prepare(self, order: LoadOrder) -> None:
        if not self.is_attached:
            self._folder = SocketFolder(FOLDER_PREFIX, FOLDERS)

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        assert self._folder is not None, "it is prepared"
        values = {PORT: str(port), **{name: str(self._folder.path / name) for name in FOLDERS}}
        return [filled(word, values) for word in self._command]

    @override
    async def _healthy(self, order: LoadOrder) -> OpenAiHttp:
        """Raises CONNECT_FAILED if no ComfyUI responds at `url`."""
        if self.model.url is None:
            return await super()._healthy(order)
        self._http = http = OpenAiHttp(
            self.endpoint(self.model.url.rstrip("/"), ""), self.context.timeouts, self.explain_break
        )
        status = await http.status_of(STATS, PROBE_SECONDS)
        if status != _OK:
            found = "does not answer" if status is None else f"answers {STATS} with status {status}"
            raise WeftError(Reason.CONNECT_FAILED, f"the ComfyUI server of this model {found}")
        return http

    @override
    async def until_ready(self, http: OpenAiHttp, log: StartLog) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                await super().until_ready(http, log)
        except TimeoutError as error:
            raise WeftError(Reason.LOAD_STALLED, f"ComfyUI was not ready within {START_SECONDS:g} s") from error

    @override
    async def while_loading(self, awaited: Awaitable[_Result]) -> _Result:
        return await awaited if self.is_attached else await super().while_loading(awaited)

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        self._api = ComfyApi(
            http.endpoint.base_url,
            connect_seconds=self.context.timeouts.connect_seconds,
            max_message_bytes=self._limits.max_message_bytes,
            max_image_bytes=self._limits.max_image_bytes,
            verify=http.endpoint.verify,
        )
        self._free_before = await self._free_bytes()
        self._sampling = asyncio.create_task(self._sample())
        return BackendFacts(operations=self.operations, context_tokens=0, slots=self.model.slots)

    @override
    async def wait_exit(self) -> ExitReport:
        """See Backend.wait_exit; an external ComfyUI counts as ended after several consecutive failed probes."""
        if not self.is_attached:
            return await super().wait_exit()
        failures = 0
        while failures < self.context.probe_failures:
            await asyncio.sleep(self.context.probe_interval_seconds)
            failures = 0 if await self.responds(PROBE_SECONDS) else failures + 1
        return ExitReport(reason=Reason.CONNECT_FAILED, how="ComfyUI stopped answering")

    @override
    async def free_memory(self, http: OpenAiHttp, order: LoadOrder) -> bool:
        """See StartedServer.free_memory. False while other clients have prompts, which need the loaded models."""
        api = self._comfy()
        try:
            if foreign_count(await api.queue(), self._clients):
                log.info("the memory of ComfyUI is not freed: it has prompts of other clients", model=self.model.name)
                return False
            await api.free()
        except ComfyUnreachableError as error:
            raise WeftError(Reason.CONNECT_FAILED, "ComfyUI does not answer") from error
        is_free = await self._until_free()
        if not is_free:
            seconds = self._limits.free_seconds
            log.warning("ComfyUI did not free its memory in time", model=self.model.name, seconds=seconds)
        return is_free

    @override
    async def take_memory(self, http: OpenAiHttp) -> None:
        if not await self.responds(PROBE_SECONDS):
            raise WeftError(Reason.CONNECT_FAILED, "ComfyUI does not answer")
        self._free_before = await self._free_bytes()

    async def _until_free(self) -> bool:
        """Whether memory is freed within the configured time; ComfyUI responds before it frees it."""
        loop = asyncio.get_running_loop()
        ends_at, pause = loop.time() + self._limits.free_seconds, FIRST_PAUSE_SECONDS
        while True:
            free, before = await self._free_bytes(), self._free_before
            if free is None or (before is not None and free + FREED_SLACK_BYTES >= before):
                return True
            if loop.time() >= ends_at:
                return False
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    async def _free_bytes(self) -> int | None:
        """Returns the free memory of its accelerators; None: it has none, or does not report it."""
        if self._api is None:
            return None
        with suppress(ComfyUnreachableError, WeftError):
            devices = [each for each in await self._api.devices() if each.get("type") not in (None, "cpu")]
            free = [each.get("vram_free") for each in devices]
            if free and all(isinstance(each, int) for each in free):
                return sum(each for each in free if isinstance(each, int))
        return None

    async def _sample(self) -> None:
        """Samples the number of prompts, and how many belong to other clients."""
        while True:
            api = self._api
            self.figures.load = None
            if api is not None:
                with suppress(ComfyUnreachableError, WeftError):
                    queue = await api.queue()
                    running = sum(each.is_running for each in queue)
                    self.figures.load = runner_pb2.EngineLoad(
                        running_count=running,
                        waiting_count=len(queue) - running,
                        other_count=foreign_count(queue, self._clients),
                    )
                    if queue:
                        self.figures.load = with_sample_time(self.figures.load, time.time())
            await asyncio.sleep(LOAD_SAMPLE_SECONDS)

    async def stop(self) -> None:
        """See Backend.stop. An external ComfyUI keeps running."""
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        api, self._api = self._api, None
        try:
            if api is not None:
                await api.close()
        finally:
            await super().stop()
            folder, self._folder = self._folder, None
            if folder is not None:
                await asyncio.to_thread(folder.remove)

    @override
    def generate(self, payload: GenerationPayload, call: CallInfo) -> NoReturn:
        raise not_offered(Operation.CHAT)

    @override
    async def generate_images(self, payload: image_pb2.ImagePayload, call: CallInfo) -> AsyncGenerator[Frame]:
        workflow = call.workflow or self._workflow
        if workflow is None:
            message = f"{self.model.name} answers requests for workflows; ask for workflow/NAME (weft get workflows)"
            raise WeftError(Reason.UNSUPPORTED_OPERATION, message)
        values = input_values(workflow, payload)
        if warnings := _warnings(payload, values):
            yield warnings
        call = self.noting(call)
        uploads: dict[InputFile, str] = {}
        try:
            for file in values.files:
                part = payload.mask if file.index < 0 else payload.images[file.index]
                name = f"weft-{secrets.token_hex(12)}"
                uploads[file] = await self._asked(partial(self._comfy().upload, part, name))
            async with aclosing(self._made(workflow, payload, values, uploads, call)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            await self._remove_files("input", uploads.values())

    async def _made(
        self,
        workflow: workflow_pb2.Workflow,
        payload: image_pb2.ImagePayload,
        values: InputValues,
        uploads: Mapping[InputFile, str],
        call: CallInfo,
    ) -> AsyncGenerator[Frame]:
        """Yields the frames of all images: one prompt per image, with consecutive seeds."""
        count = payload.count if payload.HasField("count") else 1
        counter = StepCounter(image_count=count, previews_per_image=payload.partial_images)
        drawn = secrets.randbelow(MAX_DRAWN_SEED)
        pixels = made = 0
        for index in range(count):
            seeded = with_seed(workflow, values, index, drawn)
            graph = filled_graph(workflow, seeded, uploads.__getitem__)
            _name_files(graph, workflow.outputs)
            counter.begin(graph, index)
            run = PromptRun(self._comfy(), self._limits, self._clients, self.explain_break)
            async with aclosing(run.frames(graph, counter, call.on_prefill)) as frames:
                async for frame in frames:
                    yield frame
            images = await self._images(run, workflow.outputs)
            call.on_token()
            seed = first_seed(workflow, seeded)
            for data, media_type in images:
                pixels += png_pixels(data)
                part = chat_pb2.MediaPart(media_type=media_type, data=data)
                image = image_pb2.GeneratedImage(image=part, index=made, seed=seed)
                yield [event_pb2.InferenceEvent(image=image)]
                made += 1
        yield finished_frame(usage_pb2.Usage(image_steps=counter.steps, image_pixels=pixels))

    async def _images(self, run: PromptRun, outputs: Sequence[str]) -> list[tuple[bytes, str]]:
        """Returns the images of a finished prompt, and deletes its history and files.

        Raises OUT_OF_MEMORY or BACKEND_ERROR naming the failed node.
        """
        entry = await run.entry()
        files: list[OutputFile] = []
        try:
            if (error := messages.end_error(entry)) is not None:
                raise error
            files = messages.read_outputs(entry, outputs, self._limits.max_images)
            return [await self._image(file) for file in files]
        finally:
            await self._forget(run.prompt_id, files)

    async def _image(self, file: OutputFile) -> tuple[bytes, str]:
        data = await self._asked(lambda: self._comfy().view(file))
        media_type = image_type_of(data)
        if media_type is None:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "ComfyUI returned an image file of an unknown type")
        return data, media_type

    async def _forget(self, prompt_id: str, files: Sequence[OutputFile]) -> None:
        api = self._api
        with suppress(ComfyUnreachableError, WeftError):
            if api is not None:
                await api.forget(prompt_id)
        for place in ("output", "temp"):
            names = (f"{each.subfolder}/{each.name}" for each in files if each.place == place)
            await self._remove_files(place, names)

    async def _remove_files(self, place: str, names: Iterable[str]) -> None:
        """Deletes files of a ComfyUI that weft started with its own folders; an external one keeps its files."""
        folder = self._folder
        if folder is None:
            return
        root = folder.path / place
        await asyncio.to_thread(_remove, root, [root / name.lstrip("/") for name in names])

    async def _asked(self, call: Callable[[], Awaitable[_Result]]) -> _Result:
        """Returns the result of a call. Raises SERVER_DIED if ComfyUI does not respond."""
        try:
            return await call()
        except ComfyUnreachableError as error:
            gone = await self.explain_break()
            raise gone or WeftError(Reason.SERVER_DIED, "ComfyUI no longer responds") from error

    @override
    async def explain_break(self, reason: Reason | None = None) -> WeftError | None:
        return None if self.is_attached else await super().explain_break(reason)

    def _comfy(self) -> ComfyApi:
        if self._api is None:
            raise WeftError(Reason.BACKEND_NOT_READY, "the engine is not running")
        return self._api


def _name_files(graph: dict[str, Any], outputs: Sequence[str]) -> None:
    """Gives the files of output nodes unique names.

    A cached node would otherwise return names of files that may already be deleted.
    """
    for node in outputs:
        inputs = graph[node]["inputs"]
        if isinstance(inputs.get("filename_prefix"), str):
            inputs["filename_prefix"] = f"{UPLOAD_FOLDER}/{secrets.token_hex(12)}"


def _warnings(payload: image_pb2.ImagePayload, values: InputValues) -> Frame:
    """Returns warnings about request fields without effect."""
    ignored = [name for name in values.ignored if name != "prompt"]
    ignored += [name for name in ("quality", "output_format") if getattr(payload, name)]
    unused = "the workflow has no input for {}; it was not used"
    return warning_frame([ParameterWarning(field=name, message=unused.format(name)) for name in ignored])


def _remove(root: Path, files: Sequence[Path]) -> None:
    for file in files:
        with suppress(OSError):
            if file.resolve().is_relative_to(root.resolve()):
                file.unlink()


def build(model: ComfyUiModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    command = _checked_command(model, context)
    if model.url is not None:
        url = base_url(model.url, f"{context.where}.url")
        require_known_location(url, remote=model.remote, field=f"{context.where}.remote")
    workflow = None if model.workflow is None else read_workflow(model.workflow, f"{context.where}.workflow")
    return ModelEngine(
        make_backend=lambda: ComfyUiBackend(model, context, command, workflow),
        operations=frozenset({Operation.IMAGE}),
        slots=model.slots,
        forecast=DeclaredForecast(manifest_bytes_of(model.memory_mb)),
        remote=bool(model.remote),
        timeouts=context.timeouts,
        unload_keeps_process=model.url is not None,
    )


def _checked_command(model: ComfyUiModel, context: ModelContext) -> tuple[str, ...]:
    """Returns the command line with its placeholders; empty: external. Raises INVALID_ARGUMENT."""
    if model.url is not None:
        return ()
    command = model.command or tuple(context.command or ())
    if not command:
        raise context.refuse("url", "must be set, or command to the command line that starts ComfyUI")
    try:
        for word in command:
            check_template(word)
    except ValueError as error:
        raise context.refuse("command", str(error)) from None
    words = (*command, *model.extra_arguments)
    if PORT not in placeholders_of(words):
        raise context.refuse("command", "must contain {port}: weft chooses the port")
    folder = model.working_folder
    if folder is not None and not folder.expanduser().is_dir():
        raise context.refuse("working_folder", f"there is no folder {folder}")
    return words
