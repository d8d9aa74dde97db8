"""Rewards are found by name or dotted path, and importing the package stays light."""

import subprocess
import sys
from pathlib import Path

import pytest
from solrl_rewards import REWARDS, load_reward


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
