"""The examples do what they say, started by the commands in them."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solrl.cli import main
from tests.children import in_children

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "train.num_steps": 1, "prompts.per_step": 1, "explore.group_size": 4, "explore.num_steps": 2,
    "regenerate.group_size": 2, "regenerate.num_steps": 2, "batch.rollout": 4, "batch.train": 2,
    "evaluate.num_prompts": 1, "evaluate.num_steps": 1, "evaluate.images_per_prompt": 1,
}  # fmt: skip


@pytest.mark.slow
def test_a_model_and_an_objective_of_ones_own_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLES / "mine.py").read_text()
    command = re.search(r"solrl (train .*?)\n\"\"\"", text.replace("\\\n", " "), re.DOTALL)
    assert command is not None and len(text.split('"""', 2)[2].strip().splitlines()) <= 30
    monkeypatch.syspath_prepend(EXAMPLES)
    small = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    assert main([*shlex.split(command[1]), *small, "--output.dir", str(tmp_path / "run")]) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["grad_norm"] > 0 and last["health/policy_change"] > 0
    card = (tmp_path / "run" / "lora" / "README.md").read_text()
    assert "attn.to_q, attn.to_v)" in card


@pytest.fixture(scope="module")
def llm_roles() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "llm_roles.py"))


@pytest.mark.slow
def test_a_language_model_and_its_judge_shift_on_the_runtime(tmp_path: Path, llm_roles: dict[str, Any]) -> None:
    """Two processes and one write the same texts and verdicts; both processes take both roles."""
    assert len((EXAMPLES / "llm_roles.py").read_text().splitlines()) <= 80

    def said(size: int) -> str:
        log = tmp_path / f"on_{size}"

        def run(rank: int) -> None:
            with Path(log if rank == 0 else os.devnull).open("w") as file, redirect_stdout(file):
                runpy.run_path(str(EXAMPLES / "llm_roles.py"), run_name="__main__")

        assert in_children(size, run) == [(0, "")] * size
        return log.read_text()

    def texts(said: str) -> list[tuple[str, str]]:
        line = r"^((?:text|verdict \d on text) \d+): (\d+) tokens by process \[[\d, ]+\]$"
        found = re.findall(line, said, re.MULTILINE)
        assert len(found) == 16
        return sorted(found)

    one, two = said(1), said(2)
    assert texts(one) == texts(two)
    assert len({length for _, length in texts(one)}) > 10  # they end when they end
    roles = set(re.findall(r"process (\d) took role (\w+)", two))
    assert roles >= {("0", "explore"), ("1", "explore"), ("0", "train"), ("1", "train")}
    assert {role for _, role in roles} == {"explore", "score", "train"}


@pytest.mark.slow
def test_a_text_that_moves_after_every_round_is_the_text_of_one_writer(llm_roles: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model, payload = LlamaForCausalLM(config).eval(), {"tokens": [5, 6, 7], "ranks": [], "seed": 7}

    def written(moves: bool) -> dict[str, Any]:
        work, value, rank = llm_roles["Writing"](model, 0, payload, None), None, 0
        while (value := work.advance()) is None:
            if moves:
                rank += 1
                work = llm_roles["Writing"](model, rank, payload, json.loads(json.dumps(work.give_back())))
        return value

    alone, moved = written(False), written(True)
    assert alone["tokens"] == moved["tokens"] and len(alone["tokens"]) > 30
    assert alone["ranks"] == [0] and moved["ranks"] == list(range(len(moved["ranks"]))) and len(moved["ranks"]) > 3
