"""Figure 16, and the common refinement of layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl.errors import SolrlError
from solrl.runtime.transfer import PlanCache, Signature, Transfer, plan_senders, refine

HOLDERS = {(w, s): ([0, 2] if s < 2 else [1, 3]) for w in (0, 1) for s in range(4)}
DEMANDS = [((w, s), gpu) for w in (0, 1) for s, gpu in ((0, 0), (2, 0), (1, 1), (3, 1))]


def cost(piece: tuple[int, int], sender: int, receiver: int) -> float:
    return 0.08 if sender == 2 else 0.10  # the GPUs are on CPU 2's node


def test_figure_16_the_papers_rule_gives_the_printed_rows() -> None:
    rows = []
    for count in range(6):
        _, busy = plan_senders(DEMANDS[:count], HOLDERS, cost, policy="paper")
        rows.append([round(busy.get(cpu, 0.0), 2) for cpu in range(4)])
    assert rows == [[0, 0, 0, 0], [0.1, 0, 0, 0], [0.1, 0.1, 0, 0], [0.1, 0.1, 0.08, 0], [0.1, 0.1, 0.08, 0.1],
                    [0.1, 0.1, 0.16, 0.1]]  # fmt: skip
    transfers, _ = plan_senders(DEMANDS[:5], HOLDERS, cost, policy="paper")
    assert [t.sender for t in transfers] == [0, 1, 2, 3, 2]


def test_local_first_never_crosses_the_fabric_for_what_the_node_holds() -> None:
    transfers, _ = plan_senders(DEMANDS, HOLDERS, cost, is_local=lambda sender, receiver: sender == 2)
    assert all(t.sender == 2 for t in transfers if 2 in HOLDERS[t.piece])  # type: ignore[index]
    assert {t.sender for t in transfers if 2 not in HOLDERS[t.piece]} == {1, 3}  # type: ignore[index]


def test_a_piece_that_nobody_holds_is_named() -> None:
    with pytest.raises(SolrlError, match="nobody holds w"):
        plan_senders([("w", 0)], {"w": []}, lambda *_: 1.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_atomic_slices_cover_once_and_no_cut_divides_them(rows: int, columns: int, by_row: int, by_column: int) -> None:
    def cuts(size: int, parts: int) -> list[tuple[int, int]]:
        edges = [size * k // parts for k in range(parts + 1)]
        return [(a, b) for a, b in pairwise(edges) if a < b]

    stored = [(cut, (0, columns)) for cut in cuts(rows, by_row)]
    wanted = [((0, rows), cut) for cut in cuts(columns, by_column)]
    found = refine((rows, columns), stored, wanted)
    cells = [(r, c) for (r0, r1), (c0, c1) in found for r in range(r0, r1) for c in range(c0, c1)]
    assert sorted(cells) == [(r, c) for r in range(rows) for c in range(columns)]
    for box in found:
        for layout in (stored, wanted):
            assert (
                sum(all(a <= x0 and x1 <= b for (x0, x1), (a, b) in zip(box, big, strict=True)) for big in layout) == 1
            )


def test_a_layout_that_cuts_outside_is_refused() -> None:
    with pytest.raises(SolrlError, match="dimension 1"):
        refine((4, 4), [((0, 4), (0, 5))])


def test_a_plan_is_made_once_until_anything_it_depends_on_changes() -> None:
    made: list[Signature] = []
    cache = PlanCache(max_plans=8)

    def plan(signature: Signature) -> tuple[Transfer, ...]:
        def make() -> list[Transfer]:
            made.append(signature)
            return plan_senders(DEMANDS, HOLDERS, cost, policy="paper")[0]

        return cache.plan(signature, make)

    first = Signature("policy", (0, 1), "tp=2", "ab12")
    assert plan(first) is plan(Signature("policy", (0, 1), "tp=2", "ab12"))
    assert list(plan(first)) == plan_senders(DEMANDS, HOLDERS, cost, policy="paper")[0]
    changes = ({"model": "judge"}, {"receivers": (0, 2)}, {"parallelism": "tp=1"}, {"links": "cd34"}, {"epoch": 1})
    others = [replace(first, **change) for change in changes]
    for other in others:
        plan(other)
    assert made == [first, *others]


def test_the_plans_used_last_are_the_ones_kept() -> None:
    made: list[str] = []
    cache = PlanCache(max_plans=2)
    for model in ("a", "b", "a", "c", "a", "b"):
        cache.plan(Signature(model, (0,), ""), lambda model=model: made.append(model) or [])  # type: ignore[misc]
    assert made == ["a", "b", "c", "b"]
