"""What a changed weft.yaml means for a mesh that runs: the differences, and how each takes effect.

Pure: from the configuration in force and the one of the file to a plan, which `weft_app.compose.reload` carries out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from runner_svc.runtimes.settings import ModelSettings
from runner_svc.settings import AgentSettings, RunnerSettings
from weft_app.config.config import WeftConfig
from weft_app.config.loader import CONCEALED
from weft_app.config.settings_tree import is_section, plain_value, settings_of

MAX_VALUE_CHARS = 256
RUNNERS = "runners"
_LISTS = frozenset({"models", "agents"})
"""The settings of a runner whose items are compared one by one."""


class Action(Enum):
    """What happened to the subject of a change; numbers as in ConfigurationChange.Action."""

    ADDED = 1
    REMOVED = 2
    CHANGED = 3


class Effect(Enum):
    """How a change takes effect; numbers as in ConfigurationChange.Effect."""

    LIVE = 1
    MODEL_RELOAD = 2
    RUNNER_RESTART = 3
    MESH_RESTART = 4


class Subject(Enum):
    """What a change is about."""

    RUNNER = "runner"
    MODEL = "model"
    AGENT = "agent"
    SETTING = "setting"


LIVE_SETTINGS: Mapping[str, bool] = MappingProxyType(
    {
        "gateway": True,
        # The listener is not opened again.
        "gateway.connections": False,
        "gateway.insecure": False,
        "gateway.tls": False,
        "gateway.tls_terminated_elsewhere": False,
        # The router's gRPC API has it, too.
        "gateway.request_timeout_seconds": False,
        "registry.aliases": True,
        "router.clients": True,
        "router.multi_tenant": True,
        "router.rate_limits": True,
    }
)
"""Whether a running mesh takes a setting, by the longest beginning of its path; what has none needs a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """A setting with another value."""

    name: str
    before: str
    """As JSON; empty: not set."""
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two configurations."""

    subject: Subject
    name: str
    action: Action
    effect: Effect
    runner: str = ""
    """The runner of a model or an agent."""
    settings: tuple[SettingDifference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """The differences, and what is to be done with each runner."""

    changes: tuple[Change, ...] = ()

    @property
    def stopped(self) -> tuple[str, ...]:
        """The runners that the file names no longer."""
        return self._runners(Action.REMOVED)

    @property
    def started(self) -> tuple[str, ...]:
        """The runners that are new."""
        return self._runners(Action.ADDED)

    @property
    def restarted(self) -> tuple[str, ...]:
        """The runners with changed settings."""
        return self._runners(Action.CHANGED)

    @property
    def updated(self) -> tuple[str, ...]:
        """The runners whose models or agents change while they run."""
        whole = {*self.stopped, *self.started, *self.restarted}
        parts = (Subject.MODEL, Subject.AGENT)
        names = [change.runner for change in self.changes if change.subject in parts and change.runner not in whole]
        return tuple(dict.fromkeys(names))

    def reloaded_models(self, runner: str) -> frozenset[str]:
        """Returns the models that a runner loads again with other settings."""
        return frozenset(
            each.name for each in self.changes if each.runner == runner and each.effect is Effect.MODEL_RELOAD
        )

    @property
    def live_settings(self) -> tuple[str, ...]:
        """The changed settings that services apply without a restart."""
        return self._settings(Effect.LIVE)

    @property
    def waiting_settings(self) -> tuple[str, ...]:
        """The settings that need a restart of the mesh."""
        return self._settings(Effect.MESH_RESTART)

    def _runners(self, action: Action) -> tuple[str, ...]:
        found = (each for each in self.changes if each.subject is Subject.RUNNER and each.action is action)
        return tuple(change.name for change in found)

    def _settings(self, effect: Effect) -> tuple[str, ...]:
        found = (each for each in self.changes if each.subject is Subject.SETTING and each.effect is effect)
        return tuple(change.name for change in found)


def plan_reload(
    before: WeftConfig, after: WeftConfig, runners_before: Sequence[RunnerSettings], runners: Sequence[RunnerSettings]
) -> ReloadPlan:
    """Returns the plan for a configuration in force and another one, each with its runners, the demo's included."""
    return ReloadPlan(changes=(*_runner_changes(runners_before, runners), *_setting_changes(before, after)))


def is_live(path: str) -> bool:
    """Whether a running mesh takes a setting that has another value."""
    steps = path.split(".")
    beginnings = (".".join(steps[:count]) for count in range(len(steps), 0, -1))
    return next((LIVE_SETTINGS[each] for each in beginnings if each in LIVE_SETTINGS), False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSteps:
    """What a runner does with its models, replicas included."""

    gone: tuple[str, ...]
    served: tuple[str, ...]
    """New ones, and those with other settings."""


def plan_models(before: Sequence[ModelSettings], after: Sequence[ModelSettings]) -> ModelSteps:
    """Returns the steps from the models of a runner to others; both with their replicas."""
    known, wanted = {model.name: model for model in before}, {model.name for model in after}
    # A model whose names are taken by others is gone before they come.
    return ModelSteps(
        gone=tuple(name for name in known if name not in wanted),
        served=tuple(model.name for model in after if known.get(model.name) != model),
    )


def _runner_changes(before: Sequence[RunnerSettings], after: Sequence[RunnerSettings]) -> Iterator[Change]:
    known, wanted = {runner.name: runner for runner in before}, {runner.name: runner for runner in after}
    for name, runner in known.items():
        if name not in wanted:
            yield Change(subject=Subject.RUNNER, name=name, action=Action.REMOVED, effect=Effect.LIVE)
            yield from _parts(runner, (), runner, Effect.LIVE)
    for name, runner in wanted.items():
        old = known.get(name)
        if old is None:
            yield Change(subject=Subject.RUNNER, name=name, action=Action.ADDED, effect=Effect.LIVE)
            yield from _parts(runner, runner, (), Effect.LIVE)
            continue
        own = tuple(_differences(old, runner, without=_LISTS))
        parts = tuple(_parts(runner, runner, old, None))
        # The models of a followed server depend on those that are configured beside them.
        if own or (parts and (old.follows_server or runner.follows_server)):
            restart = Effect.RUNNER_RESTART
            yield Change(subject=Subject.RUNNER, name=name, action=Action.CHANGED, effect=restart, settings=own)
            parts = tuple(replace(change, effect=restart) for change in parts)
        yield from parts


def _parts(
    runner: RunnerSettings, after: RunnerSettings | tuple[()], before: RunnerSettings | tuple[()], effect: Effect | None
) -> Iterator[Change]:
    """Yields the changes of the models and agents of a runner; `effect`: that of all, where the runner decides it."""
    models = _named_changes(runner, Subject.MODEL, _items(before, "models"), _items(after, "models"))
    agents = _named_changes(runner, Subject.AGENT, _items(before, "agents"), _items(after, "agents"))
    for change in (*models, *agents):
        yield change if effect is None else replace(change, effect=effect)


def _items(runner: RunnerSettings | tuple[()], name: str) -> Sequence[Any]:
    return () if isinstance(runner, tuple) else getattr(runner, name)


def _named_changes(
    runner: RunnerSettings,
    subject: Subject,
    before: Sequence[ModelSettings | AgentSettings],
    after: Sequence[ModelSettings | AgentSettings],
) -> Iterator[Change]:
    known, wanted = {item.name: item for item in before}, {item.name: item for item in after}
    for name in known:
        if name not in wanted:
            yield Change(subject=subject, name=name, runner=runner.name, action=Action.REMOVED, effect=Effect.LIVE)
    for name, item in wanted.items():
        old = known.get(name)
        if old is None:
            yield Change(subject=subject, name=name, runner=runner.name, action=Action.ADDED, effect=Effect.LIVE)
        elif old != item:
            yield Change(
                subject=subject,
                name=name,
                runner=runner.name,
                action=Action.CHANGED,
                effect=Effect.MODEL_RELOAD if subject is Subject.MODEL else Effect.LIVE,
                settings=tuple(_differences(old, item)),
            )


def _differences(before: Any, after: Any, without: frozenset[str] = frozenset()) -> Iterator[SettingDifference]:
    """Yields the settings of two sections that differ; those of other classes may have other settings."""
    secrets = {each.name for section in (before, after) for each in settings_of(section.__class__) if each.is_secret}
    names = dict.fromkeys(field.name for kind in (before, after) for field in fields(kind))
    for name in names:
        old, new = getattr(before, name, None), getattr(after, name, None)
        if name not in without and old != new:
            yield _difference(name, old, new, is_secret=name in secrets)


def _setting_changes(before: WeftConfig, after: WeftConfig) -> Iterator[Change]:
    for setting in settings_of(WeftConfig):
        if setting.name == RUNNERS:
            continue
        old, new = getattr(before, setting.name), getattr(after, setting.name)
        yield from _changes_at(setting.name, old, new, is_secret=setting.is_secret)


def _changes_at(path: str, before: Any, after: Any, *, is_secret: bool) -> Iterator[Change]:
    if before == after:
        return
    if is_section(type(before)) and type(before) is type(after):
        for setting in settings_of(before.__class__):
            name = setting.name
            inner = getattr(before, name), getattr(after, name)
            yield from _changes_at(f"{path}.{name}", *inner, is_secret=setting.is_secret)
        return
    yield Change(
        subject=Subject.SETTING,
        name=path,
        action=Action.CHANGED,
        effect=Effect.LIVE if is_live(path) else Effect.MESH_RESTART,
        settings=(_difference(path, before, after, is_secret=is_secret),),
    )


def _difference(name: str, before: Any, after: Any, *, is_secret: bool) -> SettingDifference:
    return SettingDifference(
        name=name, before=_shown(before, is_secret=is_secret), after=_shown(after, is_secret=is_secret)
    )


def _concealed(value: Any, *, is_secret: bool) -> Any:
    """Returns a value as weft.yaml would write it, with its secrets concealed; what is not set is left out."""
    if is_secret and value not in (None, (), {}):
        return CONCEALED
    if is_section(type(value)):
        inner = [(each, getattr(value, each.name)) for each in settings_of(value.__class__)]
        return {each.name: _concealed(item, is_secret=each.is_secret) for each, item in inner if item is not None}
    if isinstance(value, Mapping):
        return {str(key): _concealed(item, is_secret=False) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_concealed(item, is_secret=False) for item in value]
    return plain_value(value)


def _shown(value: Any, *, is_secret: bool) -> str:
    if value is None:
        return ""
    text = json.dumps(_concealed(value, is_secret=is_secret), ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
