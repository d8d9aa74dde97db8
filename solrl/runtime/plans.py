"""How the processes of a live run get their roles: by the planner, or by a fixed split."""

from __future__ import annotations

from solrl.runtime.controller import Controller, Plan
from solrl.runtime.planner import Decision, ShiftPlan, make_plan
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN, Working, other


def planned(controller: Controller) -> Decision | None:
    """The planner's decision (PivotRL section 7); where there is one replica at most, its processes take turns."""
    if len(controller.healthy) == controller.replica_size:
        return _taking_turns(controller)
    return make_plan(controller.state(), controller.planner_settings)


def fixed(num_score: int) -> Plan:
    """The last ``num_score`` healthy processes score, the others explore; one replica alone takes turns."""

    def plan(controller: Controller) -> Decision | None:
        ranks, size = controller.healthy, controller.replica_size
        if len(ranks) == size:
            return _taking_turns(controller)
        first = max(len(ranks) - num_score, size)
        wanted: list[tuple[Working, int]] = [(EXPLORE, n) for n in range(first)]
        wanted += [(SCORE, n // size) for n in range(first, len(ranks), size)]
        missing = [
            (role, slot)
            for role, slot in wanted
            if controller.members[ranks[slot * (size if role == SCORE else 1)]].role != role
        ]
        if not missing:
            return None
        return Decision(ShiftPlan(EXPLORE, (), (), tuple(missing)), "the split is fixed")

    return plan


def scoring(controller: Controller) -> Decision | None:
    """As many replicas score as there is work for; nobody explores."""
    size = controller.replica_size
    leaders = controller.healthy[::size]
    idle = [slot for slot, rank in enumerate(leaders) if controller.members[rank].role != SCORE]
    missing = idle[: max(controller.schedulers[SCORE].num_jobs - len(leaders) + len(idle), 0)]
    return Decision(ShiftPlan(SCORE, tuple(missing), ()), "only scores are missing") if missing else None


def _taking_turns(controller: Controller) -> Decision | None:
    """The only replica takes the role that has work when its own has run dry."""
    ranks = controller.healthy
    role = controller.members[ranks[0]].role
    current = controller.schedulers[role].num_jobs if role != TRAIN else 0
    wanted = next((one for one in (SCORE, EXPLORE) if controller.schedulers[one].num_jobs), None)
    if current or wanted is None or wanted == role:
        return None
    up = tuple(range(len(ranks) if wanted == EXPLORE else 1))
    down = () if role == TRAIN else ((other(wanted), 0),)
    return Decision(ShiftPlan(wanted, up, down), f"nothing is left to {role}" if down else "the step begins")
