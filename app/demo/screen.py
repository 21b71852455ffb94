"""What a demo shows: tables that stay in place on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table

from app.demo.router import Router
from app.errors import InvalidInput
from app.experiment.runner import percentile

PICTURE_COLUMNS = 84


def build_tables(routers: Sequence[Router], *, elapsed_s: float, dashboard: str) -> Group:
    pods = Table(title=f"{elapsed_s:.0f} s   dashboard {dashboard}")
    pods.add_column("pod", no_wrap=True)
    for column in ("requests", "hit rate", "under way"):
        pods.add_column(column, justify="right")
    for router in routers:
        for pod, figures in router.figures.items():
            pods.add_row(
                pod,
                str(figures.requests),
                _percent(figures.cached_tokens, figures.prompt_tokens),
                str(router.in_flight(pod)),
            )
        pods.add_section()
    return Group(pods, policy_table(routers))


def draw(tables: Group, path: Path) -> None:
    """As a terminal shows them, in an SVG that needs nothing from elsewhere. Raises InvalidInput."""
    console = Console(record=True, width=PICTURE_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(tables)
    text = console.export_svg(title="kvindexer demo", unique_id="demo")
    # The fonts would be fetched from the net; what the reader's machine has will do.
    text = re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL)
    text = text.replace("font-family: Fira Code, monospace", "font-family: monospace")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error}", field="picture") from error


def policy_table(routers: Sequence[Router]) -> Table:
    table = Table()
    table.add_column("policy", no_wrap=True)
    for column in ("requests", "hit rate", "TTFT p50", "p99", "busiest", "failed"):
        table.add_column(column, justify="right")
    for router in routers:
        figures = router.figures.values()
        delays = sorted(router.delays_s)
        requests = [pod.requests for pod in figures]
        table.add_row(
            router.policy,
            str(sum(requests)),
            total_hit_rate(router),
            f"{1_000 * percentile(delays, 0.5):.0f} ms",
            f"{1_000 * percentile(delays, 0.99):.0f} ms",
            f"{max(requests) * len(requests) / max(1, sum(requests)):.2f}",
            str(sum(pod.failed for pod in figures)),
        )
    return table


def plain_line(routers: Sequence[Router], *, elapsed_s: float) -> str:
    parts = []
    for router in routers:
        delays = sorted(router.delays_s)
        requests = sum(pod.requests for pod in router.figures.values())
        parts.append(
            f"{router.policy}: {requests} requests, hit rate {total_hit_rate(router)}, "
            f"first token p50 {1_000 * percentile(delays, 0.5):.0f} ms"
        )
    return f"{elapsed_s:5.0f} s  {' | '.join(parts)}"


def total_hit_rate(router: Router) -> str:
    figures = router.figures.values()
    return _percent(sum(pod.cached_tokens for pod in figures), sum(pod.prompt_tokens for pod in figures))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
