"""The metrics of durable tasks."""

from prometheus_client import generate_latest

from router_svc.durable.task_metrics import add_task_metrics
from router_svc.durable.tasks.task_records import StateCount
from weft.kernel.telemetry.metrics_page import MetricsPage


def test_tasks_are_counted_by_state_with_the_age_of_the_oldest_open_one() -> None:
    page = MetricsPage()
    counts = {"pending": StateCount(3, 100.0), "running": StateCount(1, 170.0), "completed": StateCount(9)}
    released = {"count": 2, "bytes": 0}
    add_task_metrics(page, lambda: counts, lambda: released, lambda: 160.0)
    lines = generate_latest(page).decode().splitlines()
    assert 'weft_tasks{state="pending"} 3.0' in lines
    assert 'weft_tasks{state="completed"} 9.0' in lines
    assert 'weft_router_tasks_released_total{bound="count"} 2.0' in lines
    assert [line for line in lines if line.startswith("weft_oldest")] == [
        'weft_oldest_task_age_seconds{state="pending"} 60.0',
        # Clocks that differ make no negative age.
        'weft_oldest_task_age_seconds{state="running"} 0.0',
    ]
