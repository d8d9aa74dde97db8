"""A run's timeline as a trace that ui.perfetto.dev and chrome://tracing open.

The format is Chrome's trace events (JSON, object form): complete events "X" for jobs, shifts and phases, and for the
roles on a track of their own above them; counters "C" for queues; instants "i" for decisions and failures. Times are
microseconds since the first step began.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from solrl.errors import UsageError
from solrl.files import saving, write_atomic
from solrl.timeline import Step, read_steps

Event = dict[str, Any]
INSTANTS = ("decision", "raised", "quarantine", "auto")
FACTS = ("step", "job", "role", "wanted", "seconds", "ended", "error")
"""Of a span, that go along."""
COLORS = {
    "explore": "rail_response", "regenerate": "rail_animation", "score": "rail_load", "train": "rail_idle",
    "update": "good", "requantize": "yellow", "audit": "grey", "shift": "terrible",
}  # fmt: skip
"""Names that the old chrome://tracing knows; Perfetto colours by name."""


def write_trace(run_dir: Path, out: Path) -> Path:
    """``out`` holds the trace of the run. UsageError where it never had roles."""
    steps = read_steps(run_dir)
    if not steps:
        raise UsageError(
            f"{run_dir} has no timeline: it ran in mode colocated, or no step has ended; "
            "runs with runtime.mode async_score, shiftable or auto have one"
        )
    trace = {"displayTimeUnit": "ms", "traceEvents": list(events(run_dir.resolve().name, steps))}
    with saving(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, json.dumps(trace, separators=(",", ":"), allow_nan=False).encode())
    return out


def events(name: str, steps: list[Step]) -> Iterator[Event]:
    """Of all steps, in no particular order, as the format allows."""
    zero = steps[0].began
    for rank in range(steps[0].num_processes):
        yield from _names(rank, f"process {rank}", {1: "role", 2: "work"})
    controller = steps[0].num_processes
    yield from _names(controller, f"controller of {name}", {1: "steps", 2: "decisions"})
    for step in steps:
        yield _span(controller, 1, f"step {step.number}", "step", step.began - zero, step.seconds, {})
        for span in step.roles:
            yield _span(span.rank, 1, span.kind, "role", span.began - zero, span.seconds, {})
        for span in step.busy:
            facts = {
                key: value for key, value in span.facts.items() if key not in ("time", "began", "waiting", "event")
            }
            yield _span(span.rank, 2, span.kind, span.facts["event"], span.began - zero, span.seconds, facts)
        for time, waiting in step.queues:
            yield {"ph": "C", "name": "waiting jobs", "pid": controller, "ts": _us(time - zero), "args": waiting}
        for line in step.lines:
            if line["event"] in INSTANTS:
                what = line.get("reason") or line.get("error") or line.get("advice") or ""
                yield {
                    "ph": "i", "s": "t", "name": f"{line['event']}: {what}", "cat": line["event"], "pid": controller,
                    "tid": 2, "ts": _us(line["time"] - zero), "args": line,
                }  # fmt: skip


def _span(pid: int, tid: int, name: str, category: str, began: float, seconds: float, args: dict[str, Any]) -> Event:
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": _us(began), "dur": _us(seconds),
        "args": args,
    } | ({"cname": COLORS[name]} if name in COLORS else {})  # fmt: skip


def _names(pid: int, name: str, threads: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for tid, thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}


def _us(seconds: float) -> float:
    return round(1e6 * max(seconds, 0.0), 1)
