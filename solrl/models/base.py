"""What all model families share: loading, guidance, adapters, decoding.

Every policy's transformer carries two peft adapters of the same shape: "default" is the policy, "old" is old_policy,
which every rollout is drawn from. With adapters off it is the reference policy.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from solrl.config import Config, LoraConfig, ModelConfig, PromptsConfig
from solrl.flow import block_means
from solrl.groups import candidate_seed, noise
from solrl.models.encoders import TextEncoders, rests_on_host, warn_once
from solrl.models.skeleton import skeleton_pipeline
from solrl.plugins import find_class
from solrl.prompt_cache import PromptCache, cache_folder
from solrl.types import Conditioning, LoraPair, Policy, SolrlError, UsageError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
FAMILIES = {
    "flux": "solrl.models.flux:FluxPolicy",
    "sd3": "solrl.models.sd3:SD3Policy",
    "sana": "solrl.models.sana:SanaPolicy",
}
WEIGHTS = "pytorch_lora_weights.safetensors"
"""The file name that ``load_lora_weights`` looks for in a folder."""


class DiffusersPolicy(Policy):
    """A diffusers pipeline's transformer, encoders and decoder as a policy; a family adds its differences.

    With ``model.cfg_scale`` s > 1 there is classifier-free guidance wherever a velocity is asked for, in rollout, loss
    and evaluation alike: v(no prompt) + s (v(prompt) - v(no prompt)), from one call of twice the batch.

    Each prompt goes through the text encoders alone, so its encoding never depends on which others are asked for, or on
    what a cache holds. On a GPU 48 prompts of FLUX.1 take about half a second then (an estimate; a batch of them 0.3).
    """

    pipeline_class: Any
    """The diffusers class the folder must hold."""
    packing: int = 1
    """Latent pixels along a side that become one pixel of what the transformer takes."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.pipeline: Any = load_pipeline(self.pipeline_class, model, device)
        for name, part in self.pipeline.components.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
        self._set_shape()
        self.full_size, self.full_shape = (model.height, model.width), self.latent_shape
        self.encoders = TextEncoders(self.pipeline.components, device, offload=rests_on_host(model, device))
        self.cache: PromptCache | None = None

    def _set_shape(self) -> None:
        """``latent_shape`` is that of the model's images."""
        architecture, factor, model = self.pipeline.transformer.config, self.pipeline.vae_scale_factor, self.model
        pixels = factor * self.packing * architecture.patch_size
        if model.height % pixels or model.width % pixels:
            raise SolrlError(f"model.height and model.width must be multiples of {pixels} for {model.path}")
        self.latent_shape = (architecture.in_channels, model.height // factor, model.width // factor)

    def smaller(self, factor: int) -> Self:
        """See Policy."""
        full, twin = self.model, self.sibling(self.transformer)
        twin.model = full.model_copy(update={"height": full.height // factor, "width": full.width // factor})
        try:
            twin._set_shape()
        except SolrlError as error:
            size = f"{twin.model.width} x {twin.model.height}"
            raise UsageError(f"explore.downscale = {factor} makes {size}: {error}") from error
        twin.full_size, twin.full_shape = (full.height, full.width), self.latent_shape
        return twin

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """See Policy."""
        return self.full_shape

    def start(self, noise: Tensor) -> Tensor:
        """See Policy."""
        factor = self.full_size[0] // self.model.height
        return noise if factor == 1 else self.pack(block_means(self.unpack(noise, self.full_size), factor))

    def pack(self, latents: Tensor) -> Tensor:
        """Latents [B, C, rows, columns] as the transformer takes them."""
        return latents

    def unpack(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """The reverse, for an image of ``size`` (height, width) pixels."""
        return latents

    @abstractmethod
    def encode_alone(self, prompt: str) -> Conditioning:
        """One row: a prompt through the text encoders, on ``self.device``. Called without gradient."""

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """See Policy. Encoders that rest in host memory come in only if ``cache`` lacks one of the prompts."""
        rows = {prompt: self.cache.read(prompt) if self.cache else None for prompt in prompts}
        fresh: dict[str, Conditioning] = {}
        lacking = [prompt for prompt, row in rows.items() if row is None]
        if lacking:
            with self.encoders.here(), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                fresh = {prompt: self._encode_alone(prompt) for prompt in lacking}
        if self.cache and fresh:
            self.cache.write(fresh)
        known = {prompt: row.to(self.device) for prompt, row in (rows | fresh).items() if row is not None}
        return Conditioning.stack([known[prompt] for prompt in prompts])

    def _encode_alone(self, prompt: str) -> Conditioning:
        try:
            return self.encode_alone(prompt)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise SolrlError(f"{self.model.path} cannot encode the prompt {prompt!r}: {reason}") from error

    def prepare(self, prompts: PromptsConfig) -> None:
        """The cache that ``prompts`` asks for is in use, and the empty prompt encoded where every velocity needs it.

        For their hash a cache reads all weights of the encoders, which must not have encoded anything yet.
        """
        if prompts.cache_gb:
            recipe = f"{type(self).__qualname__}\n{inspect.getsource(type(self).encode_alone)}"
            identity = self.encoders.identity(recipe, self.model.max_text_tokens)
            self.cache = PromptCache(cache_folder(), int(prompts.cache_gb * 1e9), identity)
        if self.model.cfg_scale > 1:
            _ = self.without_prompt

    @functools.cached_property
    def without_prompt(self) -> Conditioning:
        """The empty prompt, encoded."""
        return self.encode([""])

    @property
    def device(self) -> torch.device:
        """See Policy; a transformer that is to be sharded still waits on the CPU."""
        return next(iter(self.vae.parameters())).device

    @abstractmethod
    def predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer's own velocity, float32, without classifier-free guidance."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """See Policy."""
        if self.model.cfg_scale == 1:
            return self.predict(latents, sigma, conditioning)
        both = _repeated_before(self.without_prompt, conditioning)
        predicted = self.predict(torch.cat([latents, latents]), torch.cat([sigma, sigma]), both)
        without_prompt, with_prompt = predicted.chunk(2)
        return without_prompt + self.model.cfg_scale * (with_prompt - without_prompt)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See Policy."""
        size = self.model.height, self.model.width
        images = decode_latents(self.vae, self.unpack(latents, size))
        return images if size == self.full_size else nn.functional.interpolate(images, self.full_size, mode="bilinear")

    def sibling(self, transformer: nn.Module) -> Self:
        """See Policy."""
        twin = copy.copy(self)
        twin._modules = self._modules | {"transformer": transformer}  # a plain copy would share the dict
        return twin

    def with_defaults(self) -> tuple[Self, int]:
        """(the same policy at its pipeline's default guidance, the pipeline's default number of steps)."""
        defaults = inspect.signature(self.pipeline_class.__call__).parameters
        scale = defaults["guidance_scale"].default
        is_embedded = bool(self.pipeline.transformer.config.get("guidance_embeds"))
        changes = {"guidance": scale, "cfg_scale": 1.0} if is_embedded else {"cfg_scale": scale}
        twin = self.sibling(self.transformer)
        twin.model = self.model.model_copy(update=changes)
        return twin, defaults["num_inference_steps"].default


def _repeated_before(one: Conditioning, many: Conditioning) -> Conditioning:
    """The single row ``one``, once for each row of ``many``, and then ``many``."""
    pairs = ((one.embeds, many.embeds), (one.pooled, many.pooled), (one.mask, many.mask))
    joined = [None if a is None or b is None else torch.cat([a.expand_as(b), b]) for a, b in pairs]
    return Conditioning(*joined)  # type: ignore[arg-type]


def load_policy(config: Config, device: torch.device) -> Policy:
    """The policy a config names, on ``device``: frozen weights, equal adapters "default" (active) and "old".

    A layer's initial adapter is A ~ N(0, 1/rank) and B = 0, drawn from the run seed, or what ``model.init_lora`` holds.
    Without ``lora.enabled`` there are none.
    """
    policy: Policy = find_class("model.family", config.model.family, FAMILIES)(config.model, device)
    policy.requires_grad_(False).eval()
    if isinstance(policy, DiffusersPolicy):
        if device.type != "meta":
            policy.prepare(config.prompts)
    elif config.prompts.cache_gb:
        raise UsageError(
            f"prompts.cache_gb: model.family {config.model.family} encodes in its own way, with weights that solrl "
            "does not know: set it to 0, or derive from DiffusersPolicy"
        )
    lora = config.lora if config.lora.targets else config.lora.model_copy(update={"targets": policy.lora_targets})
    if lora.enabled:
        add_adapters(policy.transformer, lora, config.seed)
    if config.model.init_lora is not None:
        start_adapters_from(policy.transformer, config.model.init_lora, lora)
    if config.model.gradient_checkpointing:
        transformer: Any = policy.transformer
        transformer.enable_gradient_checkpointing()
    return policy


def model_source(model: ModelConfig) -> str:
    """The folder or hub id that diffusers loads."""
    embedded = ASSETS / model.path
    if (embedded / "model_index.json").is_file():
        return str(embedded)
    if Path(model.path).is_dir() and not (Path(model.path) / "model_index.json").is_file():
        raise SolrlError(f"model.path {model.path} is not a diffusers folder: model_index.json is missing")
    return model.path


def transformer_settings(model: ModelConfig) -> dict[str, Any]:
    """The transformer's config.json; of a hub id, the file that was loaded with it."""
    from huggingface_hub import hf_hub_download

    folder = Path(model_source(model))
    file = folder / "transformer" / "config.json"
    if not folder.is_dir():
        file = Path(hf_hub_download(model.path, "transformer/config.json", revision=model.revision))
    settings: dict[str, Any] = json.loads(file.read_text())
    return settings


def load_pipeline(pipeline_class: Any, model: ModelConfig, device: torch.device) -> Any:
    """A diffusers pipeline of ``pipeline_class`` with its modules on ``device``; a SolrlError says what is missing.

    With ``model.shard`` the transformer stays on the CPU, from where it is sharded (solrl/sharding.py). On the meta
    device there are no weights, and nothing is downloaded (solrl/models/skeleton.py).
    """
    from safetensors import SafetensorError

    source = model_source(model)
    if device.type == "meta":
        return skeleton_pipeline(pipeline_class, model, source, compute_dtype(model, device))
    quiet_loading()
    try:
        found = pipeline_class.load_config(source, revision=model.revision)["_class_name"]
        if found == pipeline_class.__name__:
            pipeline = pipeline_class.from_pretrained(
                source, revision=model.revision, dtype=compute_dtype(model, device), use_safetensors=True
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise SolrlError(f"model.path {model.path} cannot be loaded: {_why_not(error, model)}") from error
    if found != pipeline_class.__name__:
        raise UsageError(
            f"model.path {model.path} holds a {found}, and model.family {model.family} needs a "
            f"{pipeline_class.__name__}: {_family_of(found)}"
        )
    warn_once(pipeline_class)
    for name, module in pipeline.components.items():
        if isinstance(module, nn.Module):
            rests = name.startswith("text_encoder") and rests_on_host(model, device)
            waits = name == "transformer" and model.shard
            module.to("cpu" if rests or waits else device)
            for parameter in module.parameters():
                # Memory-mapped weights lie at odd addresses, on which a CPU's kernels round differently.
                parameter.data = parameter.data.clone()
    return pipeline


def _family_of(pipeline_class: str) -> str:
    """What to do about a folder of another class."""
    classes = {"FluxPipeline": "flux", "StableDiffusion3Pipeline": "sd3", "SanaPipeline": "sana"}
    if pipeline_class in classes:
        return f"set model.family = {classes[pipeline_class]}"
    return f"no family takes a {pipeline_class}; known are {', '.join(classes)}"


def _why_not(error: BaseException, model: ModelConfig) -> str:
    """Why loading failed and what to do, in one line: the first cause that is known, else the error's first line."""
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    name, absent = model.path, f"there is no folder {model.path}, and"
    known: dict[type[BaseException], str] = {
        hub.GatedRepoError: f"the hub asks for consent: accept the licence at hf.co/{name}, then run `hf auth login`",
        hub.RevisionNotFoundError: f"it has no revision {model.revision}: check model.revision",
        hub.RepositoryNotFoundError: f"{absent} the hub shows no such model: check the name, or run `hf auth login`",
        hub.HFValidationError: f"{absent} it is no hub id: check the path",
        hub.LocalEntryNotFoundError: f"{absent} it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE "
        f"is set: run `hf download {name}` where there is a network",
        SafetensorError: "a weights file is damaged: copy or download it again",
    }
    cause: BaseException | None = error
    while cause is not None:
        for kind, text in known.items():
            if isinstance(cause, kind):
                return text
        cause = cause.__cause__ or cause.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def quiet_loading() -> None:
    """No progress bars while local files are read."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of frozen weights and compute."""
    if model.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if model.dtype == "float32" else torch.bfloat16


def add_adapters(transformer: Any, lora: LoraConfig, run_seed: int) -> None:
    """Add "default" and "old"; raises UsageError where the targets match no layer."""
    import peft

    # Two adapters on one model are what is wanted here; peft warns about them.
    warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute", category=UserWarning)
    if not lora.targets:
        raise UsageError("lora.targets is unset, and this model's family has no default: name the layers to adapt")
    settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
    for name in ("default", "old"):
        try:
            transformer.add_adapter(settings, name)
        except ValueError as error:
            raise UsageError(f"lora.targets {list(lora.targets)} match no layer of this model") from error
    for name in ("default", "old"):
        for parameter in lora_parameters(transformer, name):  # diffusers gives them the base's dtype
            parameter.data = parameter.data.float()
        for number, pair in enumerate(lora_state(transformer, name).values()):
            seed = candidate_seed(run_seed, 0, 0, number, "lora")
            pair.a.copy_(noise([seed], pair.a.shape)[0] / math.sqrt(lora.rank))
            pair.b.zero_()
    for layer in _adapter_layers(transformer).values():
        layer.set_adapter("default")


@torch.no_grad()
def start_adapters_from(transformer: nn.Module, folder: Path, lora: LoraConfig) -> None:
    """Both adapters are the one exported to ``folder``; raises UsageError unless it fits ``lora`` exactly.

    As in diffusers, a file's scale is alpha / rank of its metadata, and 1 without them.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
            made = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise UsageError(f"model.init_lora: {folder / WEIGHTS} cannot be read: {error}") from error
    if made.get("transformer.rank_pattern") or made.get("transformer.alpha_pattern"):
        raise UsageError(f"model.init_lora: {folder} has ranks or scales that differ between layers")
    alpha, rank = made.get("transformer.lora_alpha"), made.get("transformer.r")
    scale = alpha / rank if alpha and rank else 1.0
    adapters = [lora_state(transformer, name) for name in ("default", "old")]
    wanted = {f"transformer.{layer}.lora_{half}.weight" for layer in adapters[0] for half in "AB"}
    if wanted != set(tensors):
        odd = sorted(wanted ^ set(tensors))
        raise UsageError(
            f"model.init_lora: {folder} adapts other layers than this run ({len(odd)} differ, first {odd[0]}): set "
            "lora.targets to the layers it was trained with"
        )
    for pairs in adapters:
        for layer, pair in pairs.items():
            a, b = (tensors[f"transformer.{layer}.lora_{half}.weight"] for half in "AB")
            if a.shape != pair.a.shape or b.shape != pair.b.shape:
                raise UsageError(
                    f"model.init_lora: {folder} has rank {len(a)}, lora.rank is {lora.rank}: make them equal"
                )
            pair.a.copy_(a)
            pair.b.copy_(b * (scale / pair.scale))


def lora_state(transformer: nn.Module, name: str) -> dict[str, LoraPair]:
    """Layer name -> the adapter's live weights (views, not copies), in the model's order."""
    return {
        layer_name: LoraPair(
            layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach(), float(layer.scaling[name])
        )
        for layer_name, layer in _adapter_layers(transformer).items()
    }


def lora_parameters(transformer: nn.Module, name: str) -> list[nn.Parameter]:
    """The adapter's parameters: A and B of each layer, in the order of ``lora_state``."""
    layers = _adapter_layers(transformer).values()
    return [matrix[name].weight for layer in layers for matrix in (layer.lora_A, layer.lora_B)]


@contextmanager
def adapter(transformer: nn.Module, name: str | None) -> Iterator[None]:
    """Inside, ``name`` is active and frozen (None: no adapter, the reference policy); after, "default" trains again."""
    layers = list(_adapter_layers(transformer).values())
    for layer in layers:
        if name is None:
            layer.enable_adapters(False)
        else:
            layer.set_adapter(name, inference_mode=True)
    try:
        yield
    finally:
        for layer in layers:
            if name is None:
                layer.enable_adapters(True)
            layer.set_adapter("default")


def _adapter_layers(transformer: nn.Module) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in transformer.named_modules() if isinstance(module, BaseTunerLayer)}


def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """Scaled VAE latents [B, c, h, w] -> images [B, 3, H, W], float32 in [0, 1]."""
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
    image = vae.decode(scaled, return_dict=False)[0]
    return (image.float() / 2 + 0.5).clamp(0, 1)
