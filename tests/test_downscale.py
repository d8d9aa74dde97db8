"""Exploring smaller images: they begin as the full-size ones of their seeds do, and what is kept is drawn in full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from solrl.config import Config
from solrl.display import plan_lines
from solrl.flow import block_means, flux_sigmas
from solrl.groups import noise
from solrl.hardware import find_gpu
from solrl.models import load_policy
from solrl.plan import make_plan
from solrl.rollout import start_noise
from solrl.session import open_session
from solrl.settings import load_config
from solrl.train import run_step
from solrl.types import UsageError
from tests.parts import ALONE, CPU, never, stopwatch, tiny_config

FAMILIES = ("tiny_flux", "tiny_sd3", "tiny_sana")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_smaller_image_starts_from_the_block_means_of_its_seeds_noise(name: str) -> None:
    policy = load_policy(load_config(name), CPU)
    small, size = policy.smaller(2), (32, 32)
    start = start_noise(small, [(0, 5), (0, 6)])
    assert start.shape == (2, *small.latent_shape) and small.latent_shape != policy.latent_shape
    full = policy.unpack(noise([5, 6], policy.latent_shape), size)
    blocks = full.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).mean((3, 5))  # rows and columns of 2 x 2 blocks
    torch.testing.assert_close(small.unpack(start, (16, 16)), 2 * blocks)
    assert torch.equal(start_noise(policy, [(0, 5)]), noise([5], policy.latent_shape))


def test_block_means_of_standard_noise_are_standard_noise() -> None:
    small = block_means(noise([1], (16, 64, 64)), 4)
    assert small.shape == (1, 16, 16, 16)
    assert abs(float(small.mean())) < 0.05 and abs(float(small.std()) - 1) < 0.05
    assert torch.equal(block_means(torch.ones(1, 1, 2, 2), 1), torch.ones(1, 1, 2, 2))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_smaller_image_is_enlarged_to_the_size_that_rewards_know(name: str) -> None:
    small = load_policy(load_config(name), CPU).smaller(2)
    images = small.decode(torch.zeros(2, *small.latent_shape))
    assert images.shape == (2, 3, 32, 32) and float(images.min()) >= 0 and float(images.max()) <= 1


def test_fluxs_grid_is_that_of_the_smaller_image() -> None:
    policy = load_policy(load_config("tiny_flux"), CPU)
    policy.pipeline.scheduler.register_to_config(use_dynamic_shifting=True)
    assert torch.equal(policy.smaller(2).sigmas(6), flux_sigmas(6, 16))
    assert torch.equal(policy.sigmas(6), flux_sigmas(6, 64))


def test_only_what_is_explored_is_smaller(tmp_path: Path) -> None:
    def record(downscale: int):  # type: ignore[no-untyped-def]
        session = open_session(
            tiny_config(
                explore={"downscale": downscale},
                reward={"name": "tests.parts:Redness"},
                output={"audit_every_steps": 1},
                prompts={"per_step": 1},
            ),
            ALONE,
            never,
        )
        return session, run_step(session, 1, stopwatch())

    (small, mine), (_, theirs) = record(2), record(1)
    assert small.explorer.latent_shape == (16, 16) and small.rollout_policy.latent_shape == (64, 16)
    assert mine.proxy is not None and theirs.proxy is not None
    assert mine.proxy.values.shape == theirs.proxy.values.shape
    assert not torch.equal(mine.proxy.values, theirs.proxy.values)
    ((_, audited),), ((_, expected),) = mine.audits.items(), theirs.audits.items()
    assert torch.equal(audited.values, expected.values)  # regenerated in full in both


def test_what_is_trained_on_is_never_smaller_and_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"explore\.downscale needs regenerate\.enabled"):
        Config.model_validate({"explore": {"downscale": 2}, "regenerate": {"enabled": False}})
    policy = load_policy(load_config("tiny_flux", {"model.height": 40, "model.width": 40}), CPU)
    assert policy.smaller(2).latent_shape == (25, 16)
    with pytest.raises(UsageError, match=r"explore\.downscale = 4 makes 10 x 10: .* multiples of 4"):
        policy.smaller(4)


def test_a_plan_counts_the_smaller_images() -> None:
    seconds = [
        make_plan(load_config("tiny_flux", {"explore.downscale": factor}), find_gpu("h200"), 1).seconds
        for factor in (1, 2)
    ]
    full, small = (each["explore, decode, score"] for each in seconds)
    assert small < 0.5 * full
    assert seconds[0]["regenerate, decode, score"] == seconds[1]["regenerate, decode, score"]


def test_what_a_run_says_before_it_starts_names_the_smaller_size() -> None:
    def said(factor: int) -> str:
        config = load_config("tiny_flux", {"explore.downscale": factor, "model.height": 64})
        lines = plan_lines(config, device="", world_size=1, policy="", explorer="")
        return " ".join(" ".join(lines).split())

    assert ", at 16x32" in said(2)
    assert ", at " not in said(1)
