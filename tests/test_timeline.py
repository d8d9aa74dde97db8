"""What the log says becomes spans, a picture and a trace, and none of them says more or less than it."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from solrl.cli import main
from solrl.decisions import DecisionLog, read_decisions
from solrl.errors import SolrlError
from solrl.report_roles import roles_section
from solrl.timeline import Span, Step, read_steps
from solrl.trace import events, write_trace
from tests.test_report import Page


def check_steps(steps: list[Step]) -> None:
    """Roles cover every process without gaps or overlaps; nobody is at two things at once."""
    for step in steps:
        for rank in range(step.num_processes):
            roles = [span for span in step.roles if span.rank == rank]
            assert roles[0].began == step.began and roles[-1].ended == step.ended
            assert all(one.ended == two.began for one, two in itertools.pairwise(roles))
            busy = [span for span in step.busy if span.rank == rank]
            # a shift ends for the controller a little later than for its process
            assert all(one.ended <= two.began + 5e-3 for one, two in itertools.pairwise(busy))


def check_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a file in Chrome's trace format; what a track holds comes one after the other, as Perfetto asks."""
    trace = json.loads(path.read_text())
    assert set(trace) == {"displayTimeUnit", "traceEvents"} and trace["displayTimeUnit"] in ("ms", "ns")
    tracks, named = defaultdict[tuple[int, int], list[tuple[int, int]]](list), dict[tuple[int, int], str]()
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "C", "i", "M") and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and event["pid"] > 0  # 0 is the kernel's idle process
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name") and len(event["args"]) == 1
            assert not tracks  # names come first
            if event["name"] == "thread_name":
                named[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["tid"], int) and isinstance(event["dur"], int) and event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t") and (event["pid"], event["tid"]) in named
    assert set(tracks) <= set(named) and len({tid for _, tid in named}) == len(named)
    for spans in tracks.values():
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(sorted(spans)))
    return list(trace["traceEvents"])


def job(rank: int, number: int, kind: str, began: float, seconds: float, ended: str = "result") -> dict[str, Any]:
    role = "score" if kind == "score" else "explore"
    return {"event": "job", "rank": rank, "job": number, "role": role, "kind": kind, "began": began,
            "seconds": seconds, "ended": ended, "waiting": {"explore": 3 - number, "score": number}}  # fmt: skip


def shift(rank: int, role: str, wanted: str | None = None, error: str | None = None) -> dict[str, Any]:
    return {"event": "shift", "rank": rank, "role": role, "wanted": wanted or role, "seconds": 0.5,
            "of_which_shifting_s": 0.25, "error": error}  # fmt: skip


def decision(role: str | None, *orders: tuple[int, str], reason: str = "the best candidate pays") -> dict[str, Any]:
    plan = role and {"role": role, "up": [0], "down": [], "benefit": 12.0, "penalty": 0.5}
    return {"event": "decision", "orders": orders, "reason": reason, "plan": plan, "candidates": [{"num_up": 1}]}


LINES: list[tuple[float, dict[str, Any]]] = [
    (10.0, decision("explore", (0, "explore"), (1, "explore"))),
    (10.5, shift(0, "explore")),
    (10.5, shift(1, "explore")),
    (12.5, job(0, 1, "explore", 10.5, 2.0)),
    (12.6, decision("score", (0, "score"))),
    (12.8, shift(0, "explore", "score", "role score did not come up, explore is back: no <room>")),
    (13.0, {"event": "raised", "rank": 1, "job": 2, "role": "explore", "error": "RuntimeError: out of memory"}),
    (13.0, job(1, 2, "explore", 10.5, 2.5, "raised")),
    (13.5, shift(0, "score")),
    (14.0, job(0, 3, "score", 13.5, 0.5)),
    (14.5, {"event": "quarantine", "rank": 1, "error": "process 1: no room"}),
    (15.0, decision("train", reason="the batch is complete")),
    (15.5, shift(0, "train")),
    (15.5, shift(1, "train")),
    (18.0, {"event": "phase", "name": "update", "began": 16.0, "seconds": 2.0}),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A step as LINES say, and half of another."""
    now = [0.0]
    monkeypatch.setattr("solrl.decisions.time.time", lambda: now[0])
    with DecisionLog(tmp_path, 0) as log:
        for log.step, since in ((1, 0.0), (2, 1000.0)):
            for time, line in LINES[: 15 if log.step == 1 else 8]:
                now[0] = time + since
                log({**line, "began": line["began"] + since} if "began" in line else line)
    return tmp_path


def test_spans_are_what_the_log_says(run: Path) -> None:
    first, second = read_steps(run)
    check_steps([first, second])
    assert (first.number, first.began, first.ended, first.num_processes) == (1, 10.0, 18.0, 2)
    assert [(s.kind, s.began, s.ended) for s in first.roles if s.rank == 0] == [
        ("train", 10.0, 10.5), ("explore", 10.5, 13.5), ("score", 13.5, 15.5), ("train", 15.5, 18.0)
    ]  # fmt: skip
    assert [(s.kind, s.began) for s in first.busy if s.rank == 1] == [
        ("shift", 10.25), ("explore", 10.5), ("shift", 15.25), ("update", 16.0)
    ]  # fmt: skip
    by_kind = first.busy_seconds()
    assert by_kind == {"explore": 4.5, "score": 0.5, "update": 4.0, "shift": 6 * 0.25, "idle": 16 - 10.5}
    assert first.num_done("explore", "regenerate") == 1 and first.num_done("score") == 1  # one of two raised
    assert first.queues[0] == (12.5, {"explore": 2, "score": 1})


def test_the_report_draws_them_and_names_what_went_wrong(run: Path) -> None:
    text = roles_section(run)
    page = Page(text.replace("<rect ", "<img ").replace("</rect>", ""))  # so that titles are words of the page
    words = page.text
    assert "Who did what: the last 2 steps" in words and "process 1" in words and "wait to be scored, up to 3" in words
    assert "a role did not come up" in words and "1 jobs raised" not in words and "2 jobs raised" in words
    assert "No jobs any more went to process 1." in words
    assert "process 0 to score" in words.lower() and "no &lt;room&gt;" in text
    rects = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len([r for r in rects if "work" in r["class"]]) == sum(len(step.busy) for step in read_steps(run))
    assert all(0 <= float(r["x"]) <= 1000 and float(r["width"]) > 0 for r in rects)
    assert roles_section(run / "elsewhere") == ""


def test_the_trace_is_what_perfetto_reads_and_holds_every_span(run: Path) -> None:
    events = check_trace(write_trace(run, run / "deep" / "trace.json"))
    steps = read_steps(run)
    named = [event for event in events if event["ph"] == "X"]
    assert len(named) == sum(len(step.busy) + len(step.roles) + 1 for step in steps)
    spans: list[Span] = sorted((span for step in steps for span in step.busy), key=lambda s: (s.rank, s.began))
    work = [event for event in named if event["cat"] in ("job", "shift", "phase")]
    assert [event["dur"] for event in work] == [pytest.approx(1e6 * span.seconds, abs=1) for span in spans]
    assert {event["name"] for event in events if event["ph"] == "i"} >= {"quarantine: process 1: no room"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} >= {"process 0", "process 1"}


def test_whatever_the_clocks_say_a_track_comes_one_after_the_other(tmp_path: Path) -> None:
    """Roles that touch between two microseconds, and clocks of two machines that are a second apart."""
    chance = random.Random(0)
    edges = sorted(chance.uniform(0, 1e-4) for _ in range(500))
    roles = [Span(0, "explore", one, two, {}) for one, two in itertools.pairwise(edges)]
    jobs = [Span(0, "score", began, began + chance.uniform(0, 2), {"event": "job"}) for began in range(9)]
    step = Step(1, 0.0, 10.0, 1, roles, jobs, [], [])
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events("run", [step]))}))
    found = [event for event in check_trace(path) if event["ph"] == "X"]
    assert len(found) == len(roles) + len(jobs) + 1
    assert sum(event["dur"] for event in found if event["cat"] == "role") == round(1e6 * edges[-1]) - round(
        1e6 * edges[0]
    )


def test_the_command_writes_beside_the_run_and_says_what_has_no_timeline(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "trace.json")
    empty = tmp_path / "colocated"
    empty.mkdir()
    assert main(["trace", str(empty)]) == 2
    assert "it ran in mode colocated" in capsys.readouterr().err


def test_a_line_that_a_kill_cut_off_is_dropped_and_any_other_is_an_error(run: Path) -> None:
    path = run / "decisions.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert len(read_decisions(run)) == len(whole.splitlines()) - 1
    with DecisionLog(run, 1) as log:
        log({"event": "more"})
    assert {line["step"] for line in read_decisions(run)} == {1} and read_decisions(run)[-1]["event"] == "more"
    path.write_text("nonsense\n" + whole)
    with pytest.raises(SolrlError, match="line 1 is no decision"):
        read_decisions(run)
