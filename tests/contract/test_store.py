"""One suite that every SqlStore of the registry passes.

It lives here and not in `weft_testing.conformance`, because it speaks of the registry's own values and `weft` imports
no service.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest
import structlog
from kit.messages import changed
from kit.refusals import refused
from stored_values import (
    ELSEWHERE,
    LONGEST_PROMPT,
    NOW,
    TAGS,
    agent,
    declared_agent,
    declared_model,
    declared_route,
    join_token,
    mesh_settings,
    publication,
    stored,
    waking,
)

from registry_svc.mesh import store as mesh_store
from registry_svc.mesh.states import Standing
from registry_svc.mesh.store import SqlStore, StoredMesh, StoredPulse, StoredSession
from weft.api.registry.v1 import event_pb2
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.reasons import Reason

pytest_plugins = ("database_fixtures",)


async def loaded_sessions(store: SqlStore) -> list[StoredSession]:
    return list((await store.load()).sessions)


async def fill(store: SqlStore) -> StoredMesh:
    """Two of everything, and what that should read back as."""
    await store.save_session(stored("s1", "r1", ("m1", "m2"), ("a1",)))
    await store.save_session(stored("s2", "r2", ("m3",), ("a2", "a3")))
    documents = (
        declared_model("m1"),
        declared_model("m9"),
        declared_agent("a1"),
        declared_agent("a9"),
        declared_route("q1"),
        declared_route("q9", *(f"m{number}" for number in range(16))),
    )
    await store.save_documents(documents)
    await store.save_settings(mesh_settings())
    await store.save_join_token(join_token("t1"))
    await store.save_join_token(join_token("t2", None))
    return StoredMesh(
        sessions=(stored("s1", "r1", ("m1", "m2"), ("a1",)), stored("s2", "r2", ("m3",), ("a2", "a3"))),
        documents=documents,
        settings=mesh_settings(),
        join_tokens=(join_token("t1"), join_token("t2", None)),
    )


class StoreSuite:
    """What a SqlStore must do, on the fixture `store`: open, empty, closed afterwards."""

    async def test_empty_store_contains_nothing(self, store: SqlStore) -> None:
        assert await store.load() == StoredMesh()

    async def test_saved_state_round_trips(self, store: SqlStore) -> None:
        expected = await fill(store)
        assert await store.load() == expected

    async def test_newest_events_are_returned_in_order(self, store: SqlStore) -> None:
        first, second, third, again = (
            event_pb2.Event(sequence=number, name=name) for number, name in ((8, "a"), (9, "b"), (10, "c"), (10, "d"))
        )
        await store.save_events([first, second, third], 8)
        await store.save_events([again], 9)
        assert (await store.load()).events == (second, again)

    async def test_results_are_in_byte_order_regardless_of_the_collation(self, store: SqlStore) -> None:
        names = ("Zeta", "_z", "alpha", "b-1", "b.1", "b1")
        for number, name in enumerate(reversed(names)):
            await store.save_session(stored(f"s{number}", name, ()))
        await store.save_session(stored("s", "zz", tuple(reversed(names)), tuple(reversed(names))))
        makers = (declared_model, declared_agent, declared_route)
        await store.save_documents([make(name) for make in reversed(makers) for name in reversed(names)])
        for name in reversed(names):
            await store.save_join_token(join_token(name))
        mesh, expected = await store.load(), sorted(names)
        assert [each.profile.name for each in mesh.sessions] == [*expected, "zz"]
        assert [each.manifest.name for each in mesh.sessions[-1].publications] == expected
        assert [each.manifest.name for each in mesh.sessions[-1].agents] == expected
        assert mesh.documents == tuple(make(name) for make in makers for name in expected)
        assert [each.id for each in mesh.join_tokens] == expected

    async def test_saving_a_session_again_replaces_all_of_it(self, store: SqlStore) -> None:
        await store.save_session(stored(models=("m1", "m2"), agents=("a1", "a2")))
        renamed = stored(runner="r9", models=("m2", "m3"), agents=("a2", "a3"))
        await store.save_session(renamed)
        assert await loaded_sessions(store) == [renamed]

    async def test_models_and_agents_move_to_the_session_that_publishes_them_last(self, store: SqlStore) -> None:
        await store.save_session(stored("s1", "r1", ("m1", "m2"), ("a1", "a2")))
        await store.save_session(stored("s2", "r2", ("m2",), ("a2",)))
        assert await loaded_sessions(store) == [
            stored("s1", "r1", ("m1",), ("a1",)),
            stored("s2", "r2", ("m2",), ("a2",)),
        ]

    async def test_evicted_session_is_deleted_with_all_its_rows(self, store: SqlStore) -> None:
        await store.save_session(stored("s1", "r1", ("m1", "m2"), ("a1",)))
        await store.save_session(stored("s2", "r1", ("m2",)), evicted=["s1", "never-there"])
        assert await loaded_sessions(store) == [stored("s2", "r1", ("m2",))]

    async def test_session_of_a_failed_write_does_not_block_its_runner_name(self, store: SqlStore) -> None:
        await store.save_session(stored("lost", "r1", ("m1", "m2"), ("a1",)))
        await store.save_session(stored("s2", "r1", ("m1",)))
        assert await loaded_sessions(store) == [stored("s2", "r1", ("m1",))]

    async def test_rejected_session_changes_nothing(self, store: SqlStore) -> None:
        before = await fill(store)
        # One agent twice: the last of several statements fails.
        with refused(Reason.SERVICE_UNAVAILABLE):
            await store.save_session(stored("s2", "r1", ("m1", "m2"), ("a1", "a1")))
        assert await store.load() == before

    async def test_rejected_declarations_change_nothing(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        before = await fill(store)
        # No row has no owner: the last of several statements fails.
        monkeypatch.setattr(mesh_store, "owner_of", lambda record: None if record.manifest.name == "m5" else "")
        with refused(Reason.SERVICE_UNAVAILABLE):
            await store.save_documents(
                [declared_model("m1", "other"), declared_model("m5")], [(ResourceKind.AGENT, "a9")]
            )
        assert await store.load() == before

    async def test_documents_are_replaced_and_deleted_by_name(self, store: SqlStore) -> None:
        await store.save_documents([declared_route("q1"), declared_route("q2")])
        manifest = changed(declared_route("q1").manifest, budget=None, keep_alive=None, pin_primary=False)
        bare = changed(declared_route("q1"), manifest=manifest)
        await store.save_documents([bare], [(ResourceKind.ROUTE, "q2"), (ResourceKind.ROUTE, "never-there")])
        assert (await store.load()).documents == (bare,)
        await store.delete_documents([(ResourceKind.MODEL, "q1"), (ResourceKind.AGENT, "q1")])
        assert (await store.load()).documents == (bare,)
        await store.delete_documents([(ResourceKind.ROUTE, "q1")])
        assert (await store.load()).documents == ()

    async def test_rows_contain_the_revision_and_owner_of_a_document(self, store: SqlStore) -> None:
        await store.save_documents([declared_model("m1"), declared_route("q1")])
        await store.save_documents([declared_model("m1", "r7")])
        rows = await store.read(lambda tx: tx.rows("SELECT kind, name, revision, owner FROM documents ORDER BY kind"))
        assert [tuple(row) for row in rows] == [("model", "m1", 2, TAGS.owner), ("route", "q1", 1, "")]

    async def test_damaged_document_loses_only_itself(self, store: SqlStore) -> None:
        await store.save_documents([declared_model("m1"), declared_model("m2")])
        await store.run(
            lambda tx: tx.execute("UPDATE documents SET document = :bytes WHERE name = 'm1'", bytes=b"\xff")
        )
        with structlog.testing.capture_logs() as logs:
            mesh = await store.load()
        assert mesh.documents == (declared_model("m2"),)
        assert [(entry["kind"], entry["name"]) for entry in logs] == [("model", "m1")]

    async def test_documents_of_a_removed_kind_stay_and_are_named(self, store: SqlStore) -> None:
        rows = [{"kind": "profile", "name": name, "revision": 1, "owner": "", "document": b"x"} for name in ("b", "a")]
        await store.run(lambda tx: tx.insert("documents", *rows))
        await store.save_documents([declared_model("m1")])
        for _ in range(2):
            mesh = await store.load()
            assert mesh.documents == (declared_model("m1"),)
            (message,) = mesh.removed
            assert message.startswith("profiles were removed; use: weft apply -f FILE")
            assert message.endswith("Stored and not used: profile/a, profile/b")

    async def test_settings_are_one_row_and_a_save_replaces_them(self, store: SqlStore) -> None:
        assert (await store.load()).settings is None
        for revision in (1, 2, 3):
            await store.save_settings(mesh_settings(revision))
            assert (await store.load()).settings == mesh_settings(revision)

    async def test_model_with_unknown_skills_round_trips(self, store: SqlStore) -> None:
        plain = declared_model("m1")
        unknown = changed(plain, manifest=changed(plain.manifest, skills=None))
        await store.save_documents([unknown])
        assert (await store.load()).documents == (unknown,)

    async def test_runner_can_publish_nothing(self, store: SqlStore) -> None:
        await store.save_session(stored(models=()))
        assert await loaded_sessions(store) == [stored(models=())]

    @pytest.mark.slow("5,000 rows")
    async def test_more_rows_than_one_statement_allows_are_saved(self, store: SqlStore) -> None:
        names = tuple(f"n{number:05}" for number in range(2500))
        await store.save_session(stored(models=names, agents=names))
        await store.save_session(stored(models=names[:2400], agents=names[:2300]))
        (loaded,) = await loaded_sessions(store)
        assert (len(loaded.publications), len(loaded.agents)) == (2400, 2300)
        await store.delete_documents([(ResourceKind.MODEL, name) for name in names[:2399]])
        await store.delete_documents([(ResourceKind.AGENT, name) for name in names[:2299]])
        assert await loaded_sessions(store) == [stored(models=("n02399",), agents=("n02299",))]

    async def test_saving_pulses_changes_nothing_else(self, store: SqlStore) -> None:
        before = await fill(store)
        pulse = StoredPulse(
            runner="r1", standing=Standing.CLOSED, last_heartbeat_at=NOW + timedelta(seconds=5), inactive_since=NOW
        )
        await store.save_pulses([pulse, replace(pulse, runner="never-there")])
        first, second = before.sessions
        assert await store.load() == replace(before, sessions=(replace(first, pulse=pulse), second))

    async def test_pulse_can_return_to_active(self, store: SqlStore) -> None:
        await store.save_session(stored())
        active = stored().pulse
        await store.save_pulses([replace(active, standing=Standing.SILENT, inactive_since=NOW)])
        await store.save_pulses([active])
        assert await loaded_sessions(store) == [stored()]

    async def test_empty_write_is_a_no_op(self, store: SqlStore) -> None:
        before = await fill(store)
        await store.save_pulses([])
        await store.delete_sessions([])
        await store.save_documents([])
        await store.delete_documents([])
        assert await store.load() == before

    async def test_deleting_sessions_deletes_their_rows_and_keeps_declarations(self, store: SqlStore) -> None:
        before = await fill(store)
        await store.delete_sessions(["s1", "never-there"])
        assert await store.load() == replace(before, sessions=before.sessions[1:])

    async def test_saving_a_session_keeps_declarations_with_its_names(self, store: SqlStore) -> None:
        before = await fill(store)
        await store.save_session(stored("s1", "r1", ("m9",), ("a9",)))
        assert await store.load() == replace(
            before, sessions=(stored("s1", "r1", ("m9",), ("a9",)), before.sessions[1])
        )

    async def test_saving_a_declaration_keeps_published_rows_with_its_name(self, store: SqlStore) -> None:
        before = await fill(store)
        changed_model, changed_agent = declared_model("m1", "r7"), declared_agent("a1", "m7")
        await store.save_documents([changed_model, declared_model("m3"), changed_agent])
        declared = (changed_model, declared_model("m3"), declared_model("m9"), changed_agent, *before.documents[3:])
        assert await store.load() == replace(before, documents=declared)

    async def test_deleted_declared_and_published_documents_are_gone(self, store: SqlStore) -> None:
        before = await fill(store)
        kinds = ((ResourceKind.MODEL, "m1"), (ResourceKind.AGENT, "a1"))
        await store.delete_documents([*kinds, *((kind, "never-there") for kind, _ in kinds)])
        assert await store.load() == replace(
            before,
            sessions=(stored("s1", "r1", ("m2",)), before.sessions[1]),
            documents=(declared_model("m9"), declared_agent("a9"), *before.documents[4:]),
        )

    async def test_agents_do_not_block_deleting_the_models_they_pin(self, store: SqlStore) -> None:
        await store.save_session(stored("s1", "r1", ("m1",)))
        await store.save_session(stored("s2", "r2", (), ("a1",)))
        await store.save_documents([declared_agent("a9", "m1")])
        await store.delete_documents([(ResourceKind.MODEL, "m1")])
        mesh = await store.load()
        assert mesh.sessions == (stored("s1", "r1", ()), stored("s2", "r2", (), ("a1",)))
        assert mesh.documents == (declared_agent("a9", "m1"),)

    async def test_token_is_replaced_by_id_and_deleted_on_request(self, store: SqlStore) -> None:
        before = await fill(store)
        await store.save_join_token(join_token("t1", None))
        assert (await store.load()).join_tokens == (join_token("t1", None), join_token("t2", None))
        await store.delete_join_token("t1")
        await store.delete_join_token("never-there")
        assert await store.load() == replace(before, join_tokens=(join_token("t2", None),))

    async def test_wake_plans_of_published_models_round_trip(self, store: SqlStore) -> None:
        sleepy = replace(stored(), publications=(publication("m1", wake=waking()), publication("m2")))
        await store.save_session(sleepy)
        assert await loaded_sessions(store) == [sleepy]

    async def test_longest_prompts_round_trip(self, store: SqlStore) -> None:
        assert len(LONGEST_PROMPT) == 65_536
        published = agent("a1")
        published = changed(published, manifest=changed(published.manifest, system_prompt=LONGEST_PROMPT))
        declared = changed(declared_agent("a2"), manifest=changed(published.manifest, name="a2"))
        await store.save_session(replace(stored(), agents=(published,)))
        await store.save_documents([declared])
        mesh = await store.load()
        assert mesh.sessions[0].agents == (published,)
        assert mesh.documents == (declared,)

    async def test_times_round_trip_in_utc_to_the_microsecond(self, store: SqlStore) -> None:
        pulse = replace(stored().pulse, last_heartbeat_at=NOW.astimezone(ELSEWHERE))
        await store.save_session(replace(stored(), pulse=pulse))
        await store.save_join_token(join_token("t1", NOW.astimezone(ELSEWHERE)))
        mesh = await store.load()
        for moment in (mesh.sessions[0].pulse.last_heartbeat_at, mesh.join_tokens[0].expires_at):
            assert moment == NOW
            assert moment.utcoffset() == timedelta(0)


class TestSqliteInMemory(StoreSuite):
    @pytest.fixture
    async def store(self) -> AsyncIterator[SqlStore]:
        store = SqlStore("sqlite://")
        await store.open()
        yield store
        await store.close()


class TestEveryDatabase(StoreSuite):
    """On the plugin's `store`, once per kind of database that is kept."""
