"""A vision-language model as judge: it looks at the image, is asked how well the prompt was met, and names a rating.

The judge is a transformers model in this process, or any OpenAI-compatible server (vLLM, SGLang) at `url`. Two ways
of reading it:

- reply (the default): it writes up to `max_new_tokens` tokens, greedily, and the last match of `pattern` is its rating;
- expected: it is asked for the bare rating, and the score is the mean rating under its probabilities for the first
  token. Smoother, and one token long.

A reply without a rating is followed up: the judge sees it and is asked for the rating alone, up to `retries` times.
What is still unreadable is an error, or a missing score where `unreadable = "missing"` says so. It is never 0.
"""

import re
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from solrl_rewards.inputs import check_inputs
from solrl_rewards.scoring import parts

QUESTION = """Look at the image. It was made for this description:

{prompt}

Judge how completely and correctly the image shows what is described, and how good it looks. Explain your judgement in
at most three sentences. Then end with a line of the form "Final Score: N", where N is a number from 1 (useless) to 5
(flawless)."""

BARE_QUESTION = """Look at the image. It was made for this description:

{prompt}

How completely and correctly does it show what is described, and how good does it look, from 1 (useless) to 5
(flawless)? Answer with the number alone."""

REMINDER = 'Your answer names no score. Answer with nothing but a line "Final Score: N".'
PATTERN = r"(?i)final score\W*?(-?\d+(?:\.\d+)?)"

Turn = tuple[str, str]
"""(role, text); the first turn, the user's, comes with the image."""


class Judge(Protocol):
    """What can be asked about images."""

    def reply(self, images: Sequence[Tensor], turns: Sequence[Sequence[Turn]], max_new_tokens: int) -> list[str]:
        """The next turn of each conversation about its [3, H, W] image in [0, 1]."""
        ...

    def probabilities(
        self, images: Sequence[Tensor], turns: Sequence[Sequence[Turn]], choices: Sequence[str]
    ) -> list[list[float] | None]:
        """For each conversation how probable each choice is as the next token; None where no choice is."""
        ...


class Generative:
    """The judge's rating over the highest one."""

    name = "generative"

    def __init__(
        self,
        model: str,
        *,
        url: str | None = None,
        question: str | None = None,
        pattern: str = PATTERN,
        lowest: int = 1,
        highest: int = 5,
        expected: bool = False,
        max_new_tokens: int = 256,
        retries: int = 1,
        unreadable: str = "error",
        batch_size: int = 8,
        device: torch.device | str | None = None,
        dtype: str = "bfloat16",
        timeout_s: float = 120.0,
        patience_s: float = 600.0,
    ) -> None:
        """`model`: a folder or hub id, or what the server at `url` (such as http://127.0.0.1:8000/v1) calls it.

        `question` holds {prompt}. At a server `batch_size` is the number of requests under way at once, and a key is
        read from the environment variable OPENAI_API_KEY.
        """
        question = question or (BARE_QUESTION if expected else QUESTION)
        if "{prompt}" not in question:
            raise ValueError("generative: question must contain {prompt}")
        if unreadable not in ("error", "missing"):
            raise ValueError(f"generative: unreadable must be error or missing, got {unreadable!r}")
        if batch_size < 1 or max_new_tokens < 1 or retries < 0:
            raise ValueError("generative: batch_size and max_new_tokens must be at least 1, retries at least 0")
        if not lowest < highest or highest <= 0:
            raise ValueError(f"generative: lowest must be below highest, and highest above 0, got {lowest}, {highest}")
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"generative: pattern is no regular expression: {error}") from error
        if self.pattern.groups != 1:
            raise ValueError(f"generative: pattern needs one group, which catches the number, got {pattern!r}")
        self.question, self.lowest, self.highest, self.expected = question, lowest, highest, expected
        self.max_new_tokens, self.retries, self.unreadable = max_new_tokens, retries, unreadable
        self.batch_size = batch_size
        self.choices = [str(rating) for rating in range(lowest, highest + 1)]
        self.range = (lowest / highest, 1.0)
        self.description = f"rating of the judge {model}, {lowest} to {highest}, over {highest}"
        if url is None:
            from solrl_rewards.judge_local import LocalJudge

            self.judge: Judge = LocalJudge(model, device, dtype)
        else:
            from solrl_rewards.judge_server import ServerJudge

            self.judge = ServerJudge(model, url, batch_size, timeout_s, patience_s)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] images in [0, 1] and B prompts -> [B] float32, [B] whether each is present; on the CPU."""
        check_inputs(self.name, images, prompts)
        turns: list[list[Turn]] = [[("user", self.question.replace("{prompt}", prompt))] for prompt in prompts]
        ratings: list[float | None] = []
        for part in parts(len(prompts), self.batch_size):
            ask = self._expected if self.expected else self._replied
            ratings += ask(list(images[part]), turns[part])
        present = torch.tensor([rating is not None for rating in ratings], dtype=torch.bool)
        values = torch.tensor([0.0 if rating is None else rating / self.highest for rating in ratings])
        return values, present

    def read(self, reply: str) -> float | None:
        """The last rating in a reply, None where there is none within bounds."""
        found = self.pattern.findall(reply)
        try:
            rating = float(found[-1])
        except (IndexError, ValueError):
            return None
        return rating if self.lowest <= rating <= self.highest else None

    def _replied(self, images: list[Tensor], turns: list[list[Turn]]) -> list[float | None]:
        ratings: list[float | None] = [None] * len(images)
        open_rows, replies = list(range(len(images))), [""] * len(images)
        for _ in range(1 + self.retries):
            answers = self.judge.reply(
                [images[row] for row in open_rows], [turns[row] for row in open_rows], self.max_new_tokens
            )
            for row, answer in zip(open_rows, answers, strict=True):
                ratings[row], replies[row] = self.read(answer), answer
                turns[row] = [*turns[row], ("assistant", answer), ("user", REMINDER)]
            open_rows = [row for row in open_rows if ratings[row] is None]
            if not open_rows:
                return ratings
        if self.unreadable == "error":
            raise ValueError(
                f"no rating from {self.lowest} to {self.highest} in {1 + self.retries} replies for {len(open_rows)} "
                f"images; the last one: {replies[open_rows[0]]!r:.200}"
            )
        return ratings

    def _expected(self, images: list[Tensor], turns: list[list[Turn]]) -> list[float | None]:
        ratings: list[float | None] = []
        for weights in self.judge.probabilities(images, turns, self.choices):
            if weights is None and self.unreadable == "error":
                raise ValueError(f"the judge's next token is none of {', '.join(self.choices)}")
            if weights is None:
                ratings.append(None)
            else:
                total = sum((self.lowest + number) * weight for number, weight in enumerate(weights))
                ratings.append(total / sum(weights))
        return ratings
