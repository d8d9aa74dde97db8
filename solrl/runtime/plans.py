"""How the processes of a live run get their roles: by the planner, or by a fixed split."""

from __future__ import annotations

from solrl.runtime.controller import Controller, Plan
from solrl.runtime.planner import Decision, ShiftPlan, make_plan
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN, Working, other


def planned(controller: Controller) -> Decision | None:
    """The planner's decision (PivotRL section 7); a single process takes turns, since no split is possible."""
    if len(controller.healthy) == 1:
        return _taking_turns(controller)
    return make_plan(controller.state(), controller.planner_settings)


def fixed(num_score: int) -> Plan:
    """The last ``num_score`` healthy processes score, the others explore; with one left, it takes turns."""

    def plan(controller: Controller) -> Decision | None:
        ranks = controller.healthy
        if len(ranks) == 1:
            return _taking_turns(controller)
        first = max(len(ranks) - num_score, 1)
        wanted: list[tuple[Working, int]] = [(SCORE if n >= first else EXPLORE, n) for n in range(len(ranks))]
        missing = [(role, n) for role, n in wanted if controller.members[ranks[n]].role != role]
        if not missing:
            return None
        return Decision(ShiftPlan(EXPLORE, (), (), tuple(missing)), "the split is fixed")

    return plan


def _taking_turns(controller: Controller) -> Decision | None:
    """The only process takes the role that has work when its own has run dry."""
    (rank,) = controller.healthy
    role = controller.members[rank].role
    current = controller.schedulers[role].num_jobs if role != TRAIN else 0
    wanted = next((one for one in (SCORE, EXPLORE) if controller.schedulers[one].num_jobs), None)
    if current or wanted is None or wanted == role:
        return None
    down = () if role == TRAIN else ((other(wanted), 0),)
    return Decision(ShiftPlan(wanted, (0,), down), f"nothing is left to {role}" if down else "the step begins")
