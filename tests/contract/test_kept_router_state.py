"""What a router knows besides requests, over restarts, on both kinds of databases: accounts, clients and figures."""

from datetime import timedelta

import pytest
from kept_router import KeptRouter

from router_svc.client_registry import ClientsConfig
from router_svc.policy.pool_settings import ClientProfile, RateLimitConfig
from weft.api.router.v1 import figures_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.units import Rate, RateUnit

pytest_plugins = ("database_fixtures",)


async def rows(router: KeptRouter, table: str) -> int:
    return int(await router.database.value(f"SELECT count(*) FROM {table}"))


def charge(router: KeptRouter, **costs: float) -> None:
    """Requests of these tenants, all at once, that cost so many tokens."""
    for tenant in costs:
        router.shares.enter(tenant)
    for tenant, cost in costs.items():
        router.shares.charge(tenant, cost)


class TestAccounts:
    async def test_fair_share_accounts_survive_a_kill(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        charge(router, ann=900.0, bob=100.0)
        await router.flush()
        again = await router.restarted()
        for tenant in ("ann", "bob"):
            again.shares.enter(tenant)
        assert again.shares.account("ann") - again.shares.account("bob") == 800.0
        await again.kill()
        # Negative control: a router with a database of its own has forgotten it.
        fresh = KeptRouter("sqlite://")
        await fresh.start()
        assert fresh.shares.known_account("ann") is None
        await fresh.kill()

    async def test_fair_share_accounts_decay_while_the_router_is_down(self, database_url: str) -> None:
        for away, left in ((0.0, 800.0), (300.0, 400.0), (600.0, 0.0), (10_000.0, 0.0)):
            router = await KeptRouter(database_url).start()
            charge(router, ann=900.0, bob=100.0)
            await router.flush()
            again = await router.restarted(after=away)
            for tenant in ("ann", "bob"):
                again.shares.enter(tenant)
            assert again.shares.account("ann") - again.shares.account("bob") == pytest.approx(left)
            await again.database.change("DELETE FROM fair_accounts")
            await again.kill()

    async def test_fair_share_accounts_survive_two_restarts_without_requests(self, database_url: str) -> None:
        """What the second process never changed is still counted from where the first one did."""
        router = await KeptRouter(database_url).start()
        charge(router, ann=5_000.0, bob=4_000.0, eve=4_500.0)
        await router.flush()
        second = await router.restarted()
        second.shares.enter("ann")
        second.shares.charge("ann", 100.0)
        await second.flush()
        third = await second.restarted()
        for tenant in ("ann", "bob", "eve"):
            third.shares.enter(tenant)
        lowest = third.shares.account("bob")
        assert [third.shares.account(name) - lowest for name in ("ann", "eve")] == [1_100.0, 500.0]
        await third.kill()

    async def test_restored_account_expires_if_its_tenant_does_not_return_in_time(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        charge(router, ann=900.0, bob=100.0)
        await router.flush()
        again = await router.restarted()
        again.shares.enter("ann")
        await again.clock.advance(31.0)
        await again.flush()
        again.shares.enter("bob")
        assert again.shares.account("bob") == again.shares.account("ann")
        await again.kill()

    async def test_next_leader_continues_the_accounts(self, postgres_url: str) -> None:
        alpha = await KeptRouter(postgres_url, "alpha").start()
        charge(alpha, ann=901.0, bob=1.0)
        await alpha.flush()
        await alpha.kill()
        beta = await KeptRouter(postgres_url, "beta").start()
        assert beta.shares.known_account("ann") == 900.0
        await beta.kill()


class TestClients:
    async def test_client_record_survives_a_restart_except_its_running_count(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        for number in range(3):
            router.chat(f"r-{number}", client_id="laptop")
            await router.clock.advance(10.0)
        router.arrive("r-9", client_id="laptop")
        [before] = router.records.clients.records()
        await router.flush()
        again = await router.restarted(after=60.0)
        [after] = again.records.clients.records()
        assert (before.running_count, after.running_count) == (1, 0)
        before.running_count = 0
        for field in ("first_seen_time", "last_seen_time"):
            gap = getattr(after, field).ToDatetime() - getattr(before, field).ToDatetime()
            assert abs(gap) < timedelta(milliseconds=1)
            getattr(after, field).CopyFrom(getattr(before, field))
        assert after == before
        assert (after.request_count, after.token_count) == (4, 24)
        await again.kill()

    async def test_cooldown_continues_after_a_restart_and_the_next_one_is_longer(self, database_url: str) -> None:
        profile = ClientProfile(
            rates=(Rate(1, 60, RateUnit.REQUESTS),), cooldown_after_refusals=2, cooldown_seconds=40.0
        )
        config = ClientsConfig(profiles={"laptop": profile})
        router = await KeptRouter(database_url).start()
        router.records.clients.reconfigure(config, RateLimitConfig())
        for number in range(4):
            try:
                router.chat(f"r-{number}", client_id="laptop")
            except WeftError:
                continue
        await router.flush()
        again = await router.restarted(after=15.0)
        again.records.clients.reconfigure(config, RateLimitConfig())
        with pytest.raises(WeftError, match="25 s more"):
            again.chat("r-5", client_id="laptop")
        await again.clock.advance(26.0)
        for number in range(3):
            try:
                again.chat(f"r-{number}", client_id="laptop")
            except WeftError as error:
                refusal = error
        with pytest.raises(WeftError, match="80 s more"):
            again.chat("r-6", client_id="laptop")
        assert refusal is not None
        await again.kill()

    async def test_stored_clients_are_limited_to_those_in_memory(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        for number in range(20):
            router.chat(f"r-{number}", client_id=f"client-{number:02}")
            await router.clock.advance(1.0)
            await router.flush()
        await router.service._state.sweep()
        assert await rows(router, "known_clients") == 8
        again = await router.restarted()
        known = [record.client_id for record in again.records.clients.records()]
        assert known == [f"client-{number:02}" for number in range(12, 20)]
        # The one that was seen first is forgotten first, as without a restart.
        again.chat("r-20", client_id="new")
        assert "client-12" not in {record.client_id for record in again.records.clients.records()}
        await again.kill()

    async def test_idle_clients_are_not_written(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        router.chat("r-1", client_id="laptop")
        await router.flush()
        assert router.records.clients.take_changed() == []
        router.chat("r-2", client_id="laptop")
        assert [kept.record.client_id for kept in router.records.clients.take_changed()] == ["laptop"]
        await router.kill()


def completed(figures: figures_pb2.Figures) -> list[int]:
    return list(figures.all.completed)


class TestFigures:
    async def test_metrics_of_the_last_hour_survive_a_kill(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        for number in range(30):
            router.records.figures.tally.note_load(number % 3, 1, router.clock.monotonic())
            router.chat(f"r-{number}", tenant="ann")
            await router.clock.advance(4.0)
        before = router.records.figures.figures()
        await router.flush()
        # Three steps away, on a machine whose own clock begins at another number.
        again = await router.restarted(after=30.0, monotonic=70.0)
        after = again.records.figures.figures()
        assert sum(completed(after)) == 30
        assert completed(before) == completed(after)[: before.step_count]
        assert list(before.waiting) == list(after.waiting)[: before.step_count]
        assert after.all.time_to_first_token.total_p50 == before.all.time_to_first_token.total_p50
        assert [model.model for model in after.models] == [model.model for model in before.models]
        assert abs(after.start_time.ToNanoseconds() - before.start_time.ToNanoseconds()) < 5 * 10**9
        # Meanwhile nothing was counted.
        assert completed(after)[before.step_count + 1 :] == [0] * (after.step_count - before.step_count - 1)
        await again.kill()

    async def test_metrics_step_spanning_two_processes_is_merged(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        router.chat("r-1")
        await router.flush()
        again = await router.restarted(after=1.0, monotonic=router.clock.monotonic() + 1.0)
        again.chat("r-2")
        await again.clock.advance(20.0)
        assert completed(again.records.figures.figures())[0] == 2
        await again.kill()

    async def test_steps_older_than_the_display_window_are_not_restored_and_deleted(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        router.chat("r-1")
        await router.flush()
        assert await rows(router, "figure_steps") == 2
        later = await router.restarted(after=2 * 3_600.0)
        assert sum(completed(later.records.figures.figures())) == 0
        await later.service._state.sweep()
        assert await rows(later, "figure_steps") == 1
        again = await later.restarted(after=24 * 3_600.0)
        await again.service._state.sweep()
        assert await rows(again, "figure_steps") == 0
        await again.kill()

    async def test_metrics_of_the_last_day_survive_a_kill(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        router.chat("r-1")
        await router.flush()
        again = await router.restarted(after=3 * 3_600.0, monotonic=70.0)
        day = again.records.figures.day
        assert day is not None
        figures = day.figures()
        assert (figures.step.seconds, figures.step_count, sum(completed(figures))) == (300, 36, 1)
        await again.kill()

    async def test_idle_router_writes_no_steps(self, database_url: str) -> None:
        router = await KeptRouter(database_url).start()
        await router.clock.advance(600.0)
        await router.flush()
        assert await rows(router, "figure_steps") == 0
        await router.kill()


async def test_further_turns_of_conversations_survive_a_kill(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    for number in range(1, 200):
        router.further_turns.note("chat", tuple(range(number)), float(number))
    known = router.further_turns.expected("chat")
    assert known > 6.0
    await router.flush()
    again = await router.restarted()
    assert again.further_turns.expected("chat") == known
    await again.kill()


async def test_failed_write_is_retried_with_the_next_write(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await KeptRouter(database_url).start()
    router.shares.enter("ann")
    router.chat("r-1", client_id="laptop")
    for number in (1, 2):
        router.further_turns.note("chat", tuple(range(number)), 0.0)
    with monkeypatch.context() as broken:
        broken.setattr(router.database, "run", _failing)
        with pytest.raises(WeftError):
            await router.service.flush_state()
    await router.flush()
    for table, count in (("fair_accounts", 1), ("known_clients", 1), ("further_turns", 1), ("figure_steps", 2)):
        assert await rows(router, table) == count
    await router.kill()


async def _failing(*_: object) -> None:
    raise WeftError(Reason.SERVICE_UNAVAILABLE, "away")
