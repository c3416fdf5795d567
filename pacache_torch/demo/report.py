"""What the demo prints and writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pacache_torch.demo.check import TokenDifference
from pacache_torch.demo.op_clock import OpTotal

_OPS = ("scatter_pa_kv_cache", "paged_cache_load")


@dataclass(frozen=True)
class RunReport:
    """One layout in one dtype, served through the paged cache and compared."""

    layout: str
    dtype: str
    prompt_tokens: int
    new_tokens: int
    steps: int
    mixed_steps: int
    continued_chunks: int
    seconds: float
    tokens_per_second: float
    ops: dict[str, OpTotal]
    blocks_in_pool: int
    blocks_peak: int
    blocks_handed_out: int
    rows_checked: int
    rows_different: int
    first_row_difference: str | None
    tokens_different: int
    first_token_difference: TokenDifference | None
    smallest_top2_gap: float
    median_top2_gap: float
    sample_prompt: str
    sample_text: str

    @property
    def ok(self) -> bool:
        """Whether something was compared and everything was equal."""
        return self.new_tokens > 0 and self.rows_checked > 0 and self.rows_different == 0 and self.tokens_different == 0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        values = asdict(self) | {"ok": self.ok}
        values["ops"] = {
            name: asdict(total) | {"gb_per_second": total.gb_per_second} for name, total in self.ops.items()
        }
        return values


def table(reports: list[RunReport]) -> str:
    """Return one row per run."""
    header = [
        ("", "", "prompt", "new", "", "", "scatter", "scatter", "load", "load", "blocks", ""),
        (
            "layout", "dtype", "tokens", "tokens", "steps", "tokens/s",
            "ms", "GB/s", "ms", "GB/s", "peak/pool", "equal to dense",
        ),
    ]  # fmt: skip
    rows = [_row(report) for report in reports]
    widths = [max(len(row[i]) for row in header + rows) for i in range(len(header[0]))]
    rule = tuple("-" * width for width in widths)

    def line(cells: tuple[str, ...]) -> str:
        padded = (
            cell.ljust(width) if index in (0, 1, len(widths) - 1) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join(line(row) for row in (*header, rule, *rows))


def differences(reports: list[RunReport]) -> list[str]:
    """Return one sentence for each run that does not equal the dense run."""
    lines = []
    for report in reports:
        if report.ok:
            continue
        where = f"{report.layout} {report.dtype}"
        if report.rows_different:
            lines.append(
                f"{where}: {report.rows_different} of {report.rows_checked} loaded rows differ "
                f"from the dense cache, first {report.first_row_difference}"
            )
        first = report.first_token_difference
        if first is not None:
            lines.append(
                f"{where}: {report.tokens_different} of {report.new_tokens} generated tokens "
                f"differ from the dense run, first in request {first.request} at token "
                f"{first.index}: got {first.got}, expected {first.wanted}"
            )
        if not (report.new_tokens and report.rows_checked):
            lines.append(f"{where}: nothing was compared")
    return lines


def _row(report: RunReport) -> tuple[str, ...]:
    timings = []
    for name in _OPS:
        total = report.ops.get(name, OpTotal())
        timings += [f"{total.seconds * 1e3:.1f}", f"{total.gb_per_second:.1f}"]
    return (
        report.layout,
        report.dtype,
        str(report.prompt_tokens),
        str(report.new_tokens),
        str(report.steps),
        f"{report.tokens_per_second:.0f}",
        *timings,
        f"{report.blocks_peak}/{report.blocks_in_pool}",
        "yes" if report.ok else "NO",
    )
