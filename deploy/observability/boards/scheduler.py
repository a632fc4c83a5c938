"""The board Scheduler: queues, waits by reason, grants, refusals, swaps and fairness."""

from boards.board import RATE, Board, Panel, Query, Section, Unit, View, quantile, rate_by

_QUEUES = Section(
    "Queues",
    (
        Panel(
            title="Waiting",
            about="Waiting requests by pool or route. At the limit new ones are refused: queue_full.",
            unit=Unit.NUMBER,
            queries=(Query("sum by (pool) (weft_router_waiting)", "{{pool}}"),),
        ),
        Panel(
            title="Running",
            about="Requests that hold a slot, by pool or route.",
            unit=Unit.NUMBER,
            queries=(Query("sum by (pool) (weft_router_running)", "{{pool}}"),),
        ),
        Panel(
            title="Use of the queues",
            about="Waiting requests as a share of the limit (router.queue_depth_per_runner).",
            unit=Unit.SHARE,
            queries=(Query("weft_router_waiting / (weft_router_max_waiting > 0)", "{{pool}}"),),
        ),
    ),
)

_WAITS = Section(
    "Waits",
    (
        Panel(
            title="Waits by reason",
            about="What requests waited for: a slot, their tenant's share, memory, a load, a model that yields.",
            unit=Unit.PER_SECOND,
            view=View.AREAS,
            width=12,
            queries=(Query(rate_by("weft_router_waits_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            title="Waits by model",
            about="Waits for anything, by the model asked for.",
            unit=Unit.PER_SECOND,
            view=View.AREAS,
            width=12,
            queries=(Query(rate_by("weft_router_waits_total", "model"), "{{model}}"),),
        ),
        Panel(
            title="Wait for a slot, p95",
            about="From arrival to the grant of a slot, loads not counted. More slots or replicas shorten it.",
            unit=Unit.SECONDS,
            queries=(Query(quantile(0.95, "weft_router_queue_wait_seconds", "model"), "{{model}}"),),
        ),
        Panel(
            title="Wait for a load, p95",
            about="Of requests that waited for a model to load. Frequent loads of one model: pin it, or add memory.",
            unit=Unit.SECONDS,
            queries=(Query(quantile(0.95, "weft_router_load_wait_seconds", "model"), "{{model}}"),),
        ),
        Panel(
            title="Requests that waited for a load",
            about="Per second, by model.",
            unit=Unit.PER_SECOND,
            queries=(Query(rate_by("weft_router_load_wait_seconds_count", "model"), "{{model}}"),),
        ),
    ),
)

_DECISIONS = Section(
    "Decisions",
    (
        Panel(
            title="Grants by priority",
            about="Slots granted, by priority.",
            unit=Unit.PER_SECOND,
            view=View.AREAS,
            queries=(Query(rate_by("weft_router_grants_total", "priority"), "{{priority}}"),),
        ),
        Panel(
            title="Refusals by reason",
            about="Requests that the scheduler or a rate refused.",
            unit=Unit.PER_SECOND,
            view=View.AREAS,
            queries=(Query(rate_by("weft_router_refusals_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            title="Wakes and loads",
            about="Loads and wakes that waiting requests caused, and those that failed.",
            unit=Unit.NUMBER,
            queries=(
                Query(f'sum by (model) (increase(weft_router_wakes_total{{model=~"$model"}}[{RATE}]))', "{{model}}"),
                Query(
                    f'sum by (model) (increase(weft_router_failed_wakes_total{{model=~"$model"}}[{RATE}]))',
                    "{{model}} failed",
                ),
            ),
        ),
    ),
)

_FAIRNESS = Section(
    "Fairness and tasks",
    (
        Panel(
            title="Fair share",
            about="Tokens served to each tenant of metrics.tenants, divided by its weight.",
            unit=Unit.NUMBER,
            queries=(Query("sum by (tenant) (weft_router_fair_share_tokens)", "{{tenant}}"),),
        ),
        Panel(
            title="Durable tasks",
            about="Tasks by state, as counted by the last sweep.",
            unit=Unit.NUMBER,
            view=View.AREAS,
            queries=(Query('sum by (state) (weft_tasks{state=~"pending|running"})', "{{state}}"),),
        ),
        Panel(
            title="Oldest task",
            about="Age of the oldest pending and running task, from its submission.",
            unit=Unit.SECONDS,
            queries=(Query("max by (state) (weft_oldest_task_age_seconds)", "{{state}}"),),
        ),
    ),
)

_ESTIMATES = Section(
    "Shown waits",
    (
        Panel(
            title="Error of shown waits",
            about="The first wait that a request was shown against the one it had, as a share of the latter.",
            unit=Unit.SHARE,
            width=12,
            queries=tuple(
                Query(quantile(share, "weft_router_wait_estimate_error_ratio"), name)
                for share, name in ((0.5, "p50"), (0.95, "p95"))
            ),
        ),
        Panel(
            title="Swaps of the registry",
            about="Evictions requested from runners, by result.",
            unit=Unit.NUMBER,
            width=12,
            queries=(Query(f"sum by (answer) (increase(weft_evictions_total[{RATE}]))", "{{answer}}"),),
        ),
    ),
)

SCHEDULER = Board(
    uid="weft-scheduler",
    title="weft / Scheduler",
    about="Who waits for what, and what the scheduler decided.",
    sections=(_QUEUES, _WAITS, _DECISIONS, _FAIRNESS, _ESTIMATES),
)
