"""What an experiment found, as JSON, as a table and as a plot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import InvalidInput
from app.experiment.runner import PolicyResult

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """`bounds` are hit rates by name."""

    trace: str
    requests: int
    pods: int
    blocks: int
    block_size: int
    policies: Mapping[str, PolicyResult]
    bounds: Mapping[str, float]

    @property
    def is_exact(self) -> bool:
        """No policy saw a prediction that was not what the pod then reused."""
        return all(result.predicted_exact in (None, 1.0) for result in self.policies.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "requests": self.requests,
            "pods": self.pods,
            "blocks": self.blocks,
            "block_size": self.block_size,
            "policies": {name: result.as_json() for name, result in self.policies.items()},
            "bounds": {name: {"hit_rate": rate} for name, rate in self.bounds.items()},
        }


def build_table(report: Report) -> Table:
    from rich.table import Table

    table = Table(
        title=f"{report.trace}: {report.requests} requests, {report.pods} pods of {report.blocks} blocks "
        f"of {report.block_size} tokens"
    )
    table.add_column("policy", no_wrap=True)
    for column in ("hit\nrate %", "imbalance", "TTFT\np50 s", "TTFT\np99 s", "exact\n%", "waited"):
        table.add_column(column, justify="right")
    for name, result in report.policies.items():
        table.add_row(
            name,
            f"{100 * result.hit_rate:.1f}",
            f"{result.imbalance:.2f}",
            f"{result.ttft_p50_s:.2f}",
            f"{result.ttft_p99_s:.2f}",
            _exactness(result),
            str(result.waited),
        )
    table.add_section()
    for name, rate in report.bounds.items():
        table.add_row(f"bound {name}", f"{100 * rate:.1f}", "", "", "", "", "")
    return table


def _exactness(result: PolicyResult) -> str:
    """Never rounded up to all of them."""
    part = result.predicted_exact
    return "-" if part is None else f"{math.floor(1_000 * part) / 10:.1f}"


def draw(report: Report, path: Path) -> None:
    """Hit rates with the bounds as lines, and delays of the first token beside them.

    Raises InvalidInput without matplotlib (extra `plot`) and for a file name that it cannot write.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InvalidInput("a plot needs matplotlib: pip install 'kvindexer[plot]'", field="plot") from error
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "kvindexer"  # the same figures make the same file
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    names = [name.replace("_", " ") for name in report.policies]
    results = list(report.policies.values())
    figure, (rates, delays) = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    bars = rates.barh(names, [100 * result.hit_rate for result in results], color="#4878a8")
    rates.bar_label(bars, fmt="%.1f %%", label_type="center", color="white")
    for (name, rate), style in zip(report.bounds.items(), ("--", ":"), strict=False):
        label = f"{name.replace('_', ' ')} {100 * rate:.1f} %"
        rates.axvline(100 * rate, color="black", linestyle=style, linewidth=1, label=label)
    rates.set_xlabel("blocks found in the cache, %")
    rates.set_xlim(0, 1.25 * max([100 * rate for rate in report.bounds.values()] + [1.0]))
    rates.legend(fontsize="small", loc="center right")
    delays.barh(names, [result.ttft_p99_s for result in results], color="#c8d8e8", label="p99")
    delays.barh(names, [result.ttft_p50_s for result in results], color="#4878a8", label="p50")
    delays.set_xscale("log")
    delays.set_xlim(left=0.5 * min([result.ttft_p50_s for result in results if result.ttft_p50_s] + [1.0]))
    delays.set_xlabel("simulated time to the first token, s")
    delays.legend(fontsize="small", loc="lower right")
    figure.suptitle(
        f"{report.requests} requests of {report.trace}, {report.pods} pods of {report.blocks} blocks "
        f"of {report.block_size} tokens",
        fontsize="medium",
    )
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be written: {error}", field="plot") from error
    finally:
        pyplot.close(figure)
