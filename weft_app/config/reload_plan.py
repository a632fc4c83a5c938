"""Plans a reload: the differences between two configurations, and how each takes effect.

Pure. `weft_app.compose.reload` executes the plan.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.runtime_settings import ModelSettings
from weft.api.operations.v1.configuration_service_pb2 import ConfigurationChange, SettingChange
from weft_app.config.config import WeftConfig
from weft_app.config.loader import CONCEALED
from weft_app.config.settings_tree import is_section, plain_value, settings_of

MAX_VALUE_CHARS = 256
RUNNERS = "runners"
RUNNER, MODEL, AGENT, SETTING = "runner", "model", "agent", "setting"
_LISTS = {MODEL: "models", AGENT: "agents"}
"""Lists of a runner with items that are compared one by one."""

LIVE_SETTINGS: Mapping[str, bool] = MappingProxyType(
    {
        "gateway": True,
        # The listener is not reopened.
        "gateway.connections": False,
        "gateway.insecure": False,
        "gateway.tls": False,
        "gateway.tls_terminated_elsewhere": False,
        # The router's gRPC API uses it, too.
        "gateway.request_timeout_seconds": False,
        "registry.aliases": True,
        "router.clients": True,
        "router.multi_tenant": True,
        "router.rate_limits": True,
    }
)
"""Whether a running mesh applies a setting, by the longest prefix of its path. Others need a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """The differences, and the action for each runner."""

    changes: tuple[ConfigurationChange, ...] = ()

    @property
    def stopped(self) -> tuple[str, ...]:
        """Runners that are no longer configured."""
        return self._runners(ConfigurationChange.ACTION_REMOVED)

    @property
    def started(self) -> tuple[str, ...]:
        """New runners."""
        return self._runners(ConfigurationChange.ACTION_ADDED)

    @property
    def restarted(self) -> tuple[str, ...]:
        """Runners with changed settings."""
        return self._runners(ConfigurationChange.ACTION_CHANGED)

    @property
    def updated(self) -> tuple[str, ...]:
        """Runners with changed models or agents, which keep running."""
        whole = {*self.stopped, *self.started, *self.restarted}
        names = [change.runner for change in self.changes if change.kind in _LISTS and change.runner not in whole]
        return tuple(dict.fromkeys(names))

    def reloaded_models(self, runner: str) -> frozenset[str]:
        """Returns the models that a runner reloads with changed settings."""
        effect = ConfigurationChange.EFFECT_MODEL_RELOAD
        return frozenset(each.name for each in self.changes if each.runner == runner and each.effect == effect)

    @property
    def live_settings(self) -> tuple[str, ...]:
        """Changed settings that services apply without a restart."""
        return self._settings(ConfigurationChange.EFFECT_LIVE)

    @property
    def waiting_settings(self) -> tuple[str, ...]:
        """Changed settings that need a restart of the mesh."""
        return self._settings(ConfigurationChange.EFFECT_MESH_RESTART)

    def _runners(self, action: ConfigurationChange.Action.ValueType) -> tuple[str, ...]:
        return tuple(each.name for each in self.changes if each.kind == RUNNER and each.action == action)

    def _settings(self, effect: ConfigurationChange.Effect.ValueType) -> tuple[str, ...]:
        return tuple(each.name for each in self.changes if each.kind == SETTING and each.effect == effect)


def plan_reload(
    before: WeftConfig, after: WeftConfig, runners_before: Sequence[RunnerSettings], runners: Sequence[RunnerSettings]
) -> ReloadPlan:
    """Plans the change from the configuration in force to another one, each with its runners or the demo runner."""
    return ReloadPlan(changes=(*_runner_changes(runners_before, runners), *_setting_changes(before, after)))


def is_live(path: str) -> bool:
    """Whether a running mesh applies changes of a setting."""
    steps = path.split(".")
    beginnings = (".".join(steps[:count]) for count in range(len(steps), 0, -1))
    return next((LIVE_SETTINGS[each] for each in beginnings if each in LIVE_SETTINGS), False)


def plan_models(
    before: Sequence[ModelSettings], after: Sequence[ModelSettings]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the models that a runner withdraws, and new or changed ones; both with their replicas."""
    pairs = list(_pairs(before, after))
    gone = tuple(name for name, _, new in pairs if new is None)
    return gone, tuple(name for name, old, new in pairs if new is not None and old != new)


def _pairs(before: Iterable[Any], after: Iterable[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Pairs the items of two lists by name, removed ones first."""
    known, wanted = {item.name: item for item in before}, {item.name: item for item in after}
    for name in (*(name for name in known if name not in wanted), *wanted):
        yield name, known.get(name), wanted.get(name)


def _runner_changes(before: Sequence[RunnerSettings], after: Sequence[RunnerSettings]) -> Iterator[ConfigurationChange]:
    for name, old, new in _pairs(before, after):
        parts = list(_part_changes(name, old, new))
        if old is None or new is None:
            effect = ConfigurationChange.EFFECT_LIVE
            yield ConfigurationChange(kind=RUNNER, name=name, action=_action(old, new), effect=effect)
        else:
            own = list(_differences(old, new, without=_LISTS.values()))
            # The models of a followed server depend on the configured ones beside them.
            if not own and not (parts and (old.follows_server or new.follows_server)):
                yield from parts
                continue
            effect = ConfigurationChange.EFFECT_RUNNER_RESTART
            yield ConfigurationChange(kind=RUNNER, name=name, action=_action(old, new), effect=effect, settings=own)
        for part in parts:
            part.effect = effect
        yield from parts


def _part_changes(
    runner: str, before: RunnerSettings | None, after: RunnerSettings | None
) -> Iterator[ConfigurationChange]:
    """Yields the changed models and agents of a running runner."""
    for kind, setting in _LISTS.items():
        for name, old, new in _pairs(getattr(before, setting, ()), getattr(after, setting, ())):
            change = ConfigurationChange(kind=kind, name=name, runner=runner, action=_action(old, new))
            change.effect = ConfigurationChange.EFFECT_LIVE
            if old is not None and new is not None:
                if old == new:
                    continue
                change.settings.extend(_differences(old, new))
                if kind == MODEL:
                    change.effect = ConfigurationChange.EFFECT_MODEL_RELOAD
            yield change


def _action(before: object, after: object) -> ConfigurationChange.Action.ValueType:
    if after is None:
        return ConfigurationChange.ACTION_REMOVED
    return ConfigurationChange.ACTION_ADDED if before is None else ConfigurationChange.ACTION_CHANGED


def _differences(before: Any, after: Any, without: Collection[str] = ()) -> Iterator[SettingChange]:
    """Yields the settings that differ between two sections, which may be of different classes."""
    secrets = {each.name for section in (before, after) for each in settings_of(section.__class__) if each.is_secret}
    names = dict.fromkeys(field.name for kind in (before, after) for field in fields(kind))
    for name in names:
        old, new = getattr(before, name, None), getattr(after, name, None)
        if old != new and name not in without:
            yield _difference(name, old, new, is_secret=name in secrets)


def _setting_changes(before: WeftConfig, after: WeftConfig) -> Iterator[ConfigurationChange]:
    for setting in settings_of(WeftConfig):
        if setting.name != RUNNERS:
            old, new = getattr(before, setting.name), getattr(after, setting.name)
            yield from _changes_at(setting.name, old, new, is_secret=setting.is_secret)


def _changes_at(path: str, before: Any, after: Any, *, is_secret: bool) -> Iterator[ConfigurationChange]:
    if before == after:
        return
    if is_section(type(before)) and type(before) is type(after):
        for setting in settings_of(before.__class__):
            name = setting.name
            inner = getattr(before, name), getattr(after, name)
            yield from _changes_at(f"{path}.{name}", *inner, is_secret=setting.is_secret)
        return
    yield ConfigurationChange(
        kind=SETTING,
        name=path,
        action=ConfigurationChange.ACTION_CHANGED,
        effect=ConfigurationChange.EFFECT_LIVE if is_live(path) else ConfigurationChange.EFFECT_MESH_RESTART,
        settings=[_difference(path, before, after, is_secret=is_secret)],
    )


def _difference(name: str, before: Any, after: Any, *, is_secret: bool) -> SettingChange:
    return SettingChange(
        name=name, before=_shown(before, is_secret=is_secret), after=_shown(after, is_secret=is_secret)
    )


def _concealed(value: Any, *, is_secret: bool) -> Any:
    """Returns a value in the form of weft.yaml, with its secrets concealed and without unset values."""
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
