"""The examples do what they say, started by the commands in them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from solrl.cli import main

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
