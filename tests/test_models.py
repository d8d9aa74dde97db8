"""The FLUX adapter against diffusers itself, and the adapters on it."""

from __future__ import annotations

import pytest
import torch

from solrl.groups import group_seeds, noise
from solrl.models import adapter, load_policy, lora_state
from solrl.models.flux import FluxPolicy
from solrl.samplers import sample
from solrl.types import SolrlError, UsageError
from tests.parts import CPU, tiny_config

PROMPTS = ["a red circle left of a blue square", "a green cross above a cyan triangle"]


@pytest.fixture(scope="module")
def policy() -> FluxPolicy:
    policy = load_policy(tiny_config(), CPU)
    assert isinstance(policy, FluxPolicy)
    return policy


def test_our_euler_rollout_equals_the_diffusers_pipeline(policy: FluxPolicy) -> None:
    start = noise(group_seeds(0, 1, 1, 2)[0], policy.latent_shape)
    conditioning = policy.encode(PROMPTS)
    with torch.no_grad():
        clean = sample(lambda x, s: policy.velocity(x, s, conditioning), start, policy.sigmas(4), "euler")
        ours = policy.decode(clean)
    policy.pipeline.set_progress_bar_config(disable=True)
    theirs = policy.pipeline(
        PROMPTS, latents=start, height=32, width=32, guidance_scale=1.0, num_inference_steps=4,
        max_sequence_length=12, output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_adapters_start_equal_to_the_base_and_to_each_other(policy: FluxPolicy) -> None:
    default, old = lora_state(policy.transformer, "default"), lora_state(policy.transformer, "old")
    assert len(default) == 24 and default.keys() == old.keys()
    for name, pair in default.items():
        assert torch.equal(pair.a, old[name].a) and not pair.b.any() and pair.scale == 2.0
        assert abs(float(pair.a.std()) - 0.5) < 0.1, "A ~ N(0, 1/rank)"


def test_a_run_seed_names_the_initial_adapter() -> None:
    first, again, other = (lora_state(load_policy(tiny_config(seed=s), CPU).transformer, "default") for s in (3, 3, 4))  # type: ignore[arg-type]
    name = next(iter(first))
    assert torch.equal(first[name].a, again[name].a) and not torch.equal(first[name].a, other[name].a)


def test_the_context_switches_adapters_and_restores_training() -> None:
    policy = load_policy(tiny_config(), CPU)
    conditioning, latents = policy.encode(PROMPTS), noise([1, 2], policy.latent_shape)

    def velocity() -> torch.Tensor:
        with torch.no_grad():
            return policy.velocity(latents, torch.full((2,), 0.5), conditioning)

    base = velocity()
    for pair in lora_state(policy.transformer, "default").values():
        pair.b.fill_(0.05)
    changed = velocity()
    with adapter(policy.transformer, "old"):
        assert torch.equal(velocity(), base)
        assert not any(p.requires_grad for p in policy.transformer.parameters())
    with adapter(policy.transformer, None):
        assert torch.equal(velocity(), base)
    assert torch.equal(velocity(), changed) and not torch.equal(changed, base)
    trained = [name for name, p in policy.transformer.named_parameters() if p.requires_grad]
    assert len(trained) == 48 and all(".default." in name for name in trained)


def test_adapters_are_float32_masters_on_a_bfloat16_base() -> None:
    policy = load_policy(tiny_config(model={"dtype": "bfloat16"}), CPU)
    frozen = {p.dtype for n, p in policy.transformer.named_parameters() if "lora_" not in n}
    pairs = [pair for name in ("default", "old") for pair in lora_state(policy.transformer, name).values()]
    assert frozen == {torch.bfloat16} and all(pair.a.dtype == pair.b.dtype == torch.float32 for pair in pairs)


def test_a_sibling_shares_everything_but_the_transformer(policy: FluxPolicy) -> None:
    other = torch.nn.Linear(1, 1)
    twin = policy.sibling(other)
    assert twin.transformer is other and policy.transformer is not other
    assert twin.vae is policy.vae and twin.text_encoder is policy.text_encoder and twin.latent_shape == (64, 16)


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ({"path": "no/such/folder"}, SolrlError, "model.path no/such/folder"),
        ({"path": "tests"}, SolrlError, "model_index.json is missing"),
        ({"family": "fluks"}, UsageError, "family 'fluks' is unknown"),
        ({"family": "nowhere:Policy"}, UsageError, "cannot be imported"),
    ],
)
def test_what_cannot_be_loaded_is_named(model: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        load_policy(tiny_config(model=model), CPU)
    assert "\n" not in str(caught.value)


def test_lora_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="match no layer"):
        load_policy(tiny_config(lora={"targets": ["to_z"]}), CPU)
