"""What a result says: panels of rows, each row with its median, its interval and its ratio to Penstock's.

Tables, charts, CSV and the report are made of this, so they cannot disagree. Only measurements whose state is proved
count; how many were left out is said.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import data, intervals, tables
from .result import Result, Sample, is_proved

OURS = "penstock"
STAGE = "stage_"
"""What names of figures begin with that are the seconds of a stage."""
STATES = {
    "cold": "Cold: nothing in the page cache",
    "half": "Half in the page cache",
    "warm": "Warm: all in the page cache",
    "tmpfs": "tmpfs: files in memory",
    "s3": "From S3",
    "gs": "From Google Cloud Storage",
    "https": "Over HTTPS",
}


ENGINES = ("transformers", "vllm", "sglang")
OF_ENGINES = {
    "cold": "Cold: weights, packages and libraries put out of the page cache",
    "warm": "Warm: after another start",
    "cold-machine": "Cold machine: nothing in its page cache",
}
PARTS = {
    "read": ("Files to host memory", "reads"),
    "order": ("From files to a module", "builds and fills"),
    "reload": ("Load, unload, load again", "reloads"),
    "copy": ("Host memory to the GPU", "copies"),
    "turns": ("Models that take turns", "switches to"),
    "pool": ("What a pool costs", "takes"),
    "request": ("One request, by stages", "answers with"),
    **{name: (f"{name}: until the first answer", "answers after") for name in ENGINES},
}
"""Cases that are questions of their own: what they are, and what Penstock does there."""
OF_PARTS = {
    "room for one": "room for one",
    "room for both": "room for both",
    "host": "the worker keeps the model in host memory",
    "evict": "the model leaves the device",
    "adopt": "modules become the pool's",
}


@dataclass(frozen=True)
class Row:
    """A loader in one state."""

    loader: str
    version: str = ""
    seconds: list[float] = field(default_factory=list)
    # Of as many bytes, in terms of Penstock's in the same round.
    ratios: list[float] = field(default_factory=list)
    nbytes: float = 0.0
    first: float | None = None
    cpu: float | None = None
    peak: float | None = None
    # The share of the bytes that came from the device: all of it where a loader passes the page cache by.
    device: float | None = None
    bytes_checked: str = "not checked"
    error: str | None = None
    unproved: int = 0
    # Of a way in stages, the seconds of each, in order.
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def interval(self) -> intervals.Interval | None:
        return intervals.of_median(self.seconds)

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / self.median / data.GB


@dataclass(frozen=True)
class Panel:
    """The loaders that are compared with each other, the fastest first; those without a measurement last."""

    case: str
    state: str
    rows: list[Row]
    # The least seconds that the machine allows, and what they are spent on.
    limit: tuple[float, str] | None
    ended: str = ""

    @property
    def title(self) -> str:
        part, _, how = self.case.partition(", ")
        if part in PARTS:
            known = OF_ENGINES if part in ENGINES else STATES
            said = known.get(self.state, OF_PARTS.get(self.state, self.state))
            where = f"{said[:1].lower()}{said[1:]}" if self.state in known else said
            return ", ".join(filter(None, [PARTS[part][0], how, where]))
        return STATES.get(self.state, self.state)

    @property
    def verb(self) -> str:
        """What Penstock does to the bytes."""
        return PARTS.get(self.case.partition(", ")[0], ("", "loads"))[1]

    @property
    def stages(self) -> list[str]:
        """The stages that any of its rows has, in order."""
        longest = max((row.stages for row in self.measured), key=len, default={})
        return list(dict.fromkeys([*longest, *(stage for row in self.measured for stage in row.stages)]))

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.seconds]

    def ours(self) -> Row | None:
        """Penstock as it is by itself."""
        return next((row for row in self.measured if row.loader == OURS), None)


def panels(result: Result) -> list[Panel]:
    """The panels of a result, in the order in which they were measured."""
    found = []
    for at, group in tables.groups(result).items():
        case, state = (*at, "")[:2]
        good = {name: [item for item in tables.good(items) if is_proved(item)] for name, items in group.items()}
        rows = [_row(name, group, good) for name in group]
        rows.sort(key=lambda row: (not row.seconds, row.median if row.seconds else 0.0))
        # Of a request, reading is one stage of several.
        limit = tables.limit(result, case, state) if not any(row.stages for row in rows) else None
        found.append(Panel(case, state, rows, limit, _ended(result, case, state)))
    return found


def _row(name: str, group: tables.Group, good: tables.Group) -> Row:
    items = good[name]
    errors = [item["error"] for item in group[name] if "error" in item]
    error = errors[-1] if errors else None
    unproved = len(tables.good(group[name])) - len(items)
    if not items:
        return Row(name, error=error or "its measurements show no proof of the cache's state", unproved=unproved)
    return Row(
        name,
        str(items[-1]["facts"].get("version") or ""),
        [item["figures"]["seconds"] for item in items],
        [1 / ratio for ratio in tables.beside(good.get(OURS, []), items)] if name != OURS else [1.0] * len(items),
        items[0]["figures"].get("bytes", 0.0),
        _median(items, "first_seconds"),
        _median(items, "cpu_seconds"),
        max((item["figures"]["peak_rss"] for item in items if "peak_rss" in item["figures"]), default=None),
        _share(items),
        tables.checked(good, name),
        error,
        unproved,
        _stages(items),
    )


def _stages(items: Sequence[Sample]) -> dict[str, float]:
    named = dict.fromkeys(figure for item in items for figure in item["figures"] if figure.startswith(STAGE))
    return {figure[len(STAGE) :]: _median(items, figure) or 0.0 for figure in named}


def _share(items: Sequence[Sample]) -> float | None:
    shares = [item["cache"]["device"] for item in items if "device" in (item["cache"] or {})]
    return statistics.median(shares) if shares else None


def _median(items: Sequence[Sample], figure: str) -> float | None:
    values = [item["figures"][figure] for item in items if figure in item["figures"]]
    return statistics.median(values) if values else None


def _ended(result: Result, case: str, state: str) -> str:
    """Why the rounds of a panel ended, in words."""
    for run in reversed(result["runs"]):
        for of in run.get("ended", []):
            if of["axes"].get("case") == case and of["axes"].get("state", of["axes"].get("network", "")) == state:
                bar = f"±{run['precision']:.0%}"
                rounds = f"{of['rounds']} round{'s' if of['rounds'] != 1 else ''}"
                return {
                    "interval": f"{rounds}: every interval is within {bar}",
                    "rounds": f"{rounds}, as many as were asked for; not every interval is within {bar}",
                    "budget": f"{rounds} until the budget ended; not every interval is within {bar}",
                }[of["by"]]
    return ""


def headlines(found: Iterable[Panel]) -> list[str]:
    """What would be gained, and what limits it: two sentences for each panel."""
    said = []
    for panel in found:
        ours = panel.ours()
        if ours is None:
            continue
        others = [row for row in panel.measured if not row.loader.startswith(OURS) and row.ratio]
        told = others[:1] + [row for row in others[1:] if row.loader == "safetensors"]
        fixed = [row for row in panel.measured if row.loader.startswith(f"{OURS}:readers=") and row.ratio]
        words = [f"{row.loader} takes {_times(row)}" for row in [*fixed[:1], *told]]
        gain = f"{'; '.join(words)}." if words else "No other loader was measured."
        limit = ""
        if panel.limit:
            seconds, what = panel.limit
            share = seconds / ours.median
            reached = f"is at {share:.0%} of that limit" if share < 1 else "is no slower than plain reads"
            limit = f" Reading the {what} allows {seconds:.3g} s: Penstock {reached}."
        done = f"{panel.verb} {ours.nbytes / data.GB:.3g} GB in" if ours.nbytes else f"{panel.verb}"
        said.append(f"{panel.title}. Penstock {done} {ours.median:.3g} s. {gain}{limit}")
    return said


def notes(result: Result) -> list[str]:
    """What a reader has to know before believing the figures."""
    machine = result["runs"][-1]["machine"]
    load, cores = machine.get("load_average", 0.0), machine.get("cores", 1)
    busy = f"Other processes kept this machine busy: its load average was {load:.1f}, for {cores} cores."
    return [f"{busy} On a quiet machine loads take less time, and vary less."] if load > cores else []


def _times(row: Row) -> str:
    interval = intervals.of_median(row.ratios)
    known = f" [{interval.low:.2f}, {interval.high:.2f}]" if interval else " (too few rounds for an interval)"
    return f"{row.ratio:.2f} times as long{known}"


def samples_csv(result: Result) -> str:
    """Every measurement as a line: axes, proof, figures, or the error."""
    axes = list(dict.fromkeys(axis for item in result["samples"] for axis in item["axes"]))
    figures = list(dict.fromkeys(figure for item in result["samples"] for figure in item.get("figures", {})))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["round", *axes, "cached_before", "read_from_device", "proved", *figures, "bytes_ok", "error"])
    for item in result["samples"]:
        cache = item["cache"] or {}
        writer.writerow(
            [
                item["round"],
                *(item["axes"].get(axis, "") for axis in axes),
                cache.get("before", ""),
                cache.get("device", ""),
                is_proved(item) if "figures" in item else "",
                *(item.get("figures", {}).get(figure, "") for figure in figures),
                item.get("facts", {}).get("bytes_ok", ""),
                item.get("error", ""),
            ]
        )
    return text.getvalue()
