"""What a watcher of all tasks of a tenant notes of the events of the router."""

import pytest

from router_svc.durable.tasks import tenant_watch
from router_svc.durable.tasks.task_records import Lane, LaneFilled, ManyChanged, TaskChanged, TasksPurged
from router_svc.durable.tasks.tenant_watch import ChangedTasks
from weft.kernel.requests.request_values import Priority


def test_changes_of_one_task_are_coalesced_until_taken() -> None:
    changed = ChangedTasks()
    for _ in range(3):
        changed.note(TaskChanged("a"))
    changed.note(TaskChanged("b"))
    assert changed.event.is_set()
    assert changed.take(10) == (["a", "b"], False)
    assert not changed.event.is_set()


def test_changes_not_taken_in_one_round_are_left_for_the_next() -> None:
    changed = ChangedTasks()
    for name in "abc":
        changed.note(TaskChanged(name))
    assert changed.take(2) == (["a", "b"], False)
    assert changed.event.is_set()
    assert changed.take(2) == (["c"], False)


@pytest.mark.parametrize("event", [ManyChanged(), LaneFilled(Lane("m", "ann", Priority.NORMAL))])
def test_event_without_an_id_triggers_a_read_of_the_newest_page(event: ManyChanged | LaneFilled) -> None:
    changed = ChangedTasks()
    changed.note(event)
    assert changed.take(10) == ([], True)
    assert changed.take(10) == ([], False)


def test_purged_tasks_count_as_changed_only_if_the_watcher_has_them() -> None:
    changed = ChangedTasks({"a", "c"}.__contains__)
    changed.note(TasksPurged(["a", "b"]))
    assert changed.take(10) == (["a"], False)


def test_changes_beyond_the_bound_trigger_a_page_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_watch, "MAX_CHANGED", 2)
    changed = ChangedTasks()
    for name in "abc":
        changed.note(TaskChanged(name))
    assert changed.take(10) == (["a", "b"], True)
