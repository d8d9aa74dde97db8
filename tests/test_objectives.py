"""DiffusionNFT: hand-worked values and the identity its gradient obeys."""

import torch

from solrl.objectives.nft import nft_loss


def case(seed: int = 0, batch: int = 5) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    velocity, noised, clean, reference = torch.randn(4, batch, 6, 3, generator=generator)
    sigma = torch.rand(batch, generator=generator)
    advantages = torch.tensor([-4.0, -1.0, 0.0, 0.5, 4.9])
    return velocity, noised, clean, reference, sigma, advantages


def test_a_hand_worked_scalar() -> None:
    # x0+ = 2 - .5*1 = 1.5, error .5 -> .25/.5 = .5;  v- = 2*3 - 1 = 5: x0- = -.5, error -1.5 -> 2.25/1.5 = 1.5
    # r = clip(2)/10 + .5 = .7; policy = 5 (.7*.5 + .3*1.5) = 4;  kl = (1 - 4)^2 = 9
    one = [torch.tensor([[x]]) for x in (1.0, 3.0, 2.0, 1.0)]
    policy, kl = nft_loss(*one, torch.tensor([0.5]), torch.tensor([2.0]), reference_velocity=torch.tensor([[4.0]]))
    torch.testing.assert_close(policy, torch.tensor([4.0]))
    torch.testing.assert_close(kl, torch.tensor([9.0]))


def test_on_policy_gradient_is_the_advantage_times_the_positive_gradient() -> None:
    velocity, noised, clean, _, sigma, advantages = case()
    v = velocity.clone().requires_grad_()
    policy, _ = nft_loss(v, velocity, noised, clean, sigma, advantages)
    (gradient,) = torch.autograd.grad(policy.sum(), v)
    w = velocity.clone().requires_grad_()
    error = noised - sigma.view(-1, 1, 1) * w - clean
    weight = error.detach().abs().mean((1, 2)).view(-1, 1, 1)
    (positive,) = torch.autograd.grad((error.square() / weight).mean((1, 2)).sum(), w)
    torch.testing.assert_close(gradient, advantages.view(-1, 1, 1) * positive, atol=1e-6, rtol=1e-5)


def test_advantages_are_clipped() -> None:
    velocity, noised, clean, _, sigma, _ = case()
    inputs = (velocity, velocity + 0.1, noised, clean, sigma)
    at_clip, _ = nft_loss(*inputs, torch.full((5,), 5.0))
    beyond, _ = nft_loss(*inputs, torch.full((5,), 50.0))
    assert torch.equal(at_clip, beyond)


def test_beta_scales_the_positive_policy() -> None:
    velocity, noised, clean, _, sigma, _ = case()
    old = velocity + 0.3
    policy, _ = nft_loss(velocity, old, noised, clean, sigma, torch.full((5,), 5.0), beta=0.1)
    mixed = 0.1 * velocity + 0.9 * old
    alone, _ = nft_loss(mixed, mixed, noised, clean, sigma, torch.full((5,), 5.0))
    torch.testing.assert_close(policy, alone / 0.1)


def test_no_gradient_reaches_the_old_policy_or_the_reference() -> None:
    velocity, noised, clean, reference, sigma, advantages = case()
    old, reference = velocity.clone().requires_grad_(), reference.requires_grad_()
    policy, kl = nft_loss(
        velocity.requires_grad_(), old, noised, clean, sigma, advantages, reference_velocity=reference
    )
    (policy + kl).sum().backward()
    assert old.grad is None and reference.grad is None and velocity.grad is not None


def test_samples_do_not_influence_each_other() -> None:
    velocity, noised, clean, reference, sigma, advantages = case()
    policy, kl = nft_loss(velocity, velocity * 0.9, noised, clean, sigma, advantages, reference_velocity=reference)
    for i in range(5):
        rows = (t[i : i + 1] for t in (velocity, velocity * 0.9, noised, clean, sigma, advantages))
        one, one_kl = nft_loss(*rows, reference_velocity=reference[i : i + 1])
        torch.testing.assert_close(one, policy[i : i + 1])
        torch.testing.assert_close(one_kl, kl[i : i + 1])


def test_low_precision_velocities_give_a_float32_loss() -> None:
    velocity, noised, clean, _, sigma, advantages = case()
    policy, _ = nft_loss(velocity.bfloat16(), velocity.bfloat16(), noised, clean, sigma, advantages)
    assert policy.dtype == torch.float32
