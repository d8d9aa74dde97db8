"""Rewards are found by name or dotted path, and importing the package stays light."""

import subprocess
import sys
from pathlib import Path

import pytest
from solrl_rewards import REWARDS, load_reward

EXAMPLES = Path(__file__).parents[2] / "examples"


class Constant:
    """A reward of a user's own."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = (
        "import sys, solrl_rewards; print(sorted({'torch', 'transformers', 'diffusers', 'solrl'} & set(sys.modules)))"
    )
    source = Path(__file__).parents[2] / "rewards"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_dotted_path_gives_a_reward_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_package.my_rewards", sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "my_package", sys.modules[__name__])
    reward = load_reward("my_package.my_rewards:Constant", value=2.0)
    assert isinstance(reward, Constant) and reward.value == 2.0


def install(folder: Path, package: str, entry: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[solrl.rewards]\n{entry}\n")


def test_an_installed_packages_entry_point_gives_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    install(tmp_path, "colourful", "colourfulness = saturation:Saturation")
    assert load_reward("colourfulness", target=0.25).target == 0.25
    install(tmp_path, "second", "colourfulness = other:Reward")
    with pytest.raises(ValueError, match="several packages offer a reward 'colourfulness'"):
        load_reward("colourfulness")


def test_the_example_is_short_and_scores_by_colourfulness(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.syspath_prepend(EXAMPLES)
    assert len((EXAMPLES / "saturation.py").read_text().splitlines()) <= 30
    reward = load_reward("saturation:Saturation", target=1.0)
    grey, red = torch.full((3, 4, 4), 0.5), torch.zeros(3, 4, 4)
    red[0] = 1
    assert reward(torch.stack([grey, red]), ["a", "b"]).tolist() == [0.0, 1.0]


@pytest.mark.slow
def test_the_examples_command_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from solrl.cli import main

    monkeypatch.syspath_prepend(EXAMPLES)
    settings = {
        "reward.name": "saturation:Saturation", "reward.options.target": 0.8, "train.num_steps": 1,
        "prompts.per_step": 1, "explore.group_size": 4, "regenerate.group_size": 2, "batch.rollout": 4,
        "batch.train": 2, "evaluate.num_prompts": 1, "evaluate.num_steps": 1, "output.dir": tmp_path / "run",
    }  # fmt: skip
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    assert main(["train", "tiny_flux", *flags]) == 0
    assert '"reward/mean"' in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shape", {}, "did you mean 'shapes'"),
        ("zzz", {}, "known are shapes"),
        ("no_such_package.module:Thing", {}, "no module 'no_such_package'"),
        ("solrl_rewards.shapes:Nothing", {}, "has no 'Nothing'"),
        ("shapes", {"colour": 1}, "no option 'colour'; its options are device"),
    ],
)
def test_a_wrong_name_or_option_is_refused_in_one_line(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_reward(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["shapes"])
def test_named_rewards_say_how_to_read_them(name: str) -> None:
    assert name in REWARDS
    reward = load_reward(name)
    assert reward.name == name and reward.range[0] < reward.range[1] and len(reward.description) > 20
