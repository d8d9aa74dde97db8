"""Any ledger entry can be drawn again: the very image, from any checkpoint or from none."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from solrl import ledger
from solrl.checkpoint import checkpoint_path
from solrl.errors import SolrlError, UsageError
from solrl.replay import Redrawn, replay
from solrl.settings import load_config, save_config
from solrl.train import train
from tests.parts import Redness, tiny_config

STEPS = 3


class Camera(Redness):
    """Redness that remembers every image it saw."""

    seen: dict[float, Tensor] = {}  # noqa: RUF012

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        values = super().__call__(images, prompts)
        self.seen.update(zip(values.double().tolist(), images.clone(), strict=True))
        return values


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three steps, checkpoints after the second and third."""
    dir = tmp_path_factory.mktemp("run")
    train(
        tiny_config(
            dir,
            reward={"name": "tests.test_replay:Camera"},
            prompts={"per_step": 2},
            explore={"precision": "emulated_nvfp4"},
            regenerate={"group_size": 2},
            train={"num_steps": STEPS, "learning_rate": 0.01},
            evaluate={"num_prompts": 1},
            output={"checkpoint_every_steps": 2},
        )
    )
    yield dir


def entry(dir: Path, step: int, kept: bool) -> ledger.LedgerEntry:
    """A kept or left candidate of the second prompt of a step."""
    return next(e for e in ledger.read(dir, step) if e.prompt_index == 1 and e.kept == kept)


def redraw(dir: Path, of: ledger.LedgerEntry, step: int, **options: Any) -> list[Redrawn]:
    return replay(dir, step, of.candidate, prompt_index=1, trust_code=True, **options)


def files(dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in dir.rglob("*") if path.is_file() and "replay" not in path.parts}


@pytest.mark.parametrize(
    ("step", "where"), [(3, "from checkpoint step 2"), (2, "from the start, running 1 step again")]
)
def test_an_entry_is_drawn_again_bit_for_bit(run_dir: Path, tmp_path: Path, step: int, where: str) -> None:
    chosen, before, said = entry(run_dir, step, kept=True), files(run_dir), []
    explored, regenerated = redraw(run_dir, chosen, step, out=tmp_path, report=said.append)
    assert said[0] == where
    for one, recorded in ((explored, chosen.proxy_reward), (regenerated, chosen.reward)):
        assert recorded is not None and one.score == one.recorded == recorded
        assert torch.equal(one.image, Camera.seen[recorded])
        pixels = torch.from_numpy(np.asarray(Image.open(one.path)).copy()).permute(2, 0, 1)
        assert torch.equal(pixels, (one.image * 255).round().to(torch.uint8))
    assert f"ledger {chosen.reward:.4f}, replayed {chosen.reward:.4f}" in said[-1]
    assert files(run_dir) == before


def test_a_candidate_that_was_not_kept_is_drawn_as_explored(run_dir: Path) -> None:
    chosen = entry(run_dir, 1, kept=False)
    (explored,) = redraw(run_dir, chosen, 1)
    assert explored.stage == "explore" and explored.score == chosen.proxy_reward
    assert explored.path.parent == run_dir / "replay"


def test_a_score_that_differs_from_the_ledgers_is_an_error(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    entries = ledger.read(tmp_path, 1)
    chosen = entry(tmp_path, 1, kept=False)
    assert chosen.proxy_reward is not None
    entries[entries.index(chosen)] = dataclasses.replace(chosen, proxy_reward=chosen.proxy_reward + 0.01)
    ledger.write(tmp_path, 1, entries)
    with pytest.raises(SolrlError, match=r"explore was scored .* in the ledger and .* now"):
        redraw(tmp_path, chosen, 1)


def test_wrong_numbers_are_named_before_anything_loads(run_dir: Path) -> None:
    with pytest.raises(SolrlError, match="steps 1 to 3"):
        replay(run_dir, 4, 0, trust_code=True)
    with pytest.raises(UsageError, match="candidates 0 to 11, not 12"):
        replay(run_dir, 1, 12, trust_code=True)
    with pytest.raises(UsageError, match="candidates 0 to 5, not 6"):
        replay(run_dir, 1, 6, prompt_index=0, trust_code=True)
    with pytest.raises(UsageError, match="prompts 0 to 1, not 2"):
        replay(run_dir, 1, 0, prompt_index=2, trust_code=True)


def test_code_named_by_a_run_folder_runs_only_when_trusted(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="pass --trust-code"):
        replay(run_dir, 1, 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("remote", {"url": "http://elsewhere:1"}),
        ("weighted_sum", {"weights": {"generative": 1.0}, "options": {"generative": {"url": "http://elsewhere:1"}}}),
    ],
)
def test_a_server_named_by_a_run_folder_is_asked_only_when_trusted(
    run_dir: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """It would be sent this machine's tokens."""
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    config = load_config(run_dir)
    reward = config.reward.model_copy(update={"name": name, "options": options})
    save_config(config.model_copy(update={"reward": reward}), tmp_path / "config.toml")
    with pytest.raises(UsageError, match="tokens to http://elsewhere:1; pass --trust-code"):
        replay(tmp_path, 1, 0)


def test_other_prompts_than_the_runs_are_noticed(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"a red circle number {i}\n" for i in range(20)))
    text = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace('train = "shapes_train"', f"train = {json.dumps(str(prompts))}"))
    with pytest.raises(SolrlError, match="other prompts"):
        redraw(tmp_path, entry(tmp_path, 3, kept=True), 3)
    shutil.rmtree(checkpoint_path(tmp_path, 2))
    with pytest.raises(SolrlError, match="other prompts"):
        redraw(tmp_path, entry(tmp_path, 3, kept=True), 3)
