"""AWM, Flow-GRPO, DanceGRPO and online DPO: losses and gradients worked by hand in plain floats."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from solrl.objectives.awm import Weighting, awm_loss
from solrl.objectives.dpo import dpo_loss
from solrl.objectives.trajectory import trajectory_loss
from solrl.sde import StepFn, dance_sde, flow_cps, flow_sde

EXACT = {"atol": 1e-6, "rtol": 1e-6}


def row(*values: float) -> Tensor:
    """A sample of as many dimensions."""
    return torch.tensor([values])


def one(value: float) -> Tensor:
    return torch.tensor([value])


def double(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def close(found: Tensor, *wanted: float) -> None:
    torch.testing.assert_close(found.detach().double().flatten(), torch.tensor(wanted, dtype=torch.float64), **EXACT)


# AWM: v = (1.5, .6), v_old = (1.4, .8), target (1, 1), sigma .8, v_reference (1.2, .6)
# m = (.25 + .16) / 2 = .205, m_old = (.16 + .04) / 2 = .1, dm/dv = (.5, -.4)
AWM_LOG_PROBS = {
    # name: (l, l_old, dl/dm)
    "uniform": (-0.205, -0.1, -1.0),
    "t": (-0.205 * 0.8, -0.1 * 0.8, -0.8),
    "t2": (-0.205 * 0.64, -0.1 * 0.64, -0.64),
    "huber": (
        -(math.sqrt(0.205 + 1e-10) - 1e-5) * 0.8,
        -(math.sqrt(0.1 + 1e-10) - 1e-5) * 0.8,
        -0.8 * 0.5 / math.sqrt(0.205 + 1e-10),
    ),
    "ghuber": (
        -((0.205 + 1e-10) ** 0.25 - 1e-10**0.25) * 0.8 / 0.25,
        -((0.1 + 1e-10) ** 0.25 - 1e-10**0.25) * 0.8 / 0.25,
        -0.8 * (0.205 + 1e-10) ** -0.75,
    ),
}


@pytest.mark.parametrize("weighting", AWM_LOG_PROBS)
def test_awm_by_hand(weighting: Weighting) -> None:
    velocity = row(1.5, 0.6).requires_grad_()
    policy, kl, error, clipped = awm_loss(
        velocity, row(1.4, 0.8), row(1.0, 1.0), one(0.8), one(0.5),
        reference_velocity=row(1.2, 0.6), weighting=weighting, power=0.25, old_weight=0.3,
    )  # fmt: skip
    log_prob, old_log_prob, slope = AWM_LOG_PROBS[weighting]
    ratio = math.exp(log_prob - old_log_prob)
    close(policy, -0.5 * ratio + 0.3 * (0.1**2 + 0.2**2) / 2)
    close(kl, 0.3**2 / 2)
    close(error, 1 - ratio)
    close(clipped, 0.0)
    (gradient,) = torch.autograd.grad(policy.sum(), velocity)
    pull = -0.5 * ratio * slope
    close(gradient, pull * 0.5 + 0.3 * 0.1, pull * -0.4 + 0.3 * -0.2)


def test_awm_clips_the_ratio() -> None:
    velocity = row(1.5, 0.6).requires_grad_()
    policy, _, _, clipped = awm_loss(
        velocity, row(1.4, 0.8), row(1.0, 1.0), one(0.8), one(-0.5), clip_range=0.01, weighting="uniform", old_weight=0
    )
    close(policy, 0.5 * 0.99)  # ratio exp(-.105) < .99, and a bad sample need not become less likely still
    close(clipped, 1.0)
    (gradient,) = torch.autograd.grad(policy.sum(), velocity)
    close(gradient, 0.0, 0.0)


# Policy gradients: x = (.8, 0), v = (.3, .1), v_old = (.25, .1), v_reference = (.1, .1), .5 -> .4, x' = (.75, .05)
X, V, V_OLD, V_REF, X_NEXT = (0.8, 0.0), (0.3, 0.1), (0.25, 0.1), (0.1, 0.1), (0.75, 0.05)


def hand_worked(keep: float, move: float, var: float, kl_var: float, scale: float) -> dict[str, object]:
    """A Gaussian step with mean keep x + move v, log_prob -scale (x' - mean)^2 averaged, KL over 2 kl_var."""
    error, old_error, slope = 0.0, 0.0, []
    for x, v, v_old, x_next in zip(X, V, V_OLD, X_NEXT, strict=True):
        error += (x_next - keep * x - move * v) ** 2 / 2
        old_error += (x_next - keep * x - move * v_old) ** 2 / 2
        slope.append(scale * (x_next - keep * x - move * v) * move)
    return {
        "ratio": math.exp(-scale * (error - old_error)),
        "slope": slope,  # of the log-probability in v: 2 scale (x' - mean) move / 2
        "kl": (move * (V[0] - V_REF[0])) ** 2 / 2 / (2 * kl_var),
        "old_log_prob": -scale * old_error - (0.5 * math.log(2 * math.pi * var) if scale != 1 else 0),
    }


CPS_STD = 0.4 * math.sin(0.35 * math.pi)
CPS_FRESH = math.sqrt(0.16 - CPS_STD**2)
CASES: dict[str, tuple[StepFn, dict[str, object]]] = {
    # s^2 = .49: keep = 1 - .049, move = -.1 (1 + .49 * .5)
    "flow sde": (
        partial(flow_sde, noise_level=0.7, second_sigma=0.9),
        hand_worked(0.951, -0.1245, 0.049, 0.49, 1 / 0.098),
    ),
    # (1 - .4)(x - .5 v) + fresh (x + .5 v)
    "flow cps": (
        partial(flow_cps, noise_level=0.7),
        hand_worked(0.6 + CPS_FRESH, -0.3 + 0.5 * CPS_FRESH, CPS_STD**2, CPS_STD**2, 1.0),
    ),
    # pull = -.5 * .09 * .1 / .25 = -.018 of .5 x + .25 v
    "dance": (partial(dance_sde, noise_level=0.3), hand_worked(1 - 0.009, -0.1 - 0.0045, 0.009, 0.009, 1 / 0.018)),
}


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("case", CASES)
def test_policy_gradients_by_hand(case: str, advantage: float) -> None:
    step, hand = CASES[case]
    ratio, slope = float(hand["ratio"]), hand["slope"]  # type: ignore[arg-type]
    for clip_range in (0.5, abs(ratio - 1) / 2):
        velocity = row(*V).requires_grad_()
        policy, kl, error, clipped, rollout = trajectory_loss(
            velocity, row(*V_OLD), row(*X), row(*X_NEXT), double(0.5), double(0.4), one(0.1), one(advantage),
            step=step, clip_range=clip_range, reference_velocity=row(*V_REF),
        )  # fmt: skip
        is_clipped = clip_range < 0.5
        bound = 1 + clip_range if ratio > 1 else 1 - clip_range
        binds = is_clipped and (ratio > 1) == (advantage > 0)  # max() lets a ratio move back into the range
        close(policy, -advantage * (bound if binds else ratio))
        close(kl, float(hand["kl"]))  # type: ignore[arg-type]
        close(error, abs(ratio - 1))
        close(clipped, float(is_clipped))
        close(rollout, abs(float(hand["old_log_prob"]) - 0.1))  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(policy.sum(), velocity)
        close(gradient, *(0.0 if binds else -advantage * ratio * s for s in slope))  # type: ignore[attr-defined]


def test_the_gradient_of_the_kl_term_by_hand() -> None:
    step, _ = CASES["flow sde"]
    velocity = row(*V).requires_grad_()
    kl = trajectory_loss(
        velocity, row(*V_OLD), row(*X), row(*X_NEXT), double(0.5), double(0.4), one(0.0), one(0.0),
        step=step, clip_range=0.1, reference_velocity=row(*V_REF),
    )[1]  # fmt: skip
    (gradient,) = torch.autograd.grad(kl.sum(), velocity)
    close(gradient, 0.1245**2 * 0.2 / (2 * 0.49), 0.0)  # d/dv of (m (v - v_ref))^2 / 2 / (2 s^2)


# DPO: targets (.2, 0) and (-.3, 0); winner: errors .045 and reference .02; loser: .08 and .045
PAIR = {
    "velocity": torch.tensor([[0.5, 0.0], [0.1, 0.0]]),
    "reference_velocity": torch.tensor([[0.4, 0.0], [0.0, 0.0]]),
    "target": torch.tensor([[0.2, 0.0], [-0.3, 0.0]]),
}


@pytest.mark.parametrize(("advantages", "sign"), [((1.0, -1.0), 1), ((-0.2, 0.2), -1)])
def test_dpo_by_hand(advantages: tuple[float, float], sign: int) -> None:
    velocity = PAIR["velocity"].clone().requires_grad_()
    policy, kl, prefers = dpo_loss(
        velocity, velocity, PAIR["target"], torch.tensor(advantages),
        reference_velocity=PAIR["reference_velocity"], beta=10.0,
    )  # fmt: skip
    margin = -5 * sign * ((0.045 - 0.02) - (0.08 - 0.045))
    loss = math.log(1 + math.exp(-margin))
    close(policy, loss, loss)
    close(kl, 0.1**2 / 2, 0.1**2 / 2)
    close(prefers, float(margin > 0), float(margin > 0))
    (gradient,) = torch.autograd.grad(policy.sum() / 2, velocity)
    slope = 5 * sign / (1 + math.exp(margin))  # of the loss in the winner's error; d error / dv = v - target
    close(gradient, slope * 0.3, 0.0, -slope * 0.4, 0.0)


def test_a_pair_without_a_winner_is_held_to_the_reference_and_teaches_nothing_else() -> None:
    velocity = torch.tensor([[0.5, 0.0], [0.1, 0.2]], requires_grad=True)
    policy, kl, prefers = dpo_loss(
        velocity, velocity, PAIR["target"], torch.zeros(2), reference_velocity=PAIR["reference_velocity"], beta=10.0
    )
    close(policy, 0.0, 0.0)
    close(prefers, 0.0, 0.0)
    close(kl, 0.1**2 / 2, (0.1**2 + 0.2**2) / 2)  # each sample's own
    (pull,) = torch.autograd.grad(kl.sum(), velocity, retain_graph=True)
    close(pull, 0.1, 0.0, 0.1, 0.2)  # v - v_reference
    (gradient,) = torch.autograd.grad(policy.sum(), velocity)
    assert not gradient.any()


def test_no_gradient_reaches_old_policy_or_reference() -> None:
    frozen = [row(*v).requires_grad_() for v in (V_OLD, V_REF)]
    step, _ = CASES["flow sde"]
    awm = awm_loss(row(*V).requires_grad_(), frozen[0], row(1.0, 1.0), one(0.8), one(0.5), reference_velocity=frozen[1])
    grpo = trajectory_loss(
        row(*V).requires_grad_(), frozen[0], row(*X), row(*X_NEXT), double(0.5), double(0.4), one(0.0), one(1.0),
        step=step, clip_range=0.1, reference_velocity=frozen[1],
    )  # fmt: skip
    (awm[0] + awm[1] + grpo[0] + grpo[1]).sum().backward()
    assert all(v.grad is None for v in frozen)
