"""Writes one HTML page from the records of loads.py: figures beside their targets, latency curves, sweeps over rates.

    python benchmarks/serving/report.py results.jsonl [MORE.jsonl ...] --out report.html

The page stands alone: inline SVG, no scripts, light and dark. Of each engine and load the last record counts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import loads

Record = Mapping[str, Any]
Points = Sequence[tuple[float, float]]

# The columns of the table of figures: the figure, and its two values.
COLUMNS = {
    "TTFT p50 / p99": ("ttft", "p50", "p99"),
    "per token p50 / p99": ("tpot", "p50", "p99"),
    "gap p99 / max": ("gaps", "p99", "max"),
}
CURVES = {"ttft": "time to first token", "gaps": "gap between chunks"}
SWEEP = {"ttft": "time to first token", "tpot": "time per output token"}
SERIES = 6  # colours; further engines begin anew, with dashes
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 270, 48, 16, 10, 44
FIRST_PERCENTILE = 10  # of the curves: the quickest answers would take half of the axis
LEAST_MS = 0.1  # chunks that are read together have no gap; a logarithmic axis needs one
TAIL = 3.3  # where the largest value stands on the axis of percentiles, beyond p99.9

STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfb; --ink: #1d1d1b; --soft: #62625d; --line: #dcdcd6; --bad: #b3261e;
  --s0: #2a6fd0; --s1: #c2571a; --s2: #16866b; --s3: #8a4fc0; --s4: #a2780a; --s5: #b03a72; }
@media (prefers-color-scheme: dark) { :root { --ground: #191918; --ink: #ecece8; --soft: #a3a39c; --line: #3a3a37;
  --bad: #ff8a80; --s0: #6aa5f5; --s1: #ee8b52; --s2: #3fbf9f; --s3: #b98be8; --s4: #d3a93b; --s5: #e57aa8; } }
body { margin: 2rem auto; max-width: 66rem; padding: 0 1rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p, figcaption { color: var(--soft); } figcaption { font-size: .85rem; }
code { font-size: .85rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; } th:first-child, td:first-child, .words { text-align: left; }
td.words { white-space: normal; min-width: 14rem; } tr.target td { color: var(--soft); }
tr.first td { border-top: 2px solid var(--line); } .bad { color: var(--bad); font-weight: 600; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; flex: 1 1 26rem; max-width: 32rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); } svg polyline { fill: none; stroke-width: 2; }
svg .target { stroke: var(--ink); stroke-width: 2; } .key { display: inline-block; margin-right: 1.2rem; }
.key svg { width: 28px; height: 10px; margin-right: .3rem; }
"""


# ---------------------------------------------------------------- records


def latest(records: Sequence[Record]) -> list[Record]:
    """The last record of each engine and load, as they first came."""
    found: dict[tuple[str, str], Record] = {}
    for record in records:
        found[record["label"], record["load"]] = record
    return list(found.values())


def _names(records: Sequence[Record], key: str) -> list[str]:
    return list(dict.fromkeys(record[key] for record in records))


def is_sweep(record: Record) -> bool:
    return str(record["load"]).startswith("sweep@")


# ---------------------------------------------------------------- tables


def page(records: Sequence[Record]) -> str:
    records = latest(records)
    engines = _names(records, "label")
    named = [record for record in records if not is_sweep(record)]
    swept = [record for record in records if is_sweep(record)]
    parts = ["<h1>Serving under load</h1>", *_introduction(records), _keys(engines)]
    if not records:
        parts.append("<p>There are no records.</p>")
    if named:
        parts += ["<h2>Loads</h2>", _figures(named), "<h2>Latency curves</h2>"]
        parts += [_load_curves(name, named, engines) for name in _names(named, "load")]
    if swept:
        parts += ["<h2>Over rates</h2>", _sweep(swept, engines)]
    parts += ["<h2>Engines</h2>", _engines(records, engines)] if records else []
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>Serving under load</title><style>{STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _introduction(records: Sequence[Record]) -> list[str]:
    machines = ", ".join(escape(name) for name in _names(records, "machine"))
    models = ", ".join(escape(name) for name in _names(records, "model"))
    return [
        f"<p>{machines}; model {models}. Times are milliseconds as a client on the same machine sees them. Token ids "
        "in, streamed completions out, arrivals do not wait for answers.</p>"
    ] * bool(records)


def _keys(engines: Sequence[str]) -> str:
    keys = [
        f'<span class="key"><svg viewBox="0 0 28 10"><line x1="0" x2="28" y1="5" y2="5" {_stroke(at)}/></svg>'
        f"{escape(name)}</span>"
        for at, name in enumerate(engines)
    ]
    return f"<p>{''.join(keys)}</p>" if engines else ""


def _table(header: Sequence[str], rows: Sequence[str], words: Sequence[str] = ()) -> str:
    cells = "".join(f"<th{' class=words' if name in words else ''}>{escape(name)}</th>" for name in header)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _figures(records: Sequence[Record]) -> str:
    rows = []
    for name in _names(records, "load"):
        of_load = [record for record in records if record["load"] == name]
        target: Mapping[str, float] = next((record["target"] for record in of_load if record["target"]), {})
        for at, record in enumerate(of_load):
            cells = [escape(name) if at == 0 else "", escape(record["label"])]
            cells += [_pair(record, *column) for column in COLUMNS.values()]
            cells += [f"{record['out_tok_s']:,.0f}", str(record["errors"])]
            row = "".join(f"<td>{cell}</td>" for cell in cells)
            verdict = f'<td class="words{" bad" if record["missed"] else ""}">{escape(_verdict(record))}</td>'
            rows.append(f"<tr{' class=first' if at == 0 else ''}>{row}{verdict}</tr>")
        if target:
            limits = "".join(f"<td>{_limits(target, *column)}</td>" for column in COLUMNS.values())
            rows.append(f'<tr class="target"><td></td><td>target</td>{limits}<td></td><td>0</td><td></td></tr>')
    header = ["load", "engine", *COLUMNS, "out tok/s", "errors", "verdict"]
    return _table(header, rows, ("verdict",))


def _verdict(record: Record) -> str:
    """Whether the target holds. The limits that were missed are marked in their cells; other problems are named."""
    others = [problem for problem in record["missed"] if problem.partition(" ")[0] not in record["target"]]
    return "; ".join(["missed", *others]) if record["missed"] else loads.verdict(record)


def _pair(record: Record, figure: str, *keys: str) -> str:
    shown = []
    for key in keys:
        value, limit = record[figure][key], record["target"].get(f"{figure}.{key}")
        text = milliseconds(value)
        is_missed = limit is not None and (value is None or value > limit)
        shown.append(f'<span class="bad">{text}</span>' if is_missed else text)
    return " / ".join(shown)


def _limits(target: Mapping[str, float], figure: str, *keys: str) -> str:
    values = [target.get(f"{figure}.{key}") for key in keys]
    return "" if values == [None] * len(values) else " / ".join(map(milliseconds, values))


def milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _engines(records: Sequence[Record], engines: Sequence[str]) -> str:
    rows = []
    for name in engines:
        record = [each for each in records if each["label"] == name][-1]
        cells = [name, record.get("version"), record["commit"], record["date"]]
        cells += [record.get("ready_s"), record.get("first_answer_s")]
        shown = "".join(f"<td>{escape(str('-' if cell is None else cell))}</td>" for cell in cells)
        rows.append(f'<tr>{shown}<td class="words"><code>{escape(record.get("command") or "-")}</code></td></tr>')
    header = ["engine", "version", "our commit", "date", "ready after, s", "first answer after, s", "command"]
    return _table(header, rows, ("command",))


# ---------------------------------------------------------------- charts


def _stroke(series: int) -> str:
    dashes = "" if series < SERIES else ' stroke-dasharray="2 3"'
    return f'style="stroke: var(--s{series % SERIES})" stroke-width="2"{dashes}'


def nines(percentile: float) -> float:
    """The place of a percentile on an axis on which each further nine is as wide as the one before."""
    return TAIL if percentile >= 100 else -math.log10(1 - percentile / 100)


class Chart:
    """An SVG chart with a logarithmic axis of milliseconds; x runs over what the caller places there."""

    def __init__(self, right: float, values: Sequence[float], ticks: Mapping[str, float]) -> None:
        low, high = max(LEAST_MS, min(values)), max(LEAST_MS * 2, *values)
        self.right = right
        self.low, self.high = math.log10(low / 1.15), math.log10(high * 1.15)
        self.parts: list[str] = []
        for tick in decade_ticks(10**self.low, 10**self.high):
            y = self._y(tick)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for label, at in ticks.items():
            x = self._x(at)
            self.parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 26}" text-anchor="middle">{escape(label)}</text>')

    def _x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.right

    def _y(self, value: float) -> float:
        share = (math.log10(max(value, LEAST_MS)) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def add_line(self, points: Points, series: int, titles: Sequence[str], is_thin: bool = False) -> None:
        places = [(self._x(x), self._y(y)) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        thin = ' stroke-dasharray="5 4"' if is_thin else ""
        self.parts.append(f'<polyline points="{line}" {_stroke(series)}{thin if series < SERIES else ""}/>')
        for (x, y), title in zip(places, titles, strict=True):
            dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill: var(--s{series % SERIES})">'
            self.parts.append(f"{dot}<title>{escape(title)}</title></circle>")

    def add_target(self, at: float, value: float) -> None:
        x, y = self._x(at), self._y(value)
        line = f'<line class="target" x1="{x - 8:.1f}" x2="{x + 8:.1f}" y1="{y:.1f}" y2="{y:.1f}">'
        self.parts.append(f"{line}<title>target {value:g} ms</title></line>")

    def figure(self, caption: str, axis: str) -> str:
        name = f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(axis)}</text>'
        svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(caption)}">'
        return f"<figure>{svg}{''.join(self.parts)}{name}</svg><figcaption>{escape(caption)}</figcaption></figure>"


def decade_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two values; only the powers if there would be many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]
    return fine if len(fine) <= 10 else [10.0**power for power in powers if low <= 10.0**power <= high]


def _load_curves(name: str, records: Sequence[Record], engines: Sequence[str]) -> str:
    of_load = [record for record in records if record["load"] == name and record.get("curve")]
    figures = [_curve(of_load, engines, key, words) for key, words in CURVES.items()]
    return f'<h3>{escape(name)}</h3><div class="charts">{"".join(figures)}</div>'


def _curve(records: Sequence[Record], engines: Sequence[str], key: str, words: str) -> str:
    drawn = [record for record in records if record["curve"][key]]
    if not drawn:
        return f"<p>No {words} was measured.</p>"
    target = {p: limit for name, limit in drawn[0]["target"].items() if (p := _percentile(name, key)) is not None}
    values = [value for record in drawn for _, value in _points(record, key)] + list(target.values())
    ticks = {label: nines(at) for label, at in (("p10", 10), ("p50", 50), ("p90", 90), ("p99", 99), ("max", 100))}
    chart = Chart(TAIL, values, ticks)
    for record in drawn:
        label, points = record["label"], _points(record, key)
        titles = [f"{label} p{p:g}: {value:g} ms" for p, value in points]
        chart.add_line([(nines(p), value) for p, value in points], engines.index(label), titles)
    for at, limit in target.items():
        chart.add_target(nines(at), limit)
    note = "; bars are targets" if target else ""
    return chart.figure(f"{words}, ms, by percentile{note}", "percentile")


def _points(record: Record, key: str) -> list[tuple[float, float]]:
    """Percentiles with their milliseconds, from FIRST_PERCENTILE on."""
    measured = zip(record["curve"]["percentiles"], record["curve"][key], strict=True)
    return [(p, value) for p, value in measured if p >= FIRST_PERCENTILE]


def _percentile(limit: str, key: str) -> float | None:
    """Where a limit such as ttft.p99 stands on the curve of `key`; None for limits of other figures."""
    group, _, at = limit.partition(".")
    return None if group != key else 100.0 * loads.PERCENTILES[at]


def _sweep(records: Sequence[Record], engines: Sequence[str]) -> str:
    figures = [_rates(records, engines, key, words) for key, words in SWEEP.items()]
    return f'<div class="charts">{"".join(figures)}</div>{_figures(sorted(records, key=lambda each: each["rate"]))}'


def _rates(records: Sequence[Record], engines: Sequence[str], key: str, words: str) -> str:
    drawn = sorted((each for each in records if each[key]["p50"] is not None), key=lambda each: each["rate"])
    if not drawn:
        return f"<p>No {words} was measured.</p>"
    values = [each[key][at] for each in drawn for at in ("p50", "p99")]
    ticks = {f"{rate:g}": rate for rate in sorted({each["rate"] for each in drawn})}
    chart = Chart(max(ticks.values()), values, ticks)
    for series, label in enumerate(engines):
        of_engine = [each for each in drawn if each["label"] == label]
        for at in ("p50", "p99") if of_engine else ():
            points = [(each["rate"], each[key][at]) for each in of_engine]
            titles = [f"{label} {at} at {rate:g}/s: {value:g} ms" for rate, value in points]
            chart.add_line(points, series, titles, is_thin=at == "p99")
    return chart.figure(f"{words}, ms: p50 (solid) and p99 (dashed)", "requests per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE")
    arguments = parser.parse_args()
    if absent := [str(path) for path in arguments.records if not path.is_file()]:
        parser.error(f"no such file: {', '.join(absent)}")
    arguments.out.write_text(page(loads.read_records(arguments.records)), encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
