"""The dashboards: questions of operators, and the queries that answer them.

Queries use the metrics themselves and no recorded series, so that a board works without the rules.
`<model>`, `<pool>` and `<process>` are the matchers of the board's variables, `<rate>` is Grafana's interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.monitoring.board_one_pool import ONE_POOL
from tests.monitoring.board_overview import OVERVIEW
from tests.monitoring.board_scaling import SCALING
from tests.monitoring.board_slow import SLOW
from tests.monitoring.grafana import Board, Query

BOARDS: Sequence[Board] = (OVERVIEW, ONE_POOL, SLOW, SCALING)


def block() -> str:
    """The table of panels of the documentation, board by board."""
    parts = []
    for board in BOARDS:
        heading = board.title.partition(" / ")[2]
        parts.append(f"## {heading}\n\n{board.answers}\n")
        parts.append("| panel | shows |\n|---|---|")
        parts += [f"| {panel.title} | {panel.description} |" for panel in board.panels()]
        parts.append("")
    return "\n".join(parts).rstrip()


class BoardFinding(msgspec.Struct, frozen=True):
    """Trouble, and where it shows in one look.

    Attributes:
        trouble: What happened.
        board: The board that shows it.
        panel: Title of the panel.
        alert: The alert that fires.
    """

    trouble: str
    board: Board
    panel: str
    alert: str

    def queries(self) -> Sequence[Query]:
        """The queries of the panel."""
        (panel,) = [panel for panel in self.board.panels() if panel.title == self.panel]
        return panel.queries


SLOW_ENGINE = BoardFinding(
    "An engine is 5 times slower", SLOW, "Slow engines", "ExtprocEndpointSlow"
)
HUNG_ENGINE = BoardFinding("An engine hangs", ONE_POOL, "Ejected", "ExtprocEndpointEjected")
DEAD_ENGINE = BoardFinding("An engine dies", ONE_POOL, "Reachable", "ExtprocEndpointEjected")
FAILING_ENGINE = BoardFinding(
    "An engine fails some requests", ONE_POOL, "Server errors by endpoint", "ExtprocEndpointErrors"
)
COLD_CACHE = BoardFinding(
    "A cache is cold", SLOW, "Observed over predicted", "ExtprocCachePredictionsWrong"
)
FULL_QUEUE = BoardFinding("The queue is full", SCALING, "Rejections by cause", "ExtprocQueueFull")
NO_ENDPOINT = BoardFinding(
    "Every endpoint is gone", OVERVIEW, "Endpoints", "ExtprocPoolWithoutEndpoints"
)
FAILED_SCRAPES = BoardFinding(
    "Metrics of an engine cannot be read", ONE_POOL, "Failed scrapes", "ExtprocEndpointScrapesFail"
)
WRONG_CONFIG = BoardFinding(
    "An edit broke the configuration", OVERVIEW, "Configuration", "ExtprocConfigRejected"
)
STOPPED_PICKER = BoardFinding(
    "A replica of extproc hangs", OVERVIEW, "Replicas", "ExtprocScrapeFails"
)

FINDINGS: Sequence[BoardFinding] = (
    SLOW_ENGINE,
    HUNG_ENGINE,
    DEAD_ENGINE,
    FAILING_ENGINE,
    COLD_CACHE,
    FULL_QUEUE,
    NO_ENDPOINT,
    FAILED_SCRAPES,
    WRONG_CONFIG,
    STOPPED_PICKER,
)


def findings_block() -> str:
    """The table of trouble of the documentation."""
    rows = ["| trouble | board and panel | alert |", "|---|---|---|"]
    for finding in FINDINGS:
        title = finding.board.title.partition(" / ")[2]
        board = f"[{title}](#{title.lower().replace(' ', '-')})"
        alert = f"[{finding.alert}](alerts.md#{finding.alert.lower()})"
        rows.append(f"| {finding.trouble} | {board}, {finding.panel} | {alert} |")
    return "\n".join(rows)
