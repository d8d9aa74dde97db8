"""What a run writes, and when: metrics, ledger, evaluation, checkpoints, exports, report.

The order makes every moment safe to die at: ledger and metrics of a step first, then its checkpoint. A resume goes back
to the newest checkpoint and cuts off what came after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from solrl import ledger, restart
from solrl.checkpoint import Checkpoint, RunFolder, newest_checkpoint
from solrl.clock import Stopwatch
from solrl.display import labelled, plan_lines
from solrl.environment import device_name, environment, fingerprint
from solrl.evaluate import HeldOut, encode_all, saved_means
from solrl.export import export_checkpoint, pick_checkpoint
from solrl.fidelity import full_fidelity, kept_fidelity
from solrl.gate import too_low
from solrl.health import StepFacts, check, clean_norms
from solrl.images import save_grid
from solrl.learner import require_fit
from solrl.models.loading import compute_dtype
from solrl.report import write_report
from solrl.session import RUNG, Session, StepRecord
from solrl.sharding import whole
from solrl.tracking import Tracking
from solrl.types import Interrupted, RewardFailed, SolrlError
from solrl.verdict import Kind, is_evaluated, judge, stops_early


class Recorder:
    """The run folder of a session. Every rank has one and computes the same; rank 0 writes."""

    def __init__(self, session: Session, resume: bool) -> None:
        self.session, self.config, self.world = session, session.config, session.world
        self.is_main = session.world.is_main
        self.step = 0
        self._before: dict[str, Tensor] | None = None
        self._base = fingerprint(session.policy.transformer)
        self._folder: RunFolder | None = None
        if self.is_main:
            facts = environment(self.world.device, session.precision_line) | {"proof": session.proof}
            opener = RunFolder.resume if resume else RunFolder.create
            self._folder = opener(self.config.output.dir, self.config, facts)
            restart.mark(self.config.output.dir)
        self.world.barrier()
        if resume:
            self._restore()
        self.tracking = Tracking(self.config, is_main=self.is_main)
        self.heldout = self._open_heldout()
        self._base_means = saved_means(self.config.output.dir, 0, self.heldout.prompts) if resume else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.is_main and self.tracking.history and (error is None or isinstance(error, SolrlError)):
                self.tracking.plan(labelled("verdict", judge(self.config, self.tracking.history).line))
            if self.is_main and error is None:
                self._finish()
        finally:
            self._close()

    def steps(self) -> Iterator[int]:
        """The steps still to do: up to train.num_steps, or to an evaluation at which train.early_stop ends the run.

        Before the first one the plan is shown, and a new run evaluated.
        """
        self.tracking.plan(self._plan())
        if not self.tracking.history:
            self.tracking.log({"step": 0} | self._evaluate(0))
        for step in range(self.step + 1, self.config.train.num_steps + 1):
            if stops_early(self.config, self.tracking.history):
                self.tracking.plan(labelled("early stop", f"after step {step - 1}, as train.early_stop says"))
                return
            yield step

    def _close(self) -> None:
        self.session.close()
        self.tracking.close()
        if self._folder:
            self._folder.close()

    @contextmanager
    def saving_on_interrupt(self, step: int) -> Iterator[None]:
        """Inside, a signal or a failing reward leaves a checkpoint of the step before; what ``step`` did is dropped.

        Not a reward that fails where the model is sharded: the other processes are not here to give their shares.
        """
        # Evaluation comes after the update and can be interrupted, too: then the update has to be taken back.
        self._before = {k: t.clone() for k, t in self.session.state_dict().items()} if self._is_due(step) else None
        try:
            yield
        except (Interrupted, RewardFailed) as error:
            if self.world.in_step and isinstance(error, RewardFailed):
                raise
            if self._before is not None:
                self.session.load_state_dict(self._before)
            if step > 1:
                self._save(step - 1)
            raise

    def record(self, step: int, record: StepRecord, clock: Stopwatch) -> dict[str, float]:
        """Check, log and save a finished step; returns its metrics."""
        facts = self._facts(step, record)
        health = check(facts, self.tracking.history, max_missing_share=self.config.reward.max_missing_share)
        metrics = (
            {"step": step}
            | _reward_metrics(record)
            | step_fidelity(record)
            | record.metrics
            | record.scales
            | clock.metrics()
            | health
            | ({"health/policy_lag": record.lag} if self.config.runtime.staleness else {})
        )
        if self.config.explore.min_fidelity:
            metrics |= {RUNG: self.session.rung, "explore/num_steps": self.session.config.explore.num_steps}
        due = self._is_due(step)
        if due:
            metrics |= self._evaluate(step)
        if self.is_main:
            self._write_ledger(step, record)
        for group, reason in record.selection.skipped.items():
            self.tracking.plan([f"step {step} skips {record.prompts[group]!r}: {reason}"])
        self.tracking.log(metrics)
        self._gate()
        if due or step % self.config.output.checkpoint_every_steps == 0:
            self._save(step)
        return metrics

    def _gate(self) -> None:
        """Climb where the audits so far say so, on every rank, and tell; what follows explores on the new rung."""
        found, session = too_low(self.config, self.tracking.history), self.session
        if found is None:
            return
        step, rung = int(self.tracking.history[-1]["step"]), session.next_rung()
        limit = f"explore.min_fidelity = {self.config.explore.min_fidelity:g}"
        text = f"rank correlation of whole groups is {found} after step {step}, below {limit}: "
        if rung is None:
            self.tracking.plan(labelled("fidelity", text + "and nothing higher runs here"))
            return
        is_new = session.ladder[rung].precision != session.precision and session.compile_mode != "off"
        session.climb_to(rung)
        text += f"the explorer goes on in {session.precision_line}"
        self.tracking.plan(labelled("fidelity", text + ("; its first step compiles" if is_new else "")))
        if self._folder:
            self._folder.note_climb(step, session.precision_line, session.proof)

    def _is_due(self, step: int) -> bool:
        every = self.config.evaluate.every_steps
        return step == self.config.train.num_steps or (every > 0 and step % every == 0)

    def _restore(self) -> None:
        """Back to the newest checkpoint, which rank 0 reads for all."""
        checkpoint = newest_checkpoint(self.config.output.dir) if self._folder else None
        start = torch.zeros(2, dtype=torch.int64)
        if checkpoint:
            checkpoint.check_base(self._base)
            start += torch.tensor([checkpoint.step, int(checkpoint.tensors.get(RUNG, 0))])
        self.step, rung = self.world.broadcast_(start).tolist()
        self.session.climb_to(rung)  # together: calibration is
        if not self.step:
            return
        mine = self.session.state_dict()
        state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in mine.items()}
        if checkpoint:
            require_fit(checkpoint.tensors, mine)
            state = checkpoint.tensors
        self.session.load_state_dict({name: self.world.broadcast_(state[name]) for name in mine})
        if checkpoint:
            self._export(checkpoint)  # a kill may have come between the two

    def _open_heldout(self) -> HeldOut:
        config, session = self.config, self.session
        prompts = session.heldout_prompts[: config.evaluate.num_prompts]
        rewards = {config.reward.name: session.reward} | session.watched
        return HeldOut(prompts, encode_all(session.policy, prompts), rewards)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the averaged weights in the rollout tree, draw the grid, and put old_policy back."""
        session, clock = self.session, Stopwatch(self.world.device)
        self.tracking.phase("evaluate")
        session.sync(session.learner.ema)
        try:
            evaluation = self.heldout.evaluate(
                session.rollout_policy, self.config, world=self.world, clock=clock, stop=session.stop
            )
            if self.is_main or self.world.in_step:
                images, values = self.heldout.grid(session.rollout_policy, self.config, evaluation)
            if self.is_main:
                evaluation.save(self.config.output.dir, step, self.heldout.prompts)
                path = self.config.output.dir / "samples" / f"step_{step:06d}.png"
                save_grid(path, images, self.heldout.prompts[: len(images)], rewards=values, title=f"step {step}")
        finally:
            session.sync()
        if step == 0:
            self._base_means = evaluation.means()
        metrics = evaluation.metrics(self._base_means if step else {})
        return metrics | {"time/evaluate_s": clock.metrics()["time/total_s"]}

    def _save(self, step: int) -> None:
        """Checkpoint and export of the weights after ``step``, whose metrics are the last that were recorded."""
        tensors = {}
        for name, tensor in self.session.state_dict().items():
            full = whole(tensor)  # which takes every process, where it is sharded
            if self._folder:
                tensors[name] = full.cpu() if full is not tensor else tensor
        if not self._folder:
            return
        heldout: float | None = None
        verdict: Kind | None = None
        last = self.tracking.history[-1]
        if is_evaluated(self.config, last) and last["step"] == step:
            heldout = last[f"eval/{self.config.reward.name}/mean"]
            verdict = judge(self.config, self.tracking.history).kind
        checkpoint = Checkpoint(step, tensors, heldout, self._base, verdict)
        self._folder.save(checkpoint)
        self._export(checkpoint)

    def _export(self, checkpoint: Checkpoint) -> None:
        folder = self.config.output.dir
        if not self.config.lora.enabled:  # the policy itself is large, and `solrl export --raw` away
            export_checkpoint(folder / "transformer", checkpoint, self.config)
            return
        export_checkpoint(folder / "lora", checkpoint, self.config)
        export_checkpoint(folder / "lora_raw", checkpoint, self.config, raw=True)

    def _finish(self) -> None:
        """Roll the exports back to the best checkpoint where the run was stopped early, and write the report."""
        if stops_early(self.config, self.tracking.history):
            self._roll_back(int(self.tracking.history[-1]["step"]))
        self.tracking.plan([f"report: {write_report(self.config.output.dir)}"])

    def _roll_back(self, last: int) -> None:
        """Export the best checkpoint's weights; the checkpoints stay as they are."""
        best = pick_checkpoint(self.config.output.dir, "best")
        found = f"step {best.step}, held-out {self.config.reward.name} {best.heldout:.3f}, verdict {best.verdict}"
        if best.step == last:
            self.tracking.plan(labelled("export", f"the last checkpoint is the best there is: {found}"))
            return
        self._export(best)
        self.tracking.plan(labelled("export", f"rolled back to the best checkpoint: {found}; the last is step {last}"))

    def _write_ledger(self, step: int, record: StepRecord) -> None:
        config = self.session.config
        stage = config.explore if config.explore.enabled else config.regenerate
        entries = ledger.step_entries(
            record.prompts,
            record.seeds,
            stage,
            precision=self.session.precision if config.explore.enabled else "full",
            policy_version=record.version,
            proxy=record.proxy,
            selection=record.selection,
            rewards=record.rewards,
            audits=record.audits,
        )
        ledger.write(config.output.dir, step, entries)

    def _facts(self, step: int, record: StepRecord) -> StepFacts:
        rewards = record.rewards
        norms = self.world.sum_(clean_norms(rewards.clean, rewards.values.numel()))
        different = [len(set(row[there].tolist())) for row, there in zip(rewards.values, rewards.present, strict=True)]
        stages = [s for s in (record.proxy, *record.audits.values()) if s is not None]
        if self.config.regenerate.enabled:
            stages.append(rewards)
        return StepFacts(
            step=step,
            num_groups=len(record.prompts),
            trained_groups=sum(number > 1 for number in different),
            zero_std_groups=record.selection.num_without_spread + different.count(1),
            num_scores=sum(s.present.numel() for s in stages),
            num_missing=sum(int((~s.present).sum()) for s in stages),
            num_nonfinite=int((~norms.isfinite()).sum()),
            clean_norm=float(norms.mean()) if len(norms) else None,
            grad_norm=record.metrics.get("grad_norm"),
            policy_change=record.metrics.get("health/policy_change"),
            synced_bytes=record.synced.changed_bytes if record.metrics else None,
        )

    def _plan(self) -> list[str]:
        config, learner = self.config, self.session.learner
        frozen = compute_dtype(config.model, self.world.device)
        trained = sum(p.numel() for p in learner.parameters) / 1e6
        what = f"LoRA rank {config.lora.rank} on {len(learner.parameters) // 2} layers ({trained:.2f} M trained)"
        policy = (
            f"{config.model.path}, {config.model.width}x{config.model.height}, {str(frozen).removeprefix('torch.')}, "
            f"{what if config.lora.enabled else f'full fine-tuning of {trained:.2f} M weights'}"
            f"{f', sharded over {self.world.size}' if self.world.in_step else ''}"
        )
        return plan_lines(
            config,
            device=device_name(self.world.device),
            world_size=self.world.size,
            policy=policy,
            explorer=self.session.precision_line,
        )


def _reward_metrics(record: StepRecord) -> dict[str, float]:
    metrics: dict[str, float] = {}
    values = record.rewards.values[record.rewards.present]
    if len(values):
        metrics |= {"reward/mean": float(values.mean()), "reward/std": float(values.std(correction=0))}
    if record.proxy is not None and record.proxy.present.any():
        metrics["proxy_reward/mean"] = float(record.proxy.values[record.proxy.present].mean())
    return metrics


def step_fidelity(record: StepRecord) -> dict[str, float]:
    """How alike both stages order candidates by each stage's own ``signal``, which selects and trains.

    That of a reward of several parts is standardized over whole groups in both, but over the kept where only those were
    drawn again: there even a perfect explorer may stay below 1.
    """
    proxy, rewards = record.proxy, record.rewards
    if proxy is None or not record.selection.groups or rewards.values.shape[1] < 2:
        return {}
    rows = record.selection.indices
    groups = record.selection.groups
    metrics = kept_fidelity(proxy.signal[groups].gather(1, rows), rewards.signal, rewards.present)
    for group, scores in record.audits.items():
        present = proxy.present[group] & scores.present[0]
        metrics |= full_fidelity(proxy.signal[group], scores.signal[0], rewards.values.shape[1], present)
    return metrics
