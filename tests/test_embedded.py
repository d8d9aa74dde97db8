"""The embedded models with their real weights: small, obedient, trainable, and at home in diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from solrl_rewards import load_reward

from solrl.config import Config
from solrl.groups import noise
from solrl.models import adapter, load_policy
from solrl.models.base import DiffusersPolicy
from solrl.models.loading import ASSETS
from solrl.prompts import load_prompts
from solrl.samplers import sample
from solrl.settings import load_config
from solrl.train import train
from tests.families import diffusers_call
from tests.parts import CPU, tiny_config
from tests.test_processes import launch, same_bits

NAMES = ("tiny_flux", "tiny_sd3", "tiny_sana")


def load(config: Config) -> DiffusersPolicy:
    policy = load_policy(config, CPU)
    assert isinstance(policy, DiffusersPolicy)
    policy.pipeline.set_progress_bar_config(disable=True)
    return policy


@torch.no_grad()
def draw(policy: DiffusersPolicy, prompts: list[str], num_steps: int) -> torch.Tensor:
    conditioning = policy.encode(prompts)
    start = noise(range(len(prompts)), policy.latent_shape)
    clean = sample(lambda x, sigma: policy.velocity(x, sigma, conditioning), start, policy.sigmas(num_steps), "euler")
    return policy.decode(clean)


@pytest.mark.parametrize("name", NAMES)
def test_an_embedded_model_is_small(name: str) -> None:
    assert sum(file.stat().st_size for file in (ASSETS / name).rglob("*") if file.is_file()) <= 10_000_000


@pytest.mark.parametrize("name", NAMES)
def test_an_embedded_model_draws_what_its_prompts_say(name: str) -> None:
    """Its images please their own prompts more than the prompts of other images."""
    prompts = load_prompts("shapes_single")[:12]
    images = draw(load(load_config(name)), prompts, 6)
    reward = load_reward("shapes")
    own, others = reward(images, prompts), reward(images, prompts[1:] + prompts[:1])
    assert own.mean() > 0.5 and own.mean() > others.mean() + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("tiny_sd3", marks=pytest.mark.long), "tiny_sana"])
def test_two_processes_train_an_embedded_model_as_one_does_and_diffusers_draws_the_result(
    name: str, tmp_path: Path
) -> None:
    shipped = load_config(name)
    sections = {
        "model": shipped.model.model_dump(),
        "lora": {"targets": shipped.lora.targets},
        "train": {"num_steps": 2, "learning_rate": 0.03},
        "reward": {"name": "tests.parts:Redness"},
    }
    one = train(tiny_config(tmp_path / "on_1", **sections))
    same_bits(one, launch(tmp_path, 2, **sections))
    prompts = load_prompts("shapes_heldout")[:2]
    start = {"model": shipped.model.model_dump() | {"init_lora": str(one / "lora")}}
    policy = load(tiny_config(**(sections | start)))
    ours = draw(policy, prompts, 4)
    with adapter(policy.transformer, None):
        assert (draw(policy, prompts, 4) - ours).abs().max() > 5e-3, "two steps moved the images"
    pipeline = type(policy.pipeline).from_pretrained(ASSETS / name)
    pipeline.load_lora_weights(one / "lora")
    call = diffusers_call(shipped, policy.sigmas(4))
    theirs = pipeline(prompts, latents=noise(range(2), policy.latent_shape), output_type="pt", **call).images
    assert (theirs - ours).abs().max() < 1e-3
