"""Each model family against diffusers itself, on tiny random models of the real classes."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from solrl.checkpoint import Checkpoint
from solrl.export import checkpoint_weights, export_checkpoint, export_lora
from solrl.groups import noise
from solrl.learner import Learner
from solrl.models import adapter, load_policy, lora_state
from solrl.models.adapters import WEIGHTS
from solrl.models.base import DiffusersPolicy
from solrl.quant.backends import FULL
from solrl.quant.trees import RolloutTrees
from solrl.samplers import sample
from solrl.train import train
from solrl.types import SolrlError, UsageError
from tests.families import FAMILIES, diffusers_call, family_config, save_random_pipeline
from tests.parts import CPU, tiny_config

PROMPTS = ["a red circle left of a blue square", "a green cross above"]
CFG = pytest.mark.parametrize("cfg_scale", [1.0, 3.0])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("random")
    return {family: save_random_pipeline(family, root / family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared(folders: dict[str, Path]) -> Callable[..., DiffusersPolicy]:
    """(family, cfg_scale) -> a policy for tests that change nothing."""
    return functools.cache(lambda family, scale=1.0: load(family, folders, model={"cfg_scale": scale}))


def load(family: str, folders: dict[str, Path], **sections: dict[str, Any]) -> DiffusersPolicy:
    policy = load_policy(family_config(family, folders[family], **sections), CPU)
    assert isinstance(policy, DiffusersPolicy)
    policy.pipeline.set_progress_bar_config(disable=True)
    return policy


def adapt(policy: DiffusersPolicy) -> None:
    """Give the adapter weights that change every layer."""
    for number, pair in enumerate(lora_state(policy.transformer, "default").values()):
        pair.b.copy_(noise([number], pair.b.shape)[0] * 0.1)


@torch.no_grad()
def velocity(policy: DiffusersPolicy, prompts: list[str] = PROMPTS) -> Tensor:
    return policy.velocity(noise([1, 2], policy.latent_shape), torch.tensor([0.3, 0.9]), policy.encode(prompts))


@torch.no_grad()
def draw(policy: DiffusersPolicy, prompts: list[str] = PROMPTS) -> Tensor:
    """Clean latents after four Euler steps from fixed noise."""
    conditioning = policy.encode(prompts)
    start = noise(range(len(prompts)), policy.latent_shape)
    return sample(lambda x, sigma: policy.velocity(x, sigma, conditioning), start, policy.sigmas(4), "euler")


def test_our_velocity_is_the_pipelines_own_transformer_call(
    family: str, shared: Callable[..., DiffusersPolicy]
) -> None:
    policy = shared(family)
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor]) -> None:
        latents = args[0] if args else kwargs["hidden_states"]
        calls.append((latents.clone(), kwargs["timestep"] / (1 if family == "flux" else 1000), output[0]))

    with policy.transformer.register_forward_hook(record, with_kwargs=True):
        start = noise([0, 1], policy.latent_shape)
        policy.pipeline(PROMPTS, latents=start, **diffusers_call(policy_config(policy), policy.sigmas(3)))
    conditioning = policy.encode(PROMPTS)
    assert len(calls) == 3
    for latents, sigma, output in calls:
        with torch.no_grad():
            ours = policy.velocity(latents, sigma, conditioning)
        torch.testing.assert_close(ours, output, atol=1e-6, rtol=1e-5)


def policy_config(policy: DiffusersPolicy) -> Any:
    return family_config(policy.model.family, policy.model.path, model={"cfg_scale": policy.model.cfg_scale})


@CFG
def test_our_euler_rollout_equals_the_diffusers_pipeline(
    family: str, shared: Callable[..., DiffusersPolicy], cfg_scale: float
) -> None:
    policy = shared(family, cfg_scale)
    start = noise(range(2), policy.latent_shape)
    call = diffusers_call(policy_config(policy), policy.sigmas(4))
    theirs = policy.pipeline(PROMPTS, latents=start, output_type="latent", **call).images
    ours = draw(policy)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    pictures = policy.pipeline(PROMPTS, latents=start, output_type="pt", **call).images
    torch.testing.assert_close(policy.decode(ours), pictures, atol=1e-5, rtol=0)


def test_cfg_moves_away_from_the_empty_prompt_with_gradient_through_both(
    family: str, shared: Callable[..., DiffusersPolicy]
) -> None:
    plain, guided = shared(family), shared(family, 3.0)
    empty, prompted = velocity(plain, ["", ""]), velocity(plain)
    torch.testing.assert_close(velocity(guided), empty + 3.0 * (prompted - empty), atol=1e-6, rtol=1e-5)
    assert (velocity(guided) - prompted).abs().max() > 1e-4

    def gradient(policy: DiffusersPolicy, prompt: str) -> Tensor:
        output = policy.velocity(noise([1], policy.latent_shape), torch.tensor([0.5]), policy.encode([prompt]))
        trained = [p for p in policy.transformer.parameters() if p.requires_grad]
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(output.sum(), trained)])

    ours, away, towards = gradient(guided, PROMPTS[0]), gradient(plain, ""), gradient(plain, PROMPTS[0])
    torch.testing.assert_close(ours, 3.0 * towards - 2.0 * away, atol=1e-3, rtol=1e-3)
    assert (ours - 3.0 * towards).abs().max() > 0.1


@CFG
def test_an_exported_adapter_draws_our_image_by_the_call_on_its_card(
    family: str, folders: dict[str, Path], cfg_scale: float, tmp_path: Path
) -> None:
    policy = load(family, folders, model={"cfg_scale": cfg_scale})
    before = policy.decode(draw(policy, PROMPTS[:1]))
    adapt(policy)
    ours = policy.decode(draw(policy, PROMPTS[:1]))
    assert (ours - before).abs().max() > 1e-2
    export_lora(tmp_path, lora_state(policy.transformer, "default"), policy_config(policy), step=1, weights="policy")
    assert (drawn_by_card(tmp_path, policy) - ours).abs().max() < 1e-4


def drawn_by_card(folder: Path, policy: DiffusersPolicy) -> Any:
    """The image of the first prompt by the code on an export's card."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    lines = code[1].replace("path/to/this/folder", str(folder)).replace('pipe.to("cuda")\n', "")
    lines = lines.replace('"a prompt",', f'{PROMPTS[0]!r}, latents=latents, output_type="pt",')
    names: dict[str, Any] = {"latents": noise([0], policy.latent_shape)}
    exec(lines.replace(".images[0]", ".images"), names)
    return names["image"]


def test_an_exported_transformer_draws_our_image_by_the_call_on_its_card(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    sections: dict[str, dict[str, Any]] = {"lora": {"enabled": False}, "train": {"old_decay_rate": 0.0}}
    policy, config = load(family, folders, **sections), family_config(family, folders[family], **sections)
    learner = Learner(policy, config)
    before = policy.decode(draw(policy, PROMPTS[:1]))
    with torch.no_grad():
        for number, weight in enumerate(learner.parameters):
            weight += noise([number], weight.shape)[0] * 0.02
    ours = policy.decode(draw(policy, PROMPTS[:1]))
    assert (ours - before).abs().max() > 1e-2
    checkpoint = Checkpoint(1, learner.state_dict())
    path = export_checkpoint(tmp_path, checkpoint, config, raw=True)
    assert load_file(path).keys() == policy.transformer.state_dict().keys()
    assert (drawn_by_card(tmp_path, policy) - ours).abs().max() < 1e-4
    weights = checkpoint_weights(checkpoint, config, "ema")
    assert weights.keys() == dict(policy.transformer.named_parameters()).keys()


def test_a_run_starts_from_an_exported_adapter(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    trained = load(family, folders)
    adapt(trained)
    config = policy_config(trained)
    export_lora(tmp_path, lora_state(trained.transformer, "default"), config, step=1, weights="policy")
    started = load(family, folders, model={"init_lora": str(tmp_path)}, lora={"rank": 4, "alpha": 12})
    torch.testing.assert_close(velocity(started), velocity(trained), atol=1e-6, rtol=1e-5)
    with adapter(started.transformer, "old"):
        torch.testing.assert_close(velocity(started), velocity(trained), atol=1e-6, rtol=1e-5)
    with adapter(started.transformer, None), adapter(trained.transformer, None):
        assert torch.equal(velocity(started), velocity(trained))
    with pytest.raises(UsageError, match=r"has rank 4, lora\.rank is 8"):
        load(family, folders, model={"init_lora": str(tmp_path)}, lora={"rank": 8})
    with pytest.raises(UsageError, match=r"adapts other layers.*set lora\.targets"):
        load(family, folders, model={"init_lora": str(tmp_path)}, lora={"rank": 4, "targets": ["to_q"]})
    with pytest.raises(UsageError, match=rf"{WEIGHTS} cannot be read"):
        load(family, folders, model={"init_lora": str(tmp_path / "nowhere")})


def test_the_scale_of_another_tools_export_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    """peft and diffusers write lora_alpha beside unscaled weights, and no scale means 1."""
    import safetensors.torch

    policy = load("sd3", folders)
    adapt(policy)
    pairs = lora_state(policy.transformer, "default")
    tensors = {f"transformer.{name}.lora_A.weight": pair.a for name, pair in pairs.items()}
    tensors |= {f"transformer.{name}.lora_B.weight": pair.b for name, pair in pairs.items()}
    made = {"transformer.r": 4, "transformer.lora_alpha": 6}
    safetensors.torch.save_file(tensors, tmp_path / WEIGHTS, {"lora_adapter_metadata": json.dumps(made)})
    started = load("sd3", folders, model={"init_lora": str(tmp_path)}, lora={"rank": 4, "alpha": 4})
    torch.testing.assert_close(velocity(started), velocity(policy), atol=1e-6, rtol=1e-5)
    safetensors.torch.save_file(tensors, tmp_path / WEIGHTS)
    unscaled = load("sd3", folders, model={"init_lora": str(tmp_path)}, lora={"rank": 4, "alpha": 4})
    for name, pair in lora_state(unscaled.transformer, "default").items():
        assert torch.equal(pair.b, pairs[name].b)


def test_gradient_checkpointing_changes_no_gradient(family: str, folders: dict[str, Path]) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = load(family, folders, model={"gradient_checkpointing": checkpointing})
        adapt(policy)
        seen: list[int] = []
        block = policy.transformer.get_submodule("transformer_blocks.0")
        with block.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1)):
            conditioning = policy.encode(PROMPTS)
            latents = noise([1, 2], policy.latent_shape)
            policy.velocity(latents, torch.tensor([0.3, 0.9]), conditioning).square().sum().backward()
        assert len(seen) == 1 + checkpointing, "a checkpointed block runs again in the backward pass"
        gradients.append([p.grad for p in policy.transformer.parameters() if p.requires_grad])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, atol=1e-7, rtol=1e-6)


def test_the_rollout_tree_draws_what_the_adapter_draws(family: str, folders: dict[str, Path]) -> None:
    policy = load(family, folders, model={"cfg_scale": 2.0})
    adapt(policy)
    trees = RolloutTrees(policy.transformer, FULL)
    assert (velocity(policy.sibling(trees.rollout)) - velocity(policy)).abs().max() > 1e-2, "still the base"
    trees.requantize_(lora_state(policy.transformer, "default"))
    torch.testing.assert_close(velocity(policy.sibling(trees.rollout)), velocity(policy), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("flux", {"to_q", "to_k", "to_v", "to_out.0"}),
        ("sana", {"to_q", "to_k", "to_v", "to_out.0"}),
        ("sd3", {"to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}),
    ],
)
def test_the_papers_layers_are_adapted_by_default(
    family: str, kinds: set[str], shared: Callable[..., DiffusersPolicy]
) -> None:
    names = lora_state(shared(family).transformer, "default")
    assert {re.sub(r".*attn\d?\.", "", name) for name in names} == kinds


def test_padding_reaches_no_velocity_of_sana(shared: Callable[..., DiffusersPolicy]) -> None:
    policy = shared("sana")
    conditioning = policy.encode(PROMPTS)
    assert conditioning.mask is not None and conditioning.mask.sum(1).tolist() == [9, 5]
    latents, sigma = noise([1, 2], policy.latent_shape), torch.tensor([0.3, 0.9])
    with torch.no_grad():
        before = policy.velocity(latents, sigma, conditioning)
        conditioning.embeds[conditioning.mask == 0] = 7.0
        assert torch.equal(policy.velocity(latents, sigma, conditioning), before)
        conditioning.embeds[conditioning.mask == 1] = 7.0
        assert not torch.equal(policy.velocity(latents, sigma, conditioning), before)


@pytest.mark.parametrize(("family", "embeds", "model"), [("flux", False, "schnell"), ("sana", True, "Sprint")])
def test_step_distilled_models_are_refused(family: str, embeds: bool, model: str, tmp_path: Path) -> None:
    folder = save_random_pipeline(family, tmp_path / family, guidance_embeds=embeds)
    with pytest.raises(SolrlError, match=f"step-distilled, as {model}"):
        load_policy(family_config(family, folder), CPU)


def test_image_sizes_the_model_cannot_take_are_refused(family: str, folders: dict[str, Path]) -> None:
    pixels = {"flux": 4, "sd3": 4, "sana": 2}[family]
    policy = load(family, folders, model={"height": 40})
    assert policy.decode(torch.zeros(1, *policy.latent_shape)).shape == (1, 3, 40, 32)
    tall = family_config(family, folders[family]).model.model_copy(update={"height": 33})
    with pytest.raises(SolrlError, match=f"must be multiples of {pixels}"):
        type(policy)(tall, CPU)


def test_another_familys_folder_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds a FluxPipeline.*sd3 needs a StableDiff.*set model\.family = flux"):
        load_policy(family_config("sd3", folders["flux"]), CPU)
    shutil.copytree(folders["flux"], tmp_path / "other")
    index = json.loads((tmp_path / "other" / "model_index.json").read_text())
    (tmp_path / "other" / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(UsageError, match="no family takes a StableDiffusionPipeline; known are FluxPipeline"):
        load_policy(family_config("flux", tmp_path / "other"), CPU)


@pytest.mark.parametrize(
    "missing", ["transformer/diffusion_pytorch_model.safetensors", "vae/config.json", "text_encoder/model.safetensors"]
)
def test_a_missing_file_is_named(missing: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["sd3"], tmp_path / "cut")
    (folder / missing).unlink()
    with pytest.raises(
        SolrlError, match=f"cannot be loaded: .*{Path(missing).name}.*{missing.split('/')[0]}"
    ) as caught:
        load_policy(family_config("sd3", folder), CPU)
    assert "\n" not in str(caught.value)


def test_damaged_weights_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["sd3"], tmp_path / "damaged")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SolrlError, match=r"damaged: copy or download it again"):
        load_policy(family_config("sd3", folder), CPU)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no/such/folder", "it is no hub id"),
        ("someone/something", "not in the cache.*HF_HUB_OFFLINE is set: run `hf download someone"),
    ],
)
def test_a_model_that_is_not_here_is_named_with_the_remedy(path: str, says: str) -> None:
    with pytest.raises(SolrlError, match=f"model.path {path} cannot be loaded: there is no folder {path}.*{says}"):
        load_policy(family_config("flux", path), CPU)


@pytest.mark.slow
def test_a_quantized_run_with_cfg_trains_and_its_export_draws_the_same_in_diffusers(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = {"family": family, "path": str(folders[family]), "cfg_scale": 2.0}
    base = tiny_config()
    config = tiny_config(
        tmp_path / "run",
        model=base.model.model_dump() | model,
        explore={"precision": "emulated_nvfp4"},
        train={"num_steps": 2, "learning_rate": 0.03},
        reward={"name": "tests.parts:Redness"},
    )
    folder = train(config)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "loss/policy" in line] == [1, 2]
    start = {"init_lora": str(folder / "lora"), "cfg_scale": 2.0, "guidance": base.model.guidance}
    policy = load(family, folders, model=start, lora={"rank": 4})
    with adapter(policy.transformer, None):
        before = policy.decode(draw(policy))
    ours = policy.decode(draw(policy))
    assert (ours - before).abs().max() > 5e-3, "two steps moved the images"
    pipeline = type(policy.pipeline).from_pretrained(folders[family])
    pipeline.load_lora_weights(folder / "lora")
    call = diffusers_call(config, policy.sigmas(4))
    theirs = pipeline(PROMPTS, latents=noise(range(2), policy.latent_shape), output_type="pt", **call).images
    assert (theirs - ours).abs().max() < 1e-3


HUB = """
import http.server, os, sys, threading
ERRORS = {"gated": (403, "GatedRepo"), "absent": (404, "RepoNotFound"), "old": (404, "RevisionNotFound")}

class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        status, code = ERRORS[self.path.split("/")[1]]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "HF_HOME": sys.argv[1]}
import torch
from solrl.config import Config
from solrl.models import load_policy
from solrl.types import SolrlError

for name in ERRORS:
    model = {"path": f"{name}/model", "revision": "abc"}
    try:
        load_policy(Config.model_validate({"model": model}), torch.device("cpu"))
    except SolrlError as error:
        print(error)
"""


@pytest.mark.slow
def test_what_the_hub_refuses_is_said_in_one_line_with_the_remedy(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HUB, str(tmp_path)], capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert "gated/model cannot be loaded" in lines[0] and "accept the licence at hf.co/gated/model" in lines[0]
    assert "there is no folder absent/model" in lines[1] and "check the name" in lines[1]
    assert "it has no revision abc: check model.revision" in lines[2]
