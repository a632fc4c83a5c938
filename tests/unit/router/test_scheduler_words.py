"""What those who wait are told, and how often."""

from scheduler_harness import arrival, candidate, scheduler

from router_svc.policy.decisions import Decision, Served, Waits

TOOK = Served(prompt_tokens=100, cached_tokens=0, output_tokens=100)


def waits(decisions: list[Decision]) -> dict[int, Waits]:
    return {decision.key: decision for decision in decisions if isinstance(decision, Waits)}


def test_the_first_word_says_who_was_considered_and_later_ones_do_not() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    first = waits(mesh.submit(arrival(3), 0.0))[3]
    assert [(each.model, each.gate) for each in first.considered] == [("m", "all 1 slots are busy")]
    mesh.finish(1, 0.5)
    later = waits(mesh.tick(1.0))[3]
    assert (later.position, later.considered) == (1, ())


def test_one_tick_tells_no_more_than_so_many_and_the_next_ticks_tell_the_others() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=100, max_told_per_tick=10)
    for key in range(1, 42):
        mesh.submit(arrival(key), 0.0)
    mesh.finish(1, 0.5)
    rounds = [waits(mesh.tick(1.0 + quarter / 4)) for quarter in range(4)]
    assert [len(each) for each in rounds] == [10, 10, 10, 9]
    assert set().union(*rounds) == set(range(3, 42))


def test_nobody_is_told_more_than_once_per_interval_however_fast_the_queue_moves() -> None:
    mesh = scheduler(candidate(), queue_depth_per_runner=200)
    for key in range(1, 101):
        mesh.submit(arrival(key), 0.0)
    running, heard = 1, 0
    for step in range(1, 81):
        now = step / 16
        running += 1
        mesh.finish(running - 1, now)
        heard += 100 in waits(mesh.tick(now))
    assert heard == 5


def test_the_time_left_follows_measured_answers_and_then_the_pace_of_the_line() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=1e6)
    mesh.submit(arrival(1), 0.0)
    assert waits(mesh.submit(arrival(2), 0.0))[2].eta_seconds is None
    mesh.report_first_content(1, 1.0)
    mesh.finish(1, 10.0, TOOK)
    assert waits(mesh.submit(arrival(3, arrived_at=10.0), 10.0))[3].eta_seconds == 5.0
    for key in range(4, 7):
        mesh.submit(arrival(key, arrived_at=10.0), 10.0)
    for key in (2, 3, 4):
        mesh.finish(key, 10.0 * key, TOOK)
    told = waits(mesh.tick(41.0))[6]
    assert told.position == 1
    assert told.eta_seconds is not None
    assert 8.0 <= told.eta_seconds <= 16.0


def test_the_average_wait_of_a_line_is_that_of_those_who_were_placed_lately() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    (length,) = mesh.queues()
    assert (length.waiting, length.max_waiting, length.running, length.average_wait_seconds) == (1, 16, 1, 0.0)
    mesh.finish(1, 10.0)
    (length,) = mesh.queues()
    assert length.waiting == 0
    assert length.average_wait_seconds == 1.0, "a tenth of the newest wait, which was 10 s"
