"""What this machine can run, and whether the parts that learning hangs on work here: `solrl doctor`.

Everything said to work has just been run. What cannot be run here is said with the reason.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch

from solrl.config import ExploreConfig, LoraConfig, ModelConfig
from solrl.environment import device_name, environment
from solrl.errors import SolrlError
from solrl.groups import candidate_seed, noise
from solrl.models.adapters import adapter, add_adapters, lora_state
from solrl.models.flux import FluxPolicy
from solrl.models.loading import quiet_loading
from solrl.objectives.nft import nft_loss
from solrl.quant.backends import EMULATED, FULL, choose_backend, fp8_layer, nvfp4_layer, try_layer
from solrl.quant.emulated import EmulatedLinear
from solrl.quant.linear import QuantLinear
from solrl.quant.native import StandInLinear
from solrl.quant.te import TELinear, transformer_engine
from solrl.quant.trees import RolloutTrees

WIDTH = 80
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
KNOWN_SEED = 0x7EF32BA9C17C9B9BF6B62BA9FB407787
KNOWN_SUM = -15.281768277520314
"""What every machine makes of candidates 0 to 2 of prompt 2 in step 1 of run seed 0: first seed, sum of all noise."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried."""

    name: str
    works: bool
    detail: str
    """What was measured, or why it does not work."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything `solrl doctor` says."""

    machine: dict[str, str]
    packages: dict[str, str]
    """Package -> version, or which extra would bring it."""
    formats: list[Finding]
    automatic: str
    """What explore.precision = auto takes here."""
    tests: list[Finding]
    """What learning hangs on; all must work."""

    @property
    def is_healthy(self) -> bool:
        """Whether training can be trusted here; a number format may be missing."""
        return all(test.works for test in self.tests)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"is_healthy": self.is_healthy}


def diagnose(device: torch.device | None = None) -> Diagnosis:
    """Try everything on ``device``: the first GPU where there is one."""
    device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    quiet_loading()
    backend = choose_backend(ExploreConfig(), device)
    automatic = f"{backend.precision} ({backend.reason})" if backend.reason else backend.precision
    return Diagnosis(_machine(device), _packages(), _formats(device), automatic, _tests(device))


def lines(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis for a terminal of WIDTH columns."""
    written: list[str] = []

    def section(title: str, rows: list[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        written.extend(["", title] if written else [title])
        for name, text in rows:
            written.extend(
                textwrap.wrap(text, WIDTH, initial_indent=f"  {name:{width}}  ", subsequent_indent=" " * (width + 4))
            )

    section("Machine", list(diagnosis.machine.items()))
    section("Packages", list(diagnosis.packages.items()))
    section("Number formats of the explorer", [
        *((finding.name, f"{'works' if finding.works else 'no'}: {finding.detail}") for finding in diagnosis.formats),
        ("auto", diagnosis.automatic),
    ])  # fmt: skip
    section("What learning hangs on", [
        (test.name, f"{'ok' if test.works else 'BROKEN'}: {test.detail}") for test in diagnosis.tests
    ])  # fmt: skip
    return written


def _machine(device: torch.device) -> dict[str, str]:
    facts = environment(device, "")
    machine = {"device": device_name(device), "cpu": f"{facts['cpu']}, {facts['num_cpus']} cores"}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        machine["device"] += f", compute capability {major}.{minor}, {memory:.0f} GiB"
        machine["gpus"] = str(torch.cuda.device_count())
    machine["driver"] = _driver()
    machine["torch"] = f"{torch.__version__}, built for CUDA {torch.version.cuda or 'no'}"
    machine["python"] = f"{facts['python']}, {facts['platform']}"
    return machine


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return "no NVIDIA driver"
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text())
    return f"NVIDIA {found.group()}" if found else "NVIDIA, unknown version"


def _packages() -> dict[str, str]:
    """Every package of solrl's requirements and extras."""
    found = {"solrl": _version("solrl") or "run from a source folder: extras are unknown"}
    try:
        needed = requires("solrl") or []
    except PackageNotFoundError:
        needed = ["torch", "diffusers", "transformers", "peft", "accelerate", "safetensors"]
    for requirement in needed:
        match = re.match(r"[\w.-]+", requirement)
        assert match is not None
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        missing = f"missing; pip install 'solrl[{extra.group(1)}]'" if extra else "MISSING"
        found.setdefault(match.group(), _version(match.group()) or missing)
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _formats(device: torch.device) -> list[Finding]:
    findings = [Finding("full", True, "the policy's own precision")]
    for name, kind in (("fp8", fp8_layer(device)), ("nvfp4", nvfp4_layer(device))):
        findings.append(Finding(name, False, kind) if isinstance(kind, str) else _try_format(name, kind, device))
    findings.append(_try_transformer_engine(device))
    findings.append(_try_format("emulated_nvfp4", EmulatedLinear, device))
    if not any(finding.works for finding in findings if finding.name == "nvfp4"):
        stand_in = _try_format("nvfp4 layout", StandInLinear, device)
        detail = f"{stand_in.detail}; only what surrounds the FP4 kernel was tried"
        findings.append(Finding(stand_in.name, stand_in.works, detail))
    return findings


def _try_format(name: str, kind: type[QuantLinear], device: torch.device) -> Finding:
    try:
        proof = try_layer(kind, device)
    except SolrlError as error:
        return Finding(name, False, str(error))
    return Finding(
        name,
        True,
        f"{kind.kernel}; error {proof.format_error:.3f} against unquantized numbers, {proof.kernel_error:.1e} against "
        "its own operands",
    )


def _try_transformer_engine(device: torch.device) -> Finding:
    name = "nvfp4 by te"
    if device.type != "cuda":
        return Finding(name, False, "Transformer Engine needs an NVIDIA GPU")
    try:
        transformer_engine()
    except SolrlError as error:
        return Finding(name, False, str(error))
    return _try_format(name, TELinear, device)


def _tests(device: torch.device) -> list[Finding]:
    tests: dict[str, Callable[[torch.device], str]] = {
        "gradient sign": _gradient_sign,
        "seeds": _seeds,
        "adapter binding": _adapter_binding,
    }
    findings = []
    for name, test in tests.items():
        try:
            findings.append(Finding(name, True, test(device)))
        except SolrlError as error:
            findings.append(Finding(name, False, str(error)))
    return findings


def _gradient_sign(device: torch.device) -> str:
    """On-policy, a good sample attracts the policy's velocity and a bad one repels it."""
    clean, fresh = (noise([seed, seed], (4, 8)).to(device) for seed in (1, 2))
    sigma = torch.full((2,), 0.5, device=device)
    velocity = (0.1 * noise([3, 3], (4, 8))).to(device).requires_grad_()
    noised = (1 - sigma[0]) * clean + sigma[0] * fresh
    loss, _ = nft_loss(velocity, velocity, noised, clean, sigma, torch.tensor([1.0, -1.0], device=device))
    loss.sum().backward()
    assert velocity.grad is not None
    good, bad = (velocity.grad * (velocity.detach() - (fresh - clean))).flatten(1).sum(1).tolist()
    if not good > 0 > bad:
        raise SolrlError(f"the gradient points away from the reward (good sample {good:.3g}, bad sample {bad:.3g})")
    return "a good sample attracts, a bad one repels"


def _seeds(device: torch.device) -> str:
    """The same seed gives the same noise and the same velocity in any batch position."""
    seeds = [candidate_seed(0, 1, 2, candidate) for candidate in range(3)]
    if seeds[0] != KNOWN_SEED:
        raise SolrlError(f"seeds differ from those of other machines: {seeds[0]:032x}, not {KNOWN_SEED:032x}")
    together, alone = noise(seeds, (16, 16)), noise(seeds[2:], (16, 16))
    if not torch.equal(together[2], alone[0]) or abs(float(together.double().sum()) - KNOWN_SUM) > 1e-9:
        raise SolrlError("noise depends on the batch or differs from that of other machines")
    return "noise is that of every other machine, in any batch position"


@torch.no_grad()
def _adapter_binding(device: torch.device) -> str:
    """What is trained is what is drawn with: a changed adapter reaches policy, rollout tree and explorer."""
    policy = FluxPolicy(ModelConfig(path="tiny_flux", height=32, width=32, max_text_tokens=12), device)
    policy.requires_grad_(False).eval()
    add_adapters(policy.transformer, LoraConfig(rank=4, alpha=8, targets=TARGETS), run_seed=0)
    conditioning = policy.encode(["a red circle"])
    latents = noise([5], policy.latent_shape).to(device)
    adapters = lora_state(policy.transformer, "old")
    trees = [RolloutTrees(policy.transformer, backend) for backend in (FULL, EMULATED)]

    def velocity(transformer: torch.nn.Module) -> torch.Tensor:
        return policy.sibling(transformer).velocity(latents, torch.full((1,), 0.7, device=device), conditioning)

    base = velocity(trees[0].rollout)
    for number, pair in enumerate(adapters.values()):
        pair.b.copy_(0.05 * noise([number], pair.b.shape)[0])
    for tree in trees:
        tree.requantize_(adapters)
    with trees[1].calibration():
        explored = velocity(trees[1].explorer)
    trees[1].set_activation_scales_()
    with adapter(policy.transformer, "old"):
        wanted = velocity(policy.transformer)
    drawn = velocity(trees[0].rollout)
    change = float((wanted - base).norm())
    rounding = float((drawn - wanted).norm()) / change
    if not change > 0 or rounding > 0.1:
        raise SolrlError(
            f"the rollout tree does not draw what the adapter makes ({rounding:.2g} of its change is missing)"
        )
    if not float((explored - wanted).norm()) < float((explored - base).norm()):
        raise SolrlError("the explorer is nearer to the model without its adapter than to the one with it")
    return f"{len(adapters)} layers; a change reaches the rollout tree (to {rounding:.0e}) and the explorer"
