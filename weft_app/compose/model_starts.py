"""The start of a mesh's models: what each waits for, and when it is ready or has failed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from registry_svc.registry_service import RegistryService
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import FleetView, FleetWatcher
from weft.documents.left_out import left_out_items
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import MODEL_NOT_LISTED, PULLING, WAITING_FOR_PULL, Reason
from weft.kernel.time.clock import Clock
from weft_app.compose.demo import DEMO_NOT_PULLED, is_demo_source
from weft_app.compose.home import WeftHome
from weft_app.compose.mesh_runners import MeshRunners
from weft_app.config.runners import ConfiguredRunner

MODEL_CHECK_SECONDS = 0.05
MAX_SHOWN_MODELS = 5
"""Maximum number of a server's models in the line of its runner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of a start, for progress output."""

    name: str
    """Such as "services" or "smollm2-135m"."""
    detail: str
    done: bool = False
    is_warning: bool = False
    """Whether it ended with the warning in `detail`."""
    progress: float | None = None
    """Completed share, 0 to 1; None: unknown."""

    @property
    def text(self) -> str:
        """The step as text, such as "qwen: pulling on laptop (40 %)"."""
        share = "" if self.progress is None else f" ({round(self.progress * 100)} %)"
        return f"{self.name}: {self.detail}{share}"


ShowProgress = Callable[[Stage], None]


class ModelStarts:
    """The models of a mesh that starts, until each is ready or has failed for now."""

    def __init__(
        self,
        runners: Sequence[ConfiguredRunner],
        children: MeshRunners,
        registry: RegistryService,
        home: WeftHome,
        clock: Clock,
        *,
        requires_all: bool,
    ) -> None:
        """`requires_all`: whether the start fails if one model cannot be served."""
        self._runners = runners
        self._children = children
        self._registry = registry
        self._home = home
        self._clock = clock
        self._requires_all = requires_all
        self.listed: list[str] = []
        """The models of followed servers that were available at the start."""
        self.unusable = set[str]()
        """Configured models that did not load at the start or that their servers did not have."""

    async def until_ready(self, fleet: FleetWatcher, show: ShowProgress) -> None:
        """Waits until each model is ready or has failed for now. Raises LOAD_STALLED as `UpHost.start`."""
        waiting = {model.name: runner.name for runner in self._runners for model in runner.published_models}
        pulled: dict[str, Stage] = {}
        for model, runner in waiting.items():
            show(Stage(name=model, detail=f"loading on {runner}"))
        empty = {runner.name for runner in self._runners if not runner.models}
        expected, failures = len(waiting) + len(empty), list[str]()
        while waiting or empty:
            view = fleet.view
            for name in [name for name in empty if self._refusal(name)]:
                empty.remove(name)
                failures.append(f"runner {name} {self._refusal(name)}")
                show(Stage(name=name, detail=self._refusal(name), done=True, is_warning=True))
            empty = {name for name in empty if not await self._has_settled(view, name, show)}
            for model, runner in list(waiting.items()):
                failure, settled = self._failure(view, model, runner), self._settled(view, model, runner)
                if failure:
                    del waiting[model]
                    failures.append(failure if failure.startswith("runner ") else f"{model} {failure}")
                    self.unusable.add(model)
                    show(Stage(name=model, detail=failure, done=True, is_warning=True))
                elif settled is None:
                    pulling = pulling_stage(fleet.view, model, runner)
                    if pulling is not None and pulled.get(model) != pulling:
                        pulled[model] = pulling
                        show(pulling)
                else:
                    del waiting[model]
                    if settled.startswith(MODEL_NOT_LISTED):
                        self.unusable.add(model)
                    is_warning = settled.startswith((MODEL_NOT_LISTED, f"hibernating on {runner}: "))
                    show(Stage(name=model, detail=settled, done=True, is_warning=is_warning))
            if failures and (self._requires_all or len(failures) == expected):
                raise WeftError(Reason.LOAD_STALLED, failures[0])
            await self._clock.sleep(MODEL_CHECK_SECONDS)

    async def _has_settled(self, view: FleetView, runner_name: str, show: ShowProgress) -> bool:
        """Whether a runner that only follows a server is connected and serves the server's models."""
        runner = view.runners.get(runner_name)
        if runner is None or not runner.active:
            return False
        section = next((each for each in self._runners if each.name == runner_name and each.follows_server), None)
        if section is None:
            return True
        instances = runner.instances.values()
        if any(instance.phase == InstanceState.PHASE_LOADING for instance in instances):
            return False
        served = sorted(instance.model for instance in instances)
        self.listed += served
        left = f"left out: {left_out_items(runner.left_out)}" if runner.left_out else ""
        if served:
            detail = f"serves {counted_names(served)} of its server" + (f"; {left}" if left else "")
        elif left:
            detail = f"serves no model of its server; {left}"
        else:
            # Imported here: not needed if the server has models.
            from weft_app.compose.followed_servers import list_of_followed, why_none_served  # noqa: PLC0415

            # The runner does not report a reason.
            said = await list_of_followed(section)
            assert said is not None, "it follows a server"
            detail = why_none_served(said)
        show(Stage(name=runner_name, detail=detail, done=True, is_warning=bool(left) or not served))
        return True

    def _failure(self, view: FleetView, model: str, runner_name: str) -> str:
        """Returns why a model is not served for now, and where to read more; empty if nothing failed."""
        instance = _instance(view, model, runner_name)
        if self._refusal(runner_name):
            return f"runner {runner_name} {self._refusal(runner_name)}"
        runner = view.runners.get(runner_name)
        for item in () if runner is None else runner.left_out:
            if (item.kind, item.name) == ("model", model):
                return f"is not served: {item.message}"
        if instance is None or instance.detail.startswith(MODEL_NOT_LISTED):
            return ""  # its server is probed periodically
        if instance.phase in (InstanceState.PHASE_CRASH_LOOP, InstanceState.PHASE_FAILED):
            log = self._home.logs / f"runner-{runner_name}.log"
            return f"does not start on {runner_name}: {instance.detail}; see {log}"
        return ""

    def _refusal(self, runner_name: str) -> str:
        """Returns why a runner is not in the mesh, such as a name that is taken; empty: nothing refuses it."""
        refused = self._registry.refusal_of(runner_name)
        if refused:
            return f"is refused: {refused}"
        unstarted = self._children.refusal(runner_name)
        return f"does not start: {unstarted}" if unstarted else ""

    def _settled(self, view: FleetView, model: str, runner_name: str) -> str | None:
        """Returns the state of a model that admits requests or hibernates; None before."""
        instance = _instance(view, model, runner_name)
        if instance is None:
            return None
        if instance.detail.startswith(MODEL_NOT_LISTED):
            return instance.detail
        if instance.phase == InstanceState.PHASE_HIBERNATING:
            # `detail` is set if the load failed for lack of memory or a failed pull.
            not_pulled = f"; {DEMO_NOT_PULLED}" if instance.detail and is_demo_source(self._runners, model) else ""
            return f"hibernating on {runner_name}" + (f": {instance.detail}{not_pulled}" if instance.detail else "")
        return f"ready on {runner_name}" if instance.phase == InstanceState.PHASE_READY else None


def counted_names(names: Sequence[str]) -> str:
    """Returns models as text, such as "2 models (qwen, llama)"."""
    more = f" and {len(names) - MAX_SHOWN_MODELS} more" if len(names) > MAX_SHOWN_MODELS else ""
    return f"{len(names)} model{'' if len(names) == 1 else 's'} ({', '.join(names[:MAX_SHOWN_MODELS])}{more})"


def pulling_stage(view: FleetView, model: str, runner_name: str) -> Stage | None:
    """Returns the stage of a model that is being pulled; None: it is not, or unknown."""
    instance = _instance(view, model, runner_name)
    if instance is None or not instance.detail.startswith((PULLING, WAITING_FOR_PULL)):
        return None
    share = instance.load_progress if instance.HasField("load_progress") else None
    return Stage(name=model, detail=f"{instance.detail} on {runner_name}", progress=share)


def _instance(view: FleetView, model: str, runner_name: str) -> InstanceState | None:
    """Returns the state of a model on an active runner."""
    runner = view.runners.get(runner_name)
    return runner.instances.get(model) if runner is not None and runner.active else None
