"""What a run folder may not do unasked, whichever setting asks for it."""

from pathlib import Path
from typing import Any

import pytest

from solrl.errors import UsageError
from solrl.settings import load_config, shipped_configs
from solrl.trust import require_trust

CODE = "theirs:Reward"
SERVER = "http://elsewhere:1"


@pytest.mark.parametrize(
    "overrides",
    [
        {"reward.name": CODE},
        {"model.family": "theirs.models:Policy"},
        {"evaluate.rewards": ["shapes", CODE]},
        {"reward.name": "weighted_sum", "reward.options": {"weights": {CODE: 1.0}}},
        {
            "reward.name": "weighted_sum",
            "reward.options": {
                "weights": {"weighted_sum": 1.0},
                "options": {"weighted_sum": {"weights": {CODE: 1.0}}},
            },
        },
    ],
)
def test_code_needs_trust_wherever_it_is_named(overrides: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"runs code of its own \(.* = theirs.*\); pass --trust-code"):
        require_trust(Path("run"), load_config("tiny_flux", overrides))


@pytest.mark.parametrize(
    "options",
    [
        {"url": "elsewhere:1"},
        {"server": SERVER},
        {"weights": {"generative": 1.0}, "options": {"generative": {"url": SERVER}}},
        {"servers": ["x", SERVER]},
    ],
)
def test_a_server_needs_trust_wherever_it_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"tokens to .*elsewhere:1; pass --trust-code"):
        require_trust(Path("run"), load_config("tiny_flux", {"reward.options": options}))


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_need_no_trust(name: str) -> None:
    require_trust(Path("run"), load_config(name))
