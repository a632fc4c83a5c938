"""Grafana dashboards of weft as values, and their JSON: `make dashboards` writes `deploy/observability/dashboards`."""

from boards.overview import OVERVIEW
from boards.runners import RUNNERS
from boards.scheduler import SCHEDULER
from boards.truth import TRUTH

BOARDS = (OVERVIEW, SCHEDULER, RUNNERS, TRUTH)
"""Every dashboard, in the order of its folder."""
