"""`solrl doctor`: what it says, that it fits a terminal, and that it notices when learning is broken."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from solrl import doctor
from solrl.cli import main
from solrl.doctor import Diagnosis, diagnose, lines
from solrl.objectives.nft import nft_loss
from solrl.quant.trees import RolloutTrees

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return diagnose(CPU)


def test_it_says_which_formats_work_here_and_why_others_do_not(diagnosis: Diagnosis) -> None:
    formats = {finding.name: finding for finding in diagnosis.formats}
    assert {name for name, finding in formats.items() if finding.works} == {
        "full", "fp8", "emulated_nvfp4", "nvfp4 layout",
    }  # fmt: skip
    assert "scaled_mm" in formats["fp8"].detail and "0.03" in formats["fp8"].detail
    assert "needs an NVIDIA GPU" in formats["nvfp4"].detail
    assert diagnosis.automatic.startswith("full (")


def test_it_names_the_machine_and_the_packages(diagnosis: Diagnosis) -> None:
    assert {"device", "cpu", "driver", "torch", "python"} <= set(diagnosis.machine)
    assert diagnosis.packages["torch"] == torch.__version__.partition("+")[0]


def test_what_learning_hangs_on_works_here(diagnosis: Diagnosis) -> None:
    assert [(test.name, test.works) for test in diagnosis.tests] == [
        ("gradient sign", True), ("seeds", True), ("adapter binding", True),
    ], diagnosis.tests  # fmt: skip
    assert diagnosis.is_healthy


def test_it_fits_a_terminal(diagnosis: Diagnosis) -> None:
    assert all(len(line) <= 80 for line in lines(diagnosis))
    assert not any(line.endswith(" ") for line in lines(diagnosis))


def test_the_command_prints_text_or_json_and_fails_where_learning_is_broken(
    diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis)
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_healthy"] is True
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == lines(diagnosis)
    first, *others = diagnosis.tests
    broken = dataclasses.replace(diagnosis, tests=[dataclasses.replace(first, works=False), *others])
    monkeypatch.setattr(doctor, "diagnose", lambda: broken)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert "BROKEN" in shown.out and "broken here: gradient sign" in shown.err


def test_a_loss_of_the_wrong_sign_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def climbing(*arguments: Any) -> Any:
        policy, kl = nft_loss(*arguments)
        return -policy, kl

    monkeypatch.setattr(doctor, "nft_loss", climbing)
    assert "points away" in _failed("gradient sign")


def test_noise_of_another_generator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(seeds: list[int], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(len(seeds), *shape, generator=torch.Generator().manual_seed(seeds[0] % 2**32))

    monkeypatch.setattr(doctor, "noise", other)
    assert "noise depends" in _failed("seeds")


def test_a_tree_that_stays_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutTrees, "requantize_", lambda self, adapters: None)
    assert "rollout tree does not draw" in _failed("adapter binding")


def _failed(name: str) -> str:
    found = {test.name: test for test in doctor._tests(CPU)}
    assert not found[name].works
    return found[name].detail
