"""Every setting of a run. Defaults are the Sol-RL paper's (arXiv 2604.06916, Table 7) unless a line says otherwise.

Units end the names; counts start with ``num_``. Nothing is read from elsewhere and nothing changes after loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Frozen settings; an unknown key is an error; the text under a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The policy's weights."""

    family: str = "flux"
    """Model family: flux, sd3 (3.5 Medium and Large), sana, or a dotted path `package.module:PolicyClass`."""
    path: str = "tiny_flux"
    """A local diffusers folder, a hub id, or the name of an embedded model (tiny_flux, tiny_sd3, tiny_sana)."""
    revision: str | None = None
    """Hub revision; only for hub ids."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the frozen weights and of compute: auto is bfloat16 on a GPU and float32 on a CPU."""
    height: int = Field(512, gt=0, multiple_of=8)
    """Image height in pixels."""
    width: int = Field(512, gt=0, multiple_of=8)
    """Image width in pixels."""
    max_text_tokens: int = Field(128, gt=0)
    """Text tokens kept per prompt (FLUX and SD3.5: T5's; SANA: Gemma's)."""
    guidance: float = Field(1.0, ge=0)
    """Value of the guidance embedding (FLUX.1-dev); 1.0 in rollout, loss and evaluation."""
    cfg_scale: float = Field(1.0, ge=1)
    """Classifier-free guidance against the empty prompt, in rollout, loss and evaluation; above 1 at twice the cost."""
    init_lora: Path | None = None
    """Folder of an exported LoRA to start from; the reference policy stays the model without it."""
    offload_encoders: bool = False
    """On a GPU, text encoders rest in pinned host memory, on every rank, and come in when prompts are encoded.

    Then that is done beside the requantizing, when neither samples nor activations take memory; otherwise beside the
    drawing of the step before. Less memory (SD3.5: 10 GiB) for about a second a step. A CPU has nothing to move.
    """
    shard: bool = False
    """Shard the transformer over all processes (FSDP2, `fully_shard`), for models that do not fit on one GPU.

    Each holds 1/n of its weights and of the rollout tree's, and gathers one block at a time to compute; adapters and a
    quantized explorer stay whole on each. What is sharded is not compiled. Only with runtime.mode = colocated.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about 30 % more update time."""


class LoraConfig(Section):
    """The trained adapter."""

    enabled: bool = True
    """Train an adapter. Off (enabled = false): full fine-tuning of all the transformer's weights, kept in float32.

    Needs a far lower train.learning_rate, and on large models model.shard; `solrl plan` says what it takes. All other
    settings here are unused then.
    """
    rank: int = Field(32, gt=0)
    """Rank r of every adapted layer."""
    alpha: float = Field(64, gt=0)
    """Scale numerator: the adapter adds alpha / rank * B @ A."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Layer names or suffixes, as peft matches them; unset: the family's attention layers, as in the paper."""


class PromptsConfig(Section):
    """Where prompts come from."""

    train: str = "shapes_train"
    """A text file, one prompt a line, a .jsonl file, an embedded list, or hf:DATA_SET?split=train&column=prompt."""
    heldout: str = "shapes_heldout"
    """Prompts for evaluation only; none may be in the training list."""
    per_step: int = Field(48, gt=0)
    """Prompts (groups) drawn per step, without replacement within a pass over the list."""
    cache_gb: float = Field(0.0, ge=0)
    """Keep encoded prompts in ~/.cache/solrl/prompts (or SOLRL_PROMPT_CACHE), at most so many 10^9 bytes; 0: keep none.

    Runs and processes share the folder; the least recently used go first. Files are named by a hash of the prompt and
    of all that decides its bits (weights, tokenizers, dtype, length, template, processor, library versions), so a hit
    is what encoding would give. At the start all weights are hashed. A prompt of FLUX.1 takes 1 MB.
    """


class RewardConfig(Section):
    """What is maximised."""

    name: str = "shapes"
    """A reward of solrl_rewards, or a dotted path `package.module:Class`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the reward."""
    process: Literal["off", "resident", "shifting"] = "off"
    """Whether it runs in a child process of each process, with memory of its own; if it dies the run says so.

    resident: for the whole run. shifting: it is started when its process begins to score and ended when that goes on to
    something else, so that its memory is free meanwhile; only in the other runtime modes than colocated.
    """
    process_gpus: int = Field(0, ge=0)
    """GPUs of each such child; 0: it shares its parent's.

    resident: GPUs of its own, behind those of the run's processes. shifting: those of so many of the run's processes,
    which score together: while one child runs on the GPUs of all, none of them holds anything of the model.
    """
    max_missing_share: float = Field(0.1, ge=0, le=1)
    """The run stops when more than this share of a step's scores is missing."""


class StageConfig(Section):
    """How one stage draws samples."""

    enabled: bool = True
    """Whether the stage runs."""
    group_size: int = Field(24, gt=0)
    """Candidates per prompt."""
    num_steps: int = Field(10, gt=0)
    """Denoising steps."""
    solver: Literal["euler", "dpm2"] = "dpm2"
    """euler, or dpm2: DPM-Solver++(2M), one velocity a step."""


class ExploreConfig(StageConfig):
    """Stage 1: many cheap candidates; only the order of their proxy rewards is used.

    Off (enabled = false): plain DiffusionNFT, regenerate.group_size samples per prompt.
    """

    group_size: int = Field(96, gt=0)
    """Candidates explored per prompt, N."""
    num_steps: int = Field(6, gt=0)
    """Denoising steps of the explorer."""
    precision: Literal["auto", "nvfp4", "fp8", "full", "emulated_nvfp4"] = "auto"
    """Number format of the explorer: auto picks the cheapest that this machine runs natively, and says which."""
    backend: Literal["auto", "native", "te"] = "auto"
    """Kernels of nvfp4: native (torch's own, what auto takes), or te (Transformer Engine; untested)."""
    quantize: tuple[tuple[str, str], ...] | None = None
    """Ordered (glob, nvfp4 | fp8 | full | auto) rules over layer names, first match wins; unset: the model's own."""
    activation_scale: Literal["static", "dynamic"] = "static"
    """Scale of NVFP4's inputs: static (calibrated), or dynamic (each input's own; a sample depends on its batch)."""
    recalibrate_every_steps: int = Field(0, ge=0)
    """Steps between new measurements of the static scales; 0: only at the start."""
    tiny_decoder: str | None = None
    """Folder or hub id of a diffusers AutoencoderTiny made for the model's latents, which decodes explored candidates.

    It is cheaper and less exact than the model's own decoder, which is used where this is unset. fidelity/full_*
    compares its scores with those of images that the full decoder made, so it reports what that costs. Trained rewards
    never come from it.
    """
    min_fidelity: float = Field(0.0, ge=0, lt=1)
    """Least rank correlation of proxy rewards and rewards over whole audited groups; 0: whatever it is.

    Below it, with its whole 95 % interval, the explorer climbs and says so: two more steps at a time up to
    regenerate.num_steps, then the next higher precision that runs here. With compile a new precision compiles anew.
    """
    downscale: Literal[1, 2, 4] = 1
    """Explored images are so many times smaller along each side, and enlarged again before they are scored.

    They start from block means of the noise that the full-size image of their seed starts from. Cheaper, and as good as
    the model is at that size: fidelity/full_* reports what it costs. What is regenerated always has the full size.
    """


class RegenerateConfig(StageConfig):
    """Stage 2: the kept seeds drawn again in the policy's precision; only these are trained on.

    Off (enabled = false): the explored samples themselves are trained on (naive scaling, or naive quantized training).
    """

    group_size: int = Field(24, gt=0)
    """Candidates kept per prompt, K: the K/2 best and K/2 worst."""
    selection: Literal["best_worst", "extremes", "middle", "random"] = "best_worst"
    """Which K are kept, for ablations: the best and worst halves, the K furthest from the group's mean, the K of middle
    rank, or any K."""


OBJECTIVE_DEFAULTS: dict[str, dict[str, Any]] = {
    "awm": {"old_decay_cap": 0.3},
    "flow_grpo": {"old_decay_rate": 0.0, "timestep_fraction": 0.99, "kl_weight": 0.01},
    "dance_grpo": {"old_decay_rate": 0.0, "advantage_std": "sample", "kl_weight": 0.0},
    "dpo": {"kl_weight": 0.0},
}
"""What an objective's source sets otherwise than DiffusionNFT's: defaults of ``train`` under that objective."""


class TrainConfig(Section):
    """The update."""

    objective: str = "nft"
    """What is minimised: nft (DiffusionNFT), awm, flow_grpo, dance_grpo, dpo, or a dotted path `package.module:Class`.

    Unless set, old_decay_cap is 0.3 for awm; old_decay_rate is 0 (on-policy) for flow_grpo and dance_grpo;
    timestep_fraction is 0.99 for flow_grpo; advantage_std is sample for dance_grpo; kl_weight is 0.01 for flow_grpo and
    0 for dance_grpo and dpo. flow_grpo and dance_grpo need regenerate.enabled, dpo needs regenerate.group_size = 2.
    """
    objective_options: dict[str, Any] = {}
    """The objective's own settings, e.g. `--train.objective_options.noise_level 0.8`; solrl/objectives lists them."""
    num_steps: int = Field(300, gt=0)
    """Optimizer steps; one per round of exploration."""
    learning_rate: float = Field(3e-4, gt=0)
    """AdamW learning rate, constant."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW moment decays."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(1e-4, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global norm."""
    timestep_fraction: float = Field(0.6, gt=0, le=1)
    """Share of the rollout grid's sigmas trained per sample, without replacement."""
    beta: float = Field(1.0, gt=0)
    """DiffusionNFT guidance strength: v+ = beta v + (1 - beta) v_old."""
    kl_weight: float = Field(1e-4, ge=0)
    """Weight of the mean squared velocity distance to the adapter-free model; 0 skips its forward pass.

    flow_grpo and dance_grpo measure the distance of the sampler's means, over twice its variance.
    """
    old_from_rollout: bool = False
    """Take old_policy's velocity from the merged rollout tree, which is faster than its adapter.

    Then v = v_old holds on-policy only up to the rounding of merged weights. health/old_rollout_error measures that in
    every step (one forward), in the unit of health/velocity_old_distance: it should be far below it.
    """
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are clipped to plus or minus this."""
    advantage_std: Literal["global", "group", "sample"] = "global"
    """Spread that advantages are divided by: of the step's rewards (reference code) or of the group's (paper Eq. 3).

    sample: of the group's, as that of a sample (divided by n - 1), which is DanceGRPO's.
    """
    old_decay_rate: float = Field(0.001, ge=0)
    """old_policy <- d old_policy + (1 - d) policy with d = min(rate * step, cap)."""
    old_decay_cap: float = Field(0.5, ge=0, lt=1)
    """Cap of that decay."""
    ema_decay: float = Field(0.9, ge=0, lt=1)
    """Cap of the weight average used for evaluation and export: min((1 + step) / (10 + step), this)."""
    early_stop: Literal["off", "broken", "suspicious"] = "off"
    """The mildest verdict on the run's health (docs/health.md) at which an evaluation ends it.

    Everything is saved, and lora/ then holds the best checkpoint: the highest held-out reward of those whose verdict
    was neither suspicious nor broken (where there is none, of all).
    """

    @property
    def method(self) -> str:
        """The objective's name for people."""
        return "DiffusionNFT" if self.objective == "nft" else self.objective

    @property
    def is_on_policy(self) -> bool:
        """Whether old_policy is the policy at every update, and so needs no forward pass of its own."""
        return (self.old_decay_rate == 0 or self.old_decay_cap == 0) and not self.old_from_rollout

    @model_validator(mode="before")
    @classmethod
    def _objective_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return OBJECTIVE_DEFAULTS.get(str(given.get("objective")), {}) | given


class BatchConfig(Section):
    """Fixed shapes. Results depend on them, never on the number of processes."""

    rollout: int = Field(24, gt=0)
    """Samples a velocity call draws at once, in both stages; short batches are padded."""
    train: int = Field(12, gt=0)
    """Samples a training micro-batch holds; must divide `rollout`."""
    decode: int = Field(24, ge=0)
    """Samples decoded at once; must divide `rollout`, or be larger.

    0: on a GPU as many as its memory holds, measured at the start and written to the run's config.toml; on a CPU all.
    """


class EvaluateConfig(Section):
    """Held-out evaluation of the averaged weights (EMA)."""

    every_steps: int = Field(20, ge=0)
    """Steps between evaluations; always before the first and after the last step as well. 0: only those two."""
    images_per_prompt: int = Field(4, gt=0)
    """Fixed seeds per held-out prompt."""
    num_prompts: int = Field(64, gt=0)
    """Held-out prompts used, from the top of the list."""
    num_steps: int = Field(28, gt=0)
    """Denoising steps."""
    solver: Literal["euler", "dpm2"] = "euler"
    """Solver of the evaluation, whatever the rollouts use."""
    rewards: tuple[str, ...] = ()
    """Further rewards measured beside the trained one; they never influence training."""
    seed: int = Field(1234, ge=0)
    """Seed of the evaluation noise, independent of the run's."""


class RuntimeConfig(Section):
    """Who does what when there are several processes. Every mode gives the same samples and weights, bit for bit."""

    mode: Literal["colocated", "async_score", "shiftable", "auto"] = "colocated"
    """colocated: all processes explore, then score, then train. async_score: some only score, while others draw.

    shiftable: processes move between drawing and scoring as the work asks for it (PivotRL). auto: measure a step,
    simulate the modes, take the fastest and say by how much it is expected to win; often that is colocated.
    """
    staleness: Literal[0, 1, 2] = 0
    """Samples are drawn from old_policy as it was so many steps ago, so that drawing overlaps with the updates.

    The step, not the clock, decides which version draws: results differ from those of staleness 0, but not between
    modes or numbers of processes. Objectives compare with the version that drew. colocated gains no time by it.
    """
    score_processes: int = Field(1, gt=0)
    """Processes that only score, with async_score."""
    lost_after_s: float = Field(60.0, gt=1)
    """A process without a sign of life for so long is given up, and the run with it; `--resume` goes on."""
    job_timeout_s: float = Field(1800.0, gt=0)
    """Longest time for one round of a micro-batch, or for a shift; compiling counts."""


class OutputConfig(Section):
    """The run folder and what is written to it."""

    dir: Path = Path("runs/tiny_flux")
    """Run folder; must not hold a run unless `--resume`."""
    checkpoint_every_steps: int = Field(20, gt=0)
    """Steps between checkpoints; the last three and the best are kept."""
    audit_every_steps: int = Field(10, ge=0)
    """Steps between audits that regenerate one whole group for fidelity/full_*; 0 turns them off."""
    trackers: tuple[str, ...] = ()
    """accelerate trackers fed beside metrics.jsonl: tensorboard, wandb, trackio, ..."""
    push_to: str | None = None
    """OWNER/NAME of a model repository of the hub that is given the finished run's export; made private if it is new.

    A token or repository name that cannot work is found before the run starts, as far as this machine can tell; if the
    push fails in the end, nothing is lost and the command that repeats it is printed.
    """


class Config(Section):
    """A whole run."""

    seed: int = Field(0, ge=0)
    """Run seed: every random draw follows from it."""
    deterministic: bool = True
    """On a GPU use deterministic kernels, so that equal settings give equal bits; a CPU always does."""
    compile: Literal["auto", "off", "default", "max-autotune-no-cudagraphs"] = "auto"
    """torch.compile of explorer, rollout tree, policy (forward and backward) and decoder.

    auto: default on a GPU, off on a CPU. default: the first step waits for the compiler, later runs find most of its
    work in a cache (~/.cache/solrl/inductor, or TORCHINDUCTOR_CACHE_DIR); quantized formats are slow without it.
    max-autotune-no-cudagraphs: times several kernels for each operation and takes the fastest, which waits longer; runs
    and ranks may choose differently, so it needs deterministic = false. off: nothing to wait for.
    """
    cpu_threads: int = Field(1, gt=0)
    """Threads of a process on a CPU; results are bit-equal only for equal values. Use processes to fill cores."""
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    prompts: PromptsConfig = PromptsConfig()
    reward: RewardConfig = RewardConfig()
    explore: ExploreConfig = ExploreConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    train: TrainConfig = TrainConfig()
    batch: BatchConfig = BatchConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        keep, pool = self.regenerate.group_size, self.explore.group_size
        if keep % 2:
            raise ValueError(f"regenerate.group_size must be even (half best, half worst), got {keep}")
        if self.explore.enabled and keep > pool:
            raise ValueError(f"regenerate.group_size ({keep}) must be at most explore.group_size ({pool})")
        if not (self.explore.enabled or self.regenerate.enabled):
            raise ValueError("explore.enabled and regenerate.enabled are both false: nothing would be drawn")
        if self.batch.rollout % self.batch.train:
            raise ValueError(f"batch.train ({self.batch.train}) must divide batch.rollout ({self.batch.rollout})")
        if self.batch.decode and self.batch.rollout % min(self.batch.decode, self.batch.rollout):
            raise ValueError(f"batch.decode ({self.batch.decode}) must divide batch.rollout ({self.batch.rollout})")
        if self.explore.min_fidelity and not (
            self.explore.enabled and self.regenerate.enabled and self.output.audit_every_steps and pool > 3
        ):
            raise ValueError(
                "explore.min_fidelity needs both stages, output.audit_every_steps > 0 and explore.group_size > 3"
            )
        self._decoder_and_compile()
        self._without_effect()
        if self.reward.process == "shifting" and self.runtime.mode == "colocated":
            raise ValueError(
                "reward.process = shifting needs a runtime.mode in which roles shift: set that to shiftable, or this "
                "to resident"
            )
        if self.reward.process_gpus and self.reward.process == "off":
            raise ValueError("reward.process_gpus needs a reward.process")
        if self.replica_size and self.runtime.mode == "auto":
            raise ValueError(
                "runtime.mode = auto measures a step in which every process scores beside its model, and with "
                "reward.process_gpus under reward.process = shifting none can: choose shiftable or async_score"
            )
        num_score = self.runtime.score_processes
        if self.replica_size and self.runtime.mode == "async_score" and num_score % self.replica_size:
            raise ValueError(
                f"runtime.score_processes ({num_score}) must be a multiple of reward.process_gpus "
                f"({self.replica_size}): so many processes score together"
            )
        if self.runtime.staleness and self.explore.min_fidelity:
            raise ValueError("explore.min_fidelity and runtime.staleness exclude each other: set one to 0")
        if self.runtime.staleness and self.explore.recalibrate_every_steps:
            raise ValueError("explore.recalibrate_every_steps and runtime.staleness exclude each other: set one to 0")
        if self.model.shard and self.runtime.mode != "colocated":
            raise ValueError(
                f"model.shard needs runtime.mode = colocated, not {self.runtime.mode}: processes that hold shares of "
                "one model draw and train together"
            )
        if self.model.shard and (self.runtime.staleness or self.explore.min_fidelity or self.reward.process != "off"):
            raise ValueError(
                "model.shard works without runtime.staleness, explore.min_fidelity and reward.process: leave those out"
            )
        if self.model.init_lora and not self.lora.enabled:
            raise ValueError("model.init_lora is an adapter's start and lora.enabled is false: leave out one of them")
        if self.num_train_timesteps < 1:
            raise ValueError(
                f"train.timestep_fraction ({self.train.timestep_fraction}) of {self.train_stage.num_steps} steps "
                "trains no timestep; raise it"
            )
        return self

    def _decoder_and_compile(self) -> None:
        explore = self.explore
        if not self.regenerate.enabled and (explore.tiny_decoder is not None or explore.downscale > 1):
            name = "downscale" if explore.downscale > 1 else "tiny_decoder"
            raise ValueError(f"explore.{name} needs regenerate.enabled: what is trained on is drawn in full")
        if self.compile == "max-autotune-no-cudagraphs" and self.deterministic:
            raise ValueError("compile = max-autotune-no-cudagraphs picks kernels by timing: set deterministic = false")

    def _without_effect(self) -> None:
        train, regenerate = self.train, self.regenerate
        if train.early_stop != "off" and not self.evaluate.every_steps:
            raise ValueError(
                f"train.early_stop = {train.early_stop} ends a run at an evaluation, and with evaluate.every_steps = 0 "
                "there is none before the last step: set that, or leave early_stop off"
            )
        if regenerate.selection != "best_worst" and not self.explore.enabled:
            raise ValueError(
                f"regenerate.selection = {regenerate.selection} picks among explored candidates, and explore.enabled "
                "is false: leave out one of them"
            )

    @property
    def pool_size(self) -> int:
        """Candidates drawn per prompt and step: N, or K where nothing is explored."""
        return self.explore.group_size if self.explore.enabled else self.regenerate.group_size

    @property
    def replica_size(self) -> int:
        """Processes that give their GPUs to one child while it scores; 0: none does."""
        return self.reward.process_gpus if self.reward.process == "shifting" else 0

    @property
    def train_stage(self) -> StageConfig:
        """The stage whose samples are trained on."""
        return self.regenerate if self.regenerate.enabled else self.explore

    @property
    def is_on_policy(self) -> bool:
        """Whether the policy that draws is the policy at every update, and so needs no forward pass of its own."""
        return self.train.is_on_policy and not self.runtime.staleness

    @property
    def num_train_timesteps(self) -> int:
        """T = int(num_steps * timestep_fraction), as the reference code counts."""
        return int(self.train_stage.num_steps * self.train.timestep_fraction + 1e-9)
