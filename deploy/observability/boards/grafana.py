"""Grafana's JSON of a board, made by Grafana's own library."""

import json
from itertools import count

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from boards.board import Board, Bounds, Panel, View

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
MODELS = "label_values(weft_router_requests_total, model)"
"""The values of the variable `$model`."""
TILE_HEIGHT, PANEL_HEIGHT = 4, 8
"""In rows of Grafana's grid."""
REFRESH = "30s"

GREEN, YELLOW, RED = "green", "yellow", "red"

_PanelBuilder = stat.Panel | table.Panel | timeseries.Panel


def board_json(board: Board) -> str:
    """Returns the JSON that Grafana imports or provisions; the same for the same board."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags(["weft"])
        .refresh(REFRESH)
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(_model_variable())
    )
    numbers = count(1)
    for section in board.sections:
        built.with_row(dashboard.Row(section.title).id(next(numbers)))
        for panel in section.panels:
            built.with_panel(_panel(panel).id(next(numbers)))
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _model_variable() -> dashboard.QueryVariable:
    every = VariableOption(selected=True, text="All", value="$__all")
    return (
        dashboard.QueryVariable("model")
        .label("Model")
        .datasource(SOURCE)
        .query({"query": MODELS, "refId": "model"})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(every)
    )


def _panel(panel: Panel) -> _PanelBuilder:
    builder = _empty_panel(panel)
    builder.title(panel.title).description(panel.about).datasource(SOURCE).unit(panel.unit.value)
    builder.span(panel.width).height(TILE_HEIGHT if panel.view is View.TILE else PANEL_HEIGHT)
    for name, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().ref_id(name).datasource(SOURCE).expr(query.expression)
        if query.legend:
            target.legend_format(query.legend)
        if panel.view is View.TABLE:
            target.instant().format(PromQueryFormat.TABLE)
        builder.with_target(target)
    return builder


def _empty_panel(panel: Panel) -> _PanelBuilder:
    if panel.view is View.TABLE:
        return table.Panel()
    if panel.view is View.TILE:
        tile = stat.Panel().no_value("no data").reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        return tile.thresholds(_thresholds(panel.bounds)) if panel.bounds else tile
    legend = common.VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST)
    lines = timeseries.Panel().min(0).legend(legend.placement(LegendPlacement.BOTTOM))
    if panel.view is View.AREAS:
        lines.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)
    return lines


def _thresholds(bounds: Bounds) -> dashboard.ThresholdsConfig:
    steps = (
        [(None, RED), (bounds.critical, YELLOW), (bounds.warning, GREEN)]
        if bounds.is_falling
        else [(None, GREEN), (bounds.warning, YELLOW), (bounds.critical, RED)]
    )
    config = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE)
    return config.steps([Threshold(value=value, color=color) for value, color in steps])
