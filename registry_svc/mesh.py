"""The mesh in memory: every session, runner and model, and what each step changes for those who watch.

Plain bookkeeping: no awaiting, no clock, no storage. The roster decides, this remembers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from registry_svc.domain import (
    Capability,
    Change,
    Model,
    ModelChanged,
    ModelDeleted,
    Publication,
    Runner,
    RunnerChanged,
    RunnerDeleted,
    RunnerProfile,
    Session,
)
from registry_svc.policy.liveness import Pulse
from registry_svc.policy.sessions import Holder


@dataclass(slots=True, kw_only=True)
class Member:
    """One session with its runner and models. Changed only by the mesh and, under its turn, the roster."""

    session: Session
    profile: RunnerProfile
    pulse: Pulse
    last_heartbeat_at: datetime
    capability: Capability = field(default_factory=Capability)
    sequence: int | None = None
    """Newest heartbeat of this incarnation; None before the first one."""
    publications: dict[str, Publication] = field(default_factory=dict)
    saved_pulse: Pulse | None = None
    """What the store knows; None: nothing worth keeping."""

    def runner(self) -> Runner:
        """The runner as the mesh sees it."""
        return Runner(
            profile=self.profile,
            active=self.pulse.active,
            capability=self.capability,
            last_heartbeat_at=self.last_heartbeat_at,
            ticket_key=self.session.ticket_key,
        )

    def models(self) -> list[Model]:
        """Its models as the mesh sees them."""
        return [Model(publication=each, active=self.pulse.active) for each in self.publications.values()]

    def as_holder(self) -> Holder:
        """Itself, as the session policy sees it."""
        return Holder(session=self.session, live=self.pulse.active)

    def all_changed(self) -> list[Change]:
        """The changes that tell everything about it anew, the runner first: models refer to it."""
        return [RunnerChanged(self.runner()), *(ModelChanged(model) for model in self.models())]


class Mesh:
    """Members by session, by runner and by model."""

    def __init__(self) -> None:
        self._by_session: dict[str, Member] = {}
        self._by_runner: dict[str, Member] = {}
        self._by_model: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self._by_runner)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_runner.values())

    def of_session(self, session_id: str) -> Member | None:
        """The member with this session."""
        return self._by_session.get(session_id)

    def of_runner(self, name: str) -> Member | None:
        """The member whose runner is called so."""
        return self._by_runner.get(name)

    def model_holders(self, names: Iterable[str]) -> Mapping[str, Holder]:
        """Who holds each of these models; those that nobody holds are left out."""
        return {name: self._by_model[name].as_holder() for name in names if name in self._by_model}

    def runner_names(self) -> Iterable[str]:
        """The names of all runners."""
        return self._by_runner.keys()

    def model_names(self) -> Iterable[str]:
        """The names of all models."""
        return self._by_model.keys()

    def model(self, name: str) -> Model | None:
        """The model of this name."""
        member = self._by_model.get(name)
        return None if member is None else Model(publication=member.publications[name], active=member.pulse.active)

    def install(self, member: Member, evicted: Iterable[str] = ()) -> list[Change]:
        """Put `member` in place of the earlier life of its session and of the sessions `evicted` (by id).

        Its models leave whoever held them. Returns what changed, deletions first.
        """
        gone_runners, gone_models = set[str](), set[str]()
        for session_id in (member.session.id, *evicted):
            earlier = self._by_session.get(session_id)
            if earlier is not None:
                self._remove(earlier)
                gone_runners.add(earlier.profile.name)
                gone_models.update(earlier.publications)
        for name in member.publications:
            holder = self._by_model.get(name)
            if holder is not None:
                del holder.publications[name]
        self._add(member)
        deleted: list[Change] = [ModelDeleted(name) for name in sorted(gone_models - member.publications.keys())]
        deleted += [RunnerDeleted(name) for name in sorted(gone_runners - {member.profile.name})]
        return deleted + member.all_changed()

    def forget(self, member: Member) -> list[Change]:
        """Remove `member`; returns what changed."""
        self._remove(member)
        return [*(ModelDeleted(name) for name in member.publications), RunnerDeleted(member.profile.name)]

    def _add(self, member: Member) -> None:
        self._by_session[member.session.id] = member
        self._by_runner[member.profile.name] = member
        for name in member.publications:
            self._by_model[name] = member

    def _remove(self, member: Member) -> None:
        del self._by_session[member.session.id]
        del self._by_runner[member.profile.name]
        for name in member.publications:
            del self._by_model[name]
