"""The trials of `weft models tune`: loads of the model with other options, measured while no caller needs the machine.

A trial's engine takes the place of the model's engine, so its memory is leased as for any load. The model is loaded as
before whenever a caller comes, and at the end.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from runner_svc.policy.tuning import (
    Figures,
    Settings,
    Space,
    Trial,
    TrialEnd,
    TuningFacts,
    agreement,
    best_of,
    end_of,
    foreign_requests,
    is_faster,
    space_of,
)
from runner_svc.runtimes.table import built_in, find_runtime
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import new_id
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.operations import begin, follow, instance_of
from weft_app.cli.options import naming_fields
from weft_extensions.tune.tuning_search import TuningSearch

CLIENT_ID = "weft-tune"
POLL_SECONDS = 0.25
"""How often requests of callers are looked for."""
QUIET_SECONDS = 2.0
"""How long no caller may need the machine before a trial begins."""
COMPARISON_WAIT_SECONDS = 60.0
"""Maximum wait for callers before the comparison at the end."""
CALL_TIMEOUT_SECONDS = 600.0
"""Timeout of a measurement, and of an event of a load."""
MEASURED_PROMPT_TOKENS = 256
MEASURED_ANSWER_TOKENS = 48
REPEATS = 2
"""Measurements per trial; the fastest counts, as others were disturbed."""
SLOW_FACTOR = 1.5
"""A trial that is slower than the present settings by this factor is measured once."""
CONTINUATIONS = 24
"""Number of pieces of the text whose next token is compared."""
MAX_DETAIL_CHARS = 200
TEXT = (
    "The harbour town had grown along the river for three hundred years before the railway came. Ships brought timber, "
    "salt and wool, and took away the clocks that its workshops were known for. Every clock was tested for a month in "
    "a cold cellar and for another month beside an oven, because a clock that is only right in summer is of no use to "
    "a captain. When the bridge was finished in 1874, the first train carried forty of these clocks to the capital, "
    "packed in straw, and thirty-nine arrived in working order. The engineers measured the remaining one and found "
    "that a single screw had been tightened too far. They wrote a report of two pages, which is still kept in the "
    "library: it lists the temperature on each day of the journey, the speed of the train, the weight of the load and "
    "the names of the people who had touched the box. Since then, apprentices learn to write down what they did before "
    "they look for a reason. A good record, the masters say, is worth more than a good guess. "
)
"""The fixed text whose continuations are compared, and of which prompts are made."""
_NOT_OF_A_TRIAL = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.OPERATION_REFUSED, Reason.PERMISSION_DENIED})
"""Errors that end the search, because no settings would help."""


class CallerCame(Exception):  # noqa: N818 - not an error
    """A caller needs the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedModel:
    """The model to tune, as it was before the search."""

    name: str
    runner: str
    runtime: str
    options: Document
    """The options of its last load."""
    space: Space
    elsewhere: frozenset[str]
    """Models of other machines, whose requests do not matter."""
    was_loaded: bool

    @property
    def loaded_by_operation(self) -> bool:
        """Whether a load made it stay loaded; otherwise a request loaded it."""
        return "keepAlive" in self.options

    def options_with(self, settings: Settings) -> Document:
        """Returns its load options with other values of parameters."""
        return {**self.options, "parameters": {**self.options.get("parameters", {}), **settings}}


def find_model(api: MeshApi, name: str, vary: Sequence[str]) -> TunedModel:
    """Returns the model. Raises MODEL_NOT_FOUND, NO_RUNNER_AVAILABLE, UNSUPPORTED_OPERATION and INVALID_ARGUMENT."""
    instance, document = instance_of(api, name), api.document(ResourceKind.MODEL, name)
    runners = {each["name"]: each["status"] for each in api.documents(ResourceKind.RUNNER)}
    runner = document["status"]["runner"]
    runtime, host = runners[runner]["runtime"], runners[runner]["host"]
    descriptor = find_runtime(runtime)
    declared = () if descriptor is None else descriptor.tuned_parameters
    if not declared or "completion" not in document["operations"]:
        able = ", ".join(each.name for each in built_in() if each.tuned_parameters)
        what = f"models of {runtime}" if not declared else f"{name}, which completes no texts,"
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            f"{what} cannot be tuned; models that generate text with these runtimes can: {able}",
        )
    api.get("/v1/requests", limit=1, allTenants=True)  # a key without this right could not yield to callers
    parameters = instance.get("loadParameters", ())
    facts = TuningFacts(
        cpu_count=runners[runner].get("hostUse", {}).get("cpuCount", 1),
        has_accelerator=bool(document["status"].get("instance", {}).get("memory", {}).get("deviceIndexes")),
        embeds="embedding" in document["operations"],
        known=frozenset(each["name"] for each in parameters),
        configured={each["name"]: each["default"] for each in parameters if "default" in each},
    )
    with naming_fields(lambda _: "--vary"):
        space = space_of(declared, facts, vary)
    return TunedModel(
        name=name,
        runner=runner,
        runtime=runtime,
        options=instance.get("loadOptions", {}),
        space=space,
        elsewhere=frozenset(
            each["name"]
            for each in api.documents(ResourceKind.MODEL)
            if (other := runners.get(each["status"].get("runner", ""))) is not None and other["host"] != host
        ),
        was_loaded=document["status"].get("instance", {}).get("phase") == "ready",
    )


class CallerWatch(threading.Thread):
    """Looks for requests of callers, and stops what the search does when one comes."""

    def __init__(self, home: Path, client_id: str, elsewhere: frozenset[str]) -> None:
        super().__init__(name="tune-callers", daemon=True)
        self._home, self._client_id, self._elsewhere = home, client_id, elsewhere
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._stop_work: Callable[[MeshApi], None] | None = None
        self._last_call = time.monotonic()
        self.came = False
        """Whether a caller came during the current work."""

    def run(self) -> None:
        """Polls until `end`. Callers count as present while the mesh does not answer."""
        with connect(self._home) as api:
            while not self._ended.wait(POLL_SECONDS):
                try:
                    listed = api.get("/v1/requests", limit=100, allTenants=True)["items"]
                except WeftError:
                    self._last_call = time.monotonic()
                    continue
                if foreign_requests(listed, self._client_id, self._elsewhere):
                    self._last_call = time.monotonic()
                    self._interrupt(api)

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self.join()

    @contextmanager
    def stopping(self, stop_work: Callable[[MeshApi], None]) -> Iterator[None]:
        """Calls `stop_work` if a caller comes during the block. Raises CallerCame if one has come."""
        with self._lock:
            self._stop_work = stop_work
        try:
            self.require_none()
            yield
        except WeftError as error:
            if self.came:
                raise CallerCame from error
            raise
        finally:
            with self._lock:
                self._stop_work = None

    def require_none(self) -> None:
        """Raises CallerCame if a caller has come since the last wait."""
        if self.came:
            raise CallerCame

    def wait_for_idle(self, deadline: float) -> bool:
        """Waits until no caller needs the machine. Returns whether that was before the deadline."""
        while (now := time.monotonic()) < deadline:
            quiet = now - self._last_call
            if quiet >= QUIET_SECONDS:
                self.came = False
                return True
            self._ended.wait(min(QUIET_SECONDS - quiet, deadline - now))
        return False

    def _interrupt(self, api: MeshApi) -> None:
        with self._lock:
            self.came = True
            if self._stop_work is not None:
                with suppress(WeftError):
                    self._stop_work(api)
                self._stop_work = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """The result of a search."""

    model: TunedModel
    trials: Sequence[Trial]
    present: Trial | None = None
    """The present settings, measured once more at the end."""
    best: Trial | None = None
    """The best settings, measured once more at the end; None: none are clearly faster."""


class TuningRun:
    """One search for a model's settings."""

    def __init__(self, home: Path, model: TunedModel, search: TuningSearch, *, min_agreement: float) -> None:
        self._home, self._model, self._search = home, model, search
        self._min_agreement = min_agreement
        self._client_id = new_id(CLIENT_ID)
        self._watch = CallerWatch(home, self._client_id, model.elsewhere)
        self._continuations: Sequence[str] = ()
        self._load: tuple[Document, str] | None = None
        """The last load and its idempotency id; None: the model is loaded as it was before the search."""
        self.trials: list[Trial] = []
        """Trials so far."""

    def run(self, seconds: float, show: Callable[[Trial], None]) -> TuningReport:
        """Measures trials for this long, and loads the model as before; also after Ctrl-C and errors.

        Then the best settings and the present ones are measured once more.
        """
        deadline = time.monotonic() + seconds
        self._watch.start()
        try:
            self._search_until(deadline, show)
            return self._report()
        finally:
            self._watch.end()
            self._restore()

    def _search_until(self, deadline: float, show: Callable[[Trial], None]) -> None:
        longest = 0.0
        while time.monotonic() + longest < deadline and (settings := self._search.ask()) is not None:
            begun = time.monotonic()
            trial = self._tried(settings, deadline)
            if trial is None:
                return
            show(trial)
            self.trials.append(trial)
            if trial.end is TrialEnd.INTERRUPTED:
                self._search.retry()
                continue
            figures = trial.figures if trial.end is TrialEnd.MEASURED else None
            self._search.tell(settings, None if figures is None else figures.request_seconds)
            longest = max(longest, time.monotonic() - begun)

    def _report(self) -> TuningReport:
        done = [each for each in self.trials if each.end is not TrialEnd.INTERRUPTED]
        report = TuningReport(model=self._model, trials=self.trials)
        best = best_of(done)
        if best is None:
            return report
        deadline = time.monotonic() + COMPARISON_WAIT_SECONDS
        after, before = (self._tried(each.settings, deadline) for each in (best, done[0]))
        if after is None or before is None or TrialEnd.INTERRUPTED in (after.end, before.end):
            # A caller came: the figures of the search have to do.
            return replace(report, present=done[0], best=best)
        is_better = after.end is TrialEnd.MEASURED and is_faster(after, before)
        after, before = replace(after, number=best.number), replace(before, number=done[0].number)
        return replace(report, present=before, best=after if is_better else None)

    def _tried(self, settings: Settings, deadline: float) -> Trial | None:
        """Measures settings as soon as no caller needs the machine; None: callers needed it until the deadline."""
        if not self._watch.wait_for_idle(deadline):
            return None
        number = len(self.trials) + 1
        try:
            figures = self._measured(settings)
            self._watch.require_none()
        except CallerCame:
            self._restore()
            return Trial(number=number, settings=settings, end=TrialEnd.INTERRUPTED, detail="a caller came")
        except WeftError as error:
            if error.reason in _NOT_OF_A_TRIAL or not settings:
                raise
            end = TrialEnd.REFUSED if error.reason is Reason.INVALID_ARGUMENT else TrialEnd.FAILED
            return Trial(number=number, settings=settings, end=end, detail=error.message[:MAX_DETAIL_CHARS])
        return Trial(number=number, settings=settings, end=end_of(figures, self._min_agreement), figures=figures)

    def _measured(self, settings: Settings) -> Figures:
        with connect(self._home, CALL_TIMEOUT_SECONDS) as api:
            load_seconds = self._loaded(api, settings)
            found = [self._continuation(api, prompt) for prompt in _prefixes()]
            if not settings and not self._continuations:
                self._continuations = found
            speeds = self._repeated_speeds(api)
            memory = api.document(ResourceKind.MODEL, self._model.name)["status"].get("instance", {}).get("memory", {})
        return replace(
            speeds,
            memory_bytes=memory.get("leasedBytes") or memory.get("residentBytes", 0),
            load_seconds=load_seconds,
            agreement=agreement(self._continuations, found),
        )

    def _repeated_speeds(self, api: MeshApi) -> Figures:
        present = self.trials[0].figures if self.trials else None
        best = self._speeds(api)
        for _ in range(REPEATS - 1):
            if present is not None and best.request_seconds > SLOW_FACTOR * present.request_seconds:
                break
            best = min(best, self._speeds(api), key=lambda each: each.request_seconds)
        return best

    def _loaded(self, api: MeshApi, settings: Settings) -> float:
        action = {"type": "load", "model": self._model.name, "settings": self._model.options_with(settings)}
        self._load = action, new_id(CLIENT_ID)
        ended = _followed(api, *self._load)
        self._watch.require_none()
        return float(ended.get("result", {}).get("loadSeconds", 0.0))

    def _continuation(self, api: MeshApi, prompt: str) -> str:
        answer, _ = self._completed(api, prompt, 1)
        return str(answer["choices"][0]["text"])

    def _speeds(self, api: MeshApi) -> Figures:
        """Returns the speeds of one request. Raises UNSUPPORTED_OPERATION."""
        # The number at its beginning keeps every prompt out of the cache.
        prompt = f"{new_id('n')} {TEXT * 8}"[: MEASURED_PROMPT_TOKENS * 4]
        _, receipt = self._completed(api, prompt, MEASURED_ANSWER_TOKENS)
        timings = receipt.get("engineTimings", {})
        prefill, decode = timings.get("prefillSeconds", 0.0), timings.get("decodeSeconds", 0.0)
        processed = receipt.get("promptTokens", 0) - receipt.get("cachedPromptTokens", 0)
        generated = receipt.get("completionTokens", 0)
        if not (prefill and decode and processed > 0 and generated):
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{self._model.name} reports no tokens or times of requests")
        return Figures(
            prompt_tokens_per_second=processed / prefill,
            output_tokens_per_second=generated / decode,
        )

    def _completed(self, api: MeshApi, prompt: str, max_tokens: int) -> tuple[Document, Document]:
        """Returns the answer to a prompt, and its receipt."""
        request_id = new_id("req")
        body = {"model": self._model.name, "prompt": prompt, "max_tokens": max_tokens}
        greedy = {"temperature": 0, "ignore_eos": True}
        headers = {"X-Client-Id": self._client_id, "X-Priority": "low", "X-Request-Id": request_id}
        with self._watch.stopping(lambda other: other.post(f"/v1/requests/{request_id}/cancel", allTenants=True)):
            answer = api.post("/v1/completions", body | greedy, headers)
        return answer, api.get(f"/v1/requests/{request_id}", allTenants=True)["receipt"]

    def _restore(self) -> None:
        """Loads the model as it was before the search."""
        if self._load is None:
            return
        model = self._model
        with connect(self._home, CALL_TIMEOUT_SECONDS) as api:
            # It may go on after Ctrl-C, or even begin, and would end after what follows.
            with suppress(WeftError):
                _followed(api, *self._load)
            if model.was_loaded and model.loaded_by_operation:
                follow(api, begin(api, {"type": "load", "model": model.name, "settings": model.options}), shown=False)
            else:
                follow(api, begin(api, {"type": "unload", "model": model.name}), shown=False)
                if model.was_loaded:
                    # Only a request loads it as configured, keep-alive included.
                    body = {"model": model.name, "prompt": "a", "max_tokens": 1}
                    api.post("/v1/completions", body, {"X-Client-Id": self._client_id})
        self._load = None


def _followed(api: MeshApi, load: Document, request_id: str) -> Document:
    """Begins a load, unless it has begun with this id before, and follows it to its end. Raises its failure."""
    # It is not cancelled: that would fail the callers that wait for it.
    return follow(api, begin(api, load, request_id=request_id), shown=False, interrupted=lambda _: None)


def _prefixes() -> Sequence[str]:
    words = TEXT.split()
    step = len(words) // CONTINUATIONS
    return [" ".join(words[: step * number]) for number in range(1, CONTINUATIONS + 1)]
