"""A run's timeline as a trace that ui.perfetto.dev and chrome://tracing open.

The format is Chrome's trace events (JSON, object form): complete events "X" for jobs, shifts and phases, and for the
roles on a track of their own above them; counters "C" for queues; instants "i" for decisions and failures. Times are
whole microseconds since the first step began. Perfetto drops a complete event that begins within another of its track
and ends after it, and takes a thread to be known by its id alone, the one with its process's id to be the main one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from solrl.errors import UsageError
from solrl.files import saving, write_atomic
from solrl.timeline import Span, Step, read_steps

Event = dict[str, Any]
INSTANTS = ("decision", "raised", "quarantine", "auto")
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


def events(name: str, steps: Sequence[Step]) -> Iterator[Event]:
    """Of all steps: names first, the rest in no particular order, as the format allows."""
    zero, size = steps[0].began, steps[0].num_processes
    controller, others = size + 1, size + 1  # a process's first track has its id, a second one this much more
    for rank in range(size):
        yield from _names(rank + 1, f"process {rank}", {rank + 1: "role", rank + 1 + others: "work"})
    yield from _names(
        controller, f"controller of {name}", {controller: "steps", controller + others: "decisions"}
    )  # fmt: skip
    whole = [Span(size, f"step {step.number}", step.began, step.ended, {"event": "step"}) for step in steps]
    yield from _track(controller, controller, whole, zero)
    for rank in range(size):
        roles = [span for step in steps for span in step.roles if span.rank == rank]
        yield from _track(rank + 1, rank + 1, roles, zero)
        busy = [span for step in steps for span in step.busy if span.rank == rank]
        yield from _track(rank + 1, rank + 1 + others, busy, zero)
    for step in steps:
        for time, waiting in step.queues:
            yield {"ph": "C", "name": "waiting jobs", "pid": controller, "ts": _us(time - zero), "args": waiting}
        for line in step.lines:
            if line["event"] in INSTANTS:
                what = line.get("reason") or line.get("error") or line.get("advice") or ""
                yield {
                    "ph": "i", "s": "t", "name": f"{line['event']}: {what}", "cat": line["event"], "pid": controller,
                    "tid": controller + others, "ts": _us(line["time"] - zero), "args": line,
                }  # fmt: skip


def _track(pid: int, tid: int, spans: Sequence[Span], zero: float) -> Iterator[Event]:
    """One after the other: where clocks disagree, a span ends when the next begins."""
    found = sorted(spans, key=lambda span: (span.began, span.ended))
    starts = [_us(span.began - zero) for span in found]
    ends = [min(_us(one.ended - zero), start) for one, start in zip(found, starts[1:], strict=False)]
    ends += [_us(span.ended - zero) for span in found[-1:]]
    for span, start, end in zip(found, starts, ends, strict=True):
        facts = {key: value for key, value in span.facts.items() if key not in ("time", "began", "waiting", "event")}
        yield {
            "ph": "X", "name": span.kind, "cat": span.facts.get("event", "role"), "pid": pid, "tid": tid, "ts": start,
            "dur": end - start, "args": facts,
        } | ({"cname": COLORS[span.kind]} if span.kind in COLORS else {})  # fmt: skip


def _names(pid: int, name: str, threads: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for tid, thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}


def _us(seconds: float) -> int:
    return round(1e6 * max(seconds, 0.0))
