"""A run's base model, averaged weights (EMA) and raw weights, compared on held-out prompts.

All three draw the same prompts from the same seeds with the same settings, so their differences are paired. Everything
that decides a score is saved beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from solrl.clock import Stopwatch
from solrl.compute import compile_, compile_mode, repeated_blocks, use_cache_folder
from solrl.config import Config
from solrl.distributed import World, start
from solrl.environment import environment, fingerprint
from solrl.errors import UsageError
from solrl.evaluate import HeldOut, encode_all, mean_and_error, prompt_means
from solrl.export import checkpoint_weights, pick_checkpoint
from solrl.files import saving, write_atomic
from solrl.images import save_grid
from solrl.launch import check_launcher
from solrl.models.base import DiffusersPolicy, load_policy
from solrl.models.decoder import use_fast_layout_
from solrl.models.loading import quiet_loading
from solrl.prompts import load_prompts
from solrl.quant.backends import FULL
from solrl.quant.trees import RolloutTrees
from solrl.scorer import open_reward
from solrl.session import open_trees
from solrl.settings import load_config
from solrl.sharding import is_sharded
from solrl.signals import SignalStop
from solrl.trust import require_trust
from solrl.types import LoraPair, Policy, Reward, Scores, Weights

SCORES = "scores.json"


@dataclass(frozen=True)
class Comparison:
    """What is compared; where nothing is said, what the run itself evaluates."""

    rewards: tuple[str, ...] = ()
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Reward -> keyword arguments; the run's own reward has those of the run besides."""
    suite: str | None = None
    """Prompt file, all of which is drawn unless evaluate.num_prompts is among the overrides."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings over the run's, `evaluate.num_steps` say."""
    step: int | Literal["best"] | None = None
    """Checkpoint: of this step, the best, or (None) the newest."""
    at_defaults: bool = False
    """Also at the pipeline's own default guidance and number of steps."""
    out: Path | None = None
    """Folder for the results; RUN/evaluations/SUITE_step_N."""


def compare(
    run_dir: Path, wanted: Comparison, *, trust_code: bool = False, report: Callable[[str], None] = print
) -> Path:
    """Scores and image grids are in the folder that is returned; a table went to ``report``.

    The scores have the same bits for any number of processes. A folder that holds results already is a UsageError.
    """
    if not trust_code:
        require_trust(run_dir, load_config(run_dir))
    config, prompts = _suite(run_dir, wanted)
    check_launcher(config)
    checkpoint = pick_checkpoint(run_dir, wanted.step)
    suite = Path(config.prompts.heldout).stem
    out = wanted.out or run_dir / "evaluations" / f"{suite}_step_{checkpoint.step:06d}"
    if (out / SCORES).exists():
        raise UsageError(f"{out} holds an evaluation already; choose another folder with --out, or remove it")
    quiet_loading()
    names = wanted.rewards or (config.reward.name, *config.evaluate.rewards)
    options = {name: _options(name, config, wanted) for name in names}
    rewards = {name: open_reward("rewards", name, options[name]) for name in options}
    facts: dict[str, Any] = {
        "run": str(run_dir),
        "step": checkpoint.step,
        "suite": _suite_facts(config, prompts),
        "rewards": options,
        "evaluate": config.evaluate.model_dump(mode="json", exclude={"every_steps", "rewards"}),
        "batch": config.batch.model_dump(mode="json"),
    }
    with SignalStop() as stop, start(config.cpu_threads, config.deterministic) as world:
        policy = load_policy(config, world.device)
        use_fast_layout_(policy.vae)
        trees, world = open_trees(policy, config, FULL, world)
        checkpoint.check_base(fingerprint(policy.transformer))
        ema, raw = (
            {name: _on(weight, world.device) for name, weight in checkpoint_weights(checkpoint, config, kind).items()}
            for kind in ("ema", "policy")
        )
        base = _base_weights(policy, ema)
        _compile(trees, policy, config, world)
        bench = _Bench(trees, {"base": base, "ema": ema, "raw": raw}, prompts, rewards, world, world.stopping(stop))
        results = {"run": bench.run(policy.sibling(trees.rollout), config)}
        if wanted.at_defaults:
            results["pipeline_defaults"] = bench.run(*_at_defaults(policy.sibling(trees.rollout), config))
        if world.is_main:
            facts["environment"] = environment(world.device, "full precision, adapters merged")
            facts["results"] = {name: result.as_dict() for name, result in results.items()}
            _save(out, facts | {"prompts": prompts}, results, prompts)
            report(f"{run_dir}, step {checkpoint.step}: {suite}, {_suite_line(facts['suite'], config)}")
            for result in results.values():
                report("\n".join(["", result.title, *result.table()]))
            report(f"\n{out}")
        world.barrier()
    return out


@dataclass(frozen=True)
class Result:
    """Scores of the three sets of weights, drawn in one way."""

    settings: dict[str, Any]
    scores: dict[str, dict[str, Scores]]  # weights -> reward -> scores
    grids: dict[str, tuple[Tensor, Tensor]]  # weights -> (images [P, M, 3, H, W], rewards [P, M]); the main rank's

    @property
    def title(self) -> str:
        """How all were drawn."""
        how = self.settings
        return f"{how['num_steps']} steps, {how['solver']}, guidance {how['guidance']:g}, CFG {how['cfg_scale']:g}"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each reward and set of weights; differences are paired over prompts."""
        rows = []
        for reward in self.scores["base"]:
            before = prompt_means(self.scores["base"][reward])
            for weights, scores in self.scores.items():
                means = prompt_means(scores[reward])
                mean, error = mean_and_error(means)
                row = {"reward": reward, "weights": weights, "mean": mean, "stderr": error}
                if weights != "base":
                    row["minus_base"], row["minus_base_stderr"] = mean_and_error(means - before)
                rows.append(row | {"num_missing": int((~scores[reward].present).sum())})
        return rows

    def table(self) -> list[str]:
        """The rows as lines of text."""
        rows = self.rows()
        width = max(len("reward"), *(len(_short(row["reward"])) for row in rows))
        head = f"{'reward':{width}}  {'':4}  {'mean':>8} {'stderr':>7}  {'minus base':>10} {'stderr':>7}"
        lines = [head]
        for row in rows:
            line = f"{_short(row['reward']):{width}}  {row['weights']:4}  {row['mean']:8.4f} {row['stderr']:7.4f}"
            if "minus_base" in row:
                line += f"  {row['minus_base']:+10.4f} {row['minus_base_stderr']:7.4f}"
            lines.append(line + (f"  ({row['num_missing']} missing)" if row["num_missing"] else ""))
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For JSON: settings, rows, and every score; a missing one is null."""
        scores = {
            weights: {name: score.rows() for name, score in by_reward.items()}
            for weights, by_reward in self.scores.items()
        }
        return {"settings": self.settings, "summary": self.rows(), "scores": scores}


@dataclass(frozen=True)
class _Bench:
    """What all ways of drawing share."""

    trees: RolloutTrees
    weights: dict[str, Weights]
    prompts: list[str]
    rewards: dict[str, Reward]
    world: World
    stop: Callable[[], None]

    def run(self, policy: Policy, config: Config) -> Result:
        """Draw and score with each set of weights in turn."""
        heldout = HeldOut(self.prompts, encode_all(policy, self.prompts), self.rewards)
        settings = {
            "num_steps": config.evaluate.num_steps,
            "solver": config.evaluate.solver,
            "guidance": config.model.guidance,
            "cfg_scale": config.model.cfg_scale,
        }
        result = Result(settings, {}, {})
        for weights, values in self.weights.items():
            self.trees.requantize_(values)
            clock = Stopwatch(self.world.device)
            evaluation = heldout.evaluate(policy, config, world=self.world, clock=clock, stop=self.stop)
            result.scores[weights] = evaluation.scores
            if self.world.is_main or self.world.in_step:
                result.grids[weights] = heldout.grid(policy, config, evaluation)
        return result


def _suite(run_dir: Path, wanted: Comparison) -> tuple[Config, list[str]]:
    """The settings of the evaluation and its prompts."""
    overrides = dict(wanted.overrides)
    if wanted.suite is not None:
        overrides["prompts.heldout"] = wanted.suite
    config = load_config(run_dir, overrides)
    prompts = load_prompts(config.prompts.heldout)
    if wanted.suite is not None and "evaluate.num_prompts" not in overrides:
        overrides["evaluate.num_prompts"] = len(prompts)
        config = load_config(run_dir, overrides)
    if config.evaluate.num_prompts > len(prompts):
        raise UsageError(
            f"evaluate.num_prompts = {config.evaluate.num_prompts} but {config.prompts.heldout} holds {len(prompts)}"
        )
    return config, prompts[: config.evaluate.num_prompts]


def _suite_facts(config: Config, prompts: list[str]) -> dict[str, Any]:
    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
    trained = None
    with suppress(UsageError):  # the run's training prompts may lie on another machine: then nobody knows
        known = set(load_prompts(config.prompts.train))
        trained = sum(prompt in known for prompt in prompts)
    return {
        "source": config.prompts.heldout,
        "sha256": digest,
        "num_prompts": len(prompts),
        "num_trained_on": trained,
    }


def _suite_line(facts: dict[str, Any], config: Config) -> str:
    line = f"{facts['num_prompts']} prompts x {config.evaluate.images_per_prompt} seeds"
    if facts["num_trained_on"] is None:
        return f"{line} (whether trained on: {config.prompts.train} is not here)"
    return f"{line}, {facts['num_trained_on']} of them TRAINED ON" if facts["num_trained_on"] else line


def _options(name: str, config: Config, wanted: Comparison) -> dict[str, Any]:
    own = config.reward.options if name == config.reward.name else {}
    return {**own, **wanted.options.get(name, {})}


def _on(weight: LoraPair | Tensor, device: torch.device) -> Any:
    """An adapter on the device; another weight comes there when it is needed."""
    return LoraPair(weight.a.to(device), weight.b.to(device), weight.scale) if isinstance(weight, LoraPair) else weight


def _base_weights(policy: Policy, trained: Weights) -> Weights:
    """What was there before training."""
    pairs = {name: pair for name, pair in trained.items() if isinstance(pair, LoraPair)}
    zeros = {name: LoraPair(pair.a, torch.zeros_like(pair.b), pair.scale) for name, pair in pairs.items()}
    return zeros or dict(policy.transformer.named_parameters())


def _compile(trees: RolloutTrees, policy: Policy, config: Config, world: World) -> None:
    mode = compile_mode(config, world.device)
    if mode != "off":
        use_cache_folder(world.rank)
        blocks = [] if is_sharded(trees.rollout) else repeated_blocks(trees.rollout)
        compile_([*blocks, policy.vae.decoder], mode, deterministic=config.deterministic)


def _at_defaults(policy: Policy, config: Config) -> tuple[Policy, Config]:
    """The policy and its settings as its pipeline draws when nobody says how."""
    if not isinstance(policy, DiffusersPolicy):
        raise UsageError(f"model.family {config.model.family} has no pipeline whose defaults could be taken")
    twin, num_steps = policy.with_defaults()
    evaluate = config.evaluate.model_copy(update={"num_steps": num_steps})
    return twin, config.model_copy(update={"model": twin.model, "evaluate": evaluate})


def _save(out: Path, facts: dict[str, Any], results: dict[str, Result], prompts: list[str]) -> None:
    """Grids first: scores.json says that all is there."""
    with saving(out):
        out.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        suffix = "" if name == "run" else f"_{name}"
        for weights, (images, rewards) in result.grids.items():
            title = f"{weights}: {result.title}"
            save_grid(out / f"{weights}{suffix}.png", images, prompts[: len(images)], rewards=rewards, title=title)
        images, rewards = (torch.stack([grid[i][:, 0] for grid in result.grids.values()], 1) for i in (0, 1))
        title = f"{' | '.join(result.grids)}, first seed: {result.title}"
        save_grid(out / f"side_by_side{suffix}.png", images, prompts[: len(images)], rewards=rewards, title=title)
    write_atomic(out / SCORES, (json.dumps(facts, indent=1) + "\n").encode())


def _short(reward: str) -> str:
    return reward.rpartition(":")[2]
