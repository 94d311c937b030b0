"""The result of a run as a table for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]

_LATENCIES = (
    ("ttft_ms", "time to first token"),
    ("tpot_ms", "time per output token"),
    ("itl_ms", "inter-token latency"),
    ("e2e_ms", "end to end"),
)
_COLUMNS = ("mean", "p50", "p95", "p99", "max")


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:,.2f}"


def print_report(result: dict[str, Any], console: Console) -> None:
    """Print what ``records.summarize`` returned, together with the run's settings under ``config``."""
    config = result["config"]
    console.print(
        f"[bold]{config['model']}[/bold] at {config['base_url']}: {config['workload']}, {result['requests']} requests, "
        f"at most {min(config['max_concurrency'], config['sessions'])} at once"
        + (f", {config['request_rate']:g} sessions/s" if config["request_rate"] else "")
    )
    totals = Table(show_header=False, box=None, pad_edge=False)
    for label, value in (
        ("completed / failed", f"{result['ok']} / {result['failed']}"),
        ("wall time, s", _number(result["wall_s"])),
        ("requests/s", _number(result["request_throughput"])),
        ("output tok/s", _number(result["output_throughput"])),
        ("input tok/s", _number(result["input_throughput"])),
        ("cache hit rate", "-" if result["cache_hit_rate"] is None else f"{result['cache_hit_rate']:.1%}"),
    ):
        totals.add_row(label, value)
    console.print(totals)
    console.print(_latencies("latency, ms", [(title, result[key]) for key, title in _LATENCIES]))
    if result["turns"]:
        turns = Table(box=None, pad_edge=False)
        for column in ("turn", "requests", "prompt tokens", "hit rate", "TTFT p50, ms", "TTFT p99, ms"):
            turns.add_column(column, justify="right")
        for row in result["turns"]:
            hit, ttft = row["cache_hit_rate"], row["ttft_ms"] or {}
            turns.add_row(
                str(row["turn"] + 1),
                str(row["requests"]),
                _number(row["prompt_tokens"]),
                "-" if hit is None else f"{hit:.1%}",
                _number(ttft.get("p50")),
                _number(ttft.get("p99")),
            )
        console.print(turns)
    for error in result["errors"]:
        console.print("error:", error, style="red", markup=False)


def _latencies(title: str, rows: list[tuple[str, dict[str, float] | None]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, figures in rows:
        table.add_row(name, *(_number((figures or {}).get(column)) for column in _COLUMNS))
    return table
