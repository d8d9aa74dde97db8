"""The exported adapter draws what our policy draws, in diffusers, by the call on its card."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from solrl.config import Config
from solrl.errors import SolrlError
from solrl.export import WEIGHTS, export_lora
from solrl.groups import noise
from solrl.models.adapters import adapter, lora_state
from solrl.models.base import load_policy
from solrl.samplers import sample
from solrl.types import LoraPair, Policy

PROMPT = "a red circle left of a blue square"
CONFIG = Config.model_validate(
    {
        "model": {"path": "tiny_flux", "height": 32, "width": 32, "max_text_tokens": 16, "guidance": 1.5},
        "lora": {"rank": 4, "alpha": 6, "targets": ["to_q", "to_out.0", "proj_mlp", "norm_out.linear"]},
        "evaluate": {"num_steps": 3},
    }
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A policy whose adapter changes its images."""
    policy = load_policy(CONFIG, torch.device("cpu"))
    for number, pair in enumerate(lora_state(policy.transformer, "default").values()):
        pair.b.copy_(noise([number], pair.b.shape)[0] * 0.1)
    return policy


@torch.no_grad()
def draw(policy: Policy) -> Tensor:
    conditioning = policy.encode([PROMPT])
    clean = sample(
        lambda latents, sigma: policy.velocity(latents, sigma, conditioning),
        noise([5], policy.latent_shape),
        policy.sigmas(CONFIG.evaluate.num_steps),
        CONFIG.evaluate.solver,
    )
    return policy.decode(clean)


def draw_by_card(folder: Path, latents: Tensor) -> Tensor:
    """Run the code on the card, with our noise."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    lines = code[1].replace("path/to/this/folder", str(folder))
    lines = lines.replace('"a prompt",', f'{PROMPT!r}, latents=latents, output_type="pt",').replace(
        ".images[0]", ".images"
    )
    names: dict[str, Any] = {"latents": latents}
    exec(lines, names)
    return names["image"]


@pytest.fixture(scope="module")
def exported(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run") / "lora"
    export_lora(
        folder,
        lora_state(policy.transformer, "default"),
        CONFIG,
        step=12,
        weights="average of the policy (EMA)",
        rewards={"shapes": 0.51234},
    )
    yield folder


@pytest.mark.parametrize("has_metadata", [True, False])
def test_diffusers_draws_our_image_with_and_without_metadata(
    policy: Policy, exported: Path, tmp_path: Path, has_metadata: bool
) -> None:
    (tmp_path / "README.md").write_bytes((exported / "README.md").read_bytes())
    with safetensors.safe_open(exported / WEIGHTS, "pt") as file:
        assert "lora_adapter_metadata" in file.metadata()
    metadata = safetensors.safe_open(exported / WEIGHTS, "pt").metadata() if has_metadata else None
    safetensors.torch.save_file(safetensors.torch.load_file(exported / WEIGHTS), tmp_path / WEIGHTS, metadata)
    ours = draw(policy)
    with adapter(policy.transformer, None):
        assert (draw(policy) - ours).abs().max() > 0.1  # the adapter matters
    theirs = draw_by_card(tmp_path, noise([5], policy.latent_shape))
    assert (theirs - ours).abs().max() < 1e-4


def test_exporting_leaves_the_policy_as_it_is(policy: Policy, tmp_path: Path) -> None:
    pairs = lora_state(policy.transformer, "default")
    before = {name: (pair.a.clone(), pair.b.clone()) for name, pair in pairs.items()}
    export_lora(tmp_path, pairs, CONFIG, step=1, weights="policy")
    for name, pair in pairs.items():
        assert torch.equal(pair.a, before[name][0]) and torch.equal(pair.b, before[name][1])


def test_the_card_says_what_was_trained_and_how_well(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    for fact in ("average of the policy (EMA)", "after step 12", '"shapes"', "Rank 4", "| shapes | 0.5123 |", "seed 0"):
        assert fact in card
    assert sorted(path.name for path in exported.iterdir()) == ["README.md", WEIGHTS]


def test_a_later_export_replaces_the_earlier(tmp_path: Path) -> None:
    pair = LoraPair(torch.ones(2, 3), torch.ones(4, 2), 2.0)
    for step in (1, 2):
        export_lora(tmp_path, {"layer": pair}, CONFIG, step=step, weights="policy")
    assert "after step 2" in (tmp_path / "README.md").read_text()
    tensors = safetensors.torch.load_file(tmp_path / WEIGHTS)
    assert set(tensors) == {"transformer.layer.lora_A.weight", "transformer.layer.lora_B.weight"}
    assert torch.equal(tensors["transformer.layer.lora_B.weight"], torch.full((4, 2), 2.0))


def test_a_hub_model_is_called_by_its_id_on_a_gpu(tmp_path: Path) -> None:
    model = {"path": "black-forest-labs/FLUX.1-dev", "revision": "main", "guidance": 3.5}
    pair = LoraPair(torch.ones(2, 3), torch.ones(4, 2), 1.0)
    export_lora(tmp_path, {"layer": pair}, Config.model_validate({"model": model}), step=1, weights="policy")
    card = (tmp_path / "README.md").read_text()
    assert (
        'FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", revision="main", torch_dtype=torch.bfloat16)'
        in card
    )
    assert "base_model: black-forest-labs/FLUX.1-dev" in card and "guidance_scale=3.5" in card and '"cuda"' in card


def test_mixed_ranks_are_refused(tmp_path: Path) -> None:
    pairs = {f"layer{r}": LoraPair(torch.ones(r, 3), torch.ones(4, r), 1.0) for r in (2, 3)}
    with pytest.raises(SolrlError, match=r"ranks \[2, 3\]"):
        export_lora(tmp_path, pairs, CONFIG, step=1, weights="policy")
