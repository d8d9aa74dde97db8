"""Which jobs there are: batches released, groups going through their passes, batches that are complete."""

from __future__ import annotations

from typing import NamedTuple

from solrl.runtime.roles import EXPLORE, SCORE, Working
from solrl.runtime.workload import Sample, Setting


class Task(NamedTuple):
    """A job to submit."""

    role: Working
    job: int
    length: float
    """Tokens it starts with."""
    rounds: float
    """It ends after so many."""


class Progress:
    """The state of all groups of a run. A job's id is its place in batch, group and pass; it is explored, then
    scored."""

    def __init__(self, setting: Setting, sample: Sample) -> None:
        self.setting, self.sample = setting, sample
        self.outstanding: dict[Working, int] = {EXPLORE: 0, SCORE: 0}
        """Role -> jobs submitted that have not ended."""
        self.rounds = 0.0
        """Of all jobs that ended."""
        self.num_released = 0
        """Batches."""
        self._starts = [sum(one.num_jobs for one in setting.passes[:number]) for number in range(len(setting.passes))]
        self._per_group = setting.jobs_per_group
        self._in_pass: dict[int, int] = {}  # group * passes + pass -> jobs not scored
        self._groups_left = [setting.batch.num_groups] * setting.batch.num_batches
        self._groups_done = 0

    def ready(self, batch: int) -> bool:
        """``batch``, the next to be trained, is complete."""
        settings = self.setting.batch
        if batch >= settings.num_batches:
            return False
        if settings.membership == "first":
            return self._groups_done >= (batch + 1) * settings.num_groups
        return self._groups_left[batch] == 0

    def release(self, trained: int, staleness: int, *, one_at_a_time: bool) -> list[Task]:
        """The first jobs of every batch that may start when ``trained`` batches are trained."""
        settings, tasks = self.setting.batch, list[Task]()
        while self.num_released < settings.num_batches and self.num_released <= trained + staleness:
            if one_at_a_time and (self.outstanding[EXPLORE] or self.outstanding[SCORE]):
                break
            first = self.num_released * settings.num_groups
            for group in range(first, first + settings.num_groups):
                tasks += self._begin(group, 0)
            self.num_released += 1
        return tasks

    def finished(self, role: Working, job: int, length: float) -> list[Task]:
        """``job`` of ``role`` has ended with ``length`` tokens; what follows."""
        self.outstanding[role] -= 1
        group, place = divmod(job, self._per_group)
        number = len(self._starts) - 1
        while place < self._starts[number]:
            number -= 1
        one = self.setting.passes[number]
        self.rounds += self.sample.explore[job] if role == EXPLORE else self.sample.score[job]
        if role == EXPLORE and one.score is not None and self.sample.score[job] > 0:
            start = one.score_prompt_tokens + (length if one.score_reads_answer else 0.0)
            self.outstanding[SCORE] += 1
            return [Task(SCORE, job, start, self.sample.score[job])]
        return self._scored(group, number)

    def train_gpu_seconds(self, batch: int) -> float:
        """GPU-seconds of the update of ``batch``, which trains on the last pass."""
        train, settings, last = self.setting.train, self.setting.batch, self.setting.passes[-1]
        seconds = train.gpu_s_per_job * settings.num_groups * last.num_jobs
        if train.gpu_s_per_token:
            first = batch * settings.num_groups
            seconds += train.gpu_s_per_token * sum(
                last.prompt_tokens + rounds
                for group in range(first, first + settings.num_groups)
                for rounds in self.sample.explore[
                    group * self._per_group + self._starts[-1] : (group + 1) * self._per_group
                ]
            )
        return seconds

    def _begin(self, group: int, number: int) -> list[Task]:
        one = self.setting.passes[number]
        self._in_pass[group * len(self._starts) + number] = one.num_jobs
        self.outstanding[EXPLORE] += one.num_jobs
        first = group * self._per_group + self._starts[number]
        return [
            Task(EXPLORE, job, one.prompt_tokens, self.sample.explore[job])
            for job in range(first, first + one.num_jobs)
        ]

    def _scored(self, group: int, number: int) -> list[Task]:
        key = group * len(self._starts) + number
        self._in_pass[key] -= 1
        if self._in_pass[key]:
            return []
        del self._in_pass[key]
        if number + 1 < len(self._starts):
            return self._begin(group, number + 1)
        self._groups_done += 1
        self._groups_left[group // self.setting.batch.num_groups] -= 1
        return []
