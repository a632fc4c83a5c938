"""The board Truth: ends by reason, failed attempts, requests sent to remote providers, and telemetry that was lost."""

from boards.board import Board, Bounds, Panel, Query, Section, Unit, View, rate_by

_ENDS = Section(
    "Ends",
    (
        Panel(
            title="Ends by reason",
            about="Every request that did not complete, by its typed reason (docs/api.md lists them).",
            unit=Unit.PER_SECOND,
            view=View.AREAS,
            width=12,
            queries=(
                Query(
                    rate_by("weft_router_requests_total", "reason", where='model=~"$model", reason!="completed"'),
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            title="Failed attempts by reason",
            about="Attempts that failed before content: the request went on to another runner where there was one.",
            unit=Unit.PER_SECOND,
            view=View.AREAS,
            width=12,
            queries=(Query(rate_by("weft_router_failed_attempts_total", "reason", where=""), "{{reason}}"),),
        ),
        Panel(
            title="Ends by model and reason",
            about="In the chosen time.",
            unit=Unit.NUMBER,
            view=View.TABLE,
            width=24,
            queries=(
                Query(
                    'sum by (model, outcome, reason) (increase(weft_router_requests_total{model=~"$model"}[$__range]))'
                ),
            ),
        ),
    ),
)

_RECEIPTS = Section(
    "Receipts",
    (
        Panel(
            title="Answers cut off",
            about="Answers that ended after their first content without being complete, by reason.",
            unit=Unit.PER_SECOND,
            width=12,
            queries=(Query(rate_by("weft_cut_off_answers_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            title="Receipts that contradict themselves",
            about="None is the fault of a request: any of them is worth a report (docs/observe.md lists the faults).",
            unit=Unit.NUMBER,
            view=View.TILE,
            width=6,
            bounds=Bounds(warning=1, critical=10),
            queries=(Query("sum(increase(weft_inconsistent_receipts_total[$__range])) or vector(0)"),),
        ),
        Panel(
            title="Unknown ends",
            about="Requests whose dispatcher is gone: no receipt says what happened. Look for gateways that died.",
            unit=Unit.NUMBER,
            view=View.TILE,
            width=6,
            bounds=Bounds(warning=1, critical=10),
            queries=(Query('sum(increase(weft_router_requests_total{outcome="unknown"}[$__range])) or vector(0)'),),
        ),
        Panel(
            title="Left the premises",
            about="Requests that were sent, or may have been sent, to a remote provider, by model.",
            unit=Unit.PER_SECOND,
            width=12,
            queries=(Query(rate_by("weft_router_left_premises_total", "model"), "{{model}}"),),
        ),
        Panel(
            title="Spans",
            about="Spans by result. Dropped or failed: the collector is away, slow or refuses.",
            unit=Unit.PER_SECOND,
            width=12,
            queries=(Query(rate_by("weft_spans_total", "end", where=""), "{{end}}"),),
        ),
    ),
)

TRUTH = Board(
    uid="weft-truth",
    title="weft / Truth",
    about="What happened to requests, and whether that is known.",
    sections=(_ENDS, _RECEIPTS),
)
