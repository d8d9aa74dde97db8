"""The command line: exit codes, one-line errors, help, and an answer before torch loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from solrl import cli
from solrl.config import Config
from solrl.errors import Interrupted, SolrlError, UsageError
from solrl.settings import setting_types

ROOT = Path(__file__).parent.parent


def fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "rewards")])
    env = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "80", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (SolrlError("no space left"), 1), (UsageError("bad value"), 2), (Interrupted("all saved"), 3)],
)
def test_exit_codes(
    error: SolrlError | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(words: list[str]) -> None:
        if error:
            raise error

    monkeypatch.setitem(cli.COMMANDS, "train", command)
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == (f"solrl: error: {error}\n" if error else "")


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(words: list[str]) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setitem(cli.COMMANDS, "train", command)
    with pytest.raises(KeyError):
        cli.main(["train"])


@pytest.mark.parametrize(("flags", "variable"), [(["--debug"], ""), ([], "1")])
def test_debug_shows_where_an_error_came_from(
    flags: list[str], variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOLRL_DEBUG", variable)
    assert cli.main(["train", "nowhere", *flags]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and error.splitlines()[-1].startswith("solrl: error: no config 'nowhere'")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian", "tiny_flux"], "no command 'trian'"),
        (["train"], "CONFIG"),
        (["train", "--seed", "3"], "comes first"),
        (["train", "nowhere"], "no config 'nowhere'"),
        (["train", "tiny_flux", "--train.num_step", "5"], "nearest valid one is train.num_steps"),
        (["train", "tiny_flux", "--train.num_steps", "five"], "train.num_steps = 'five'"),
        (["train", "tiny_flux", "--explore.precision", "nvfp3"], "explore.precision = 'nvfp3'"),
        (["replay", "runs/x"], "required: --step, --candidate"),
        (["replay", "runs/x", "--step", "one", "--candidate", "0"], "--step: invalid int value: 'one'"),
        (["report"], "required: run"),
        (["export", "here"], "required: out"),
        (["export", "run", "out", "--best", "--step", "3"], "not allowed with"),
        (["train", "tiny_flux", "extra"], "unexpected argument 'extra'"),
        (["train", "tiny_flux", "--resume", "yes"], "unexpected argument 'yes'"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1 and output.err.startswith("solrl: error: ")
    assert expected in output.err


def test_launcher_settings_stop_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert cli.main(["train", "tiny_flux"]) == 2
    assert "DeepSpeed" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "train"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0 and f"usage: solrl {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_overview_names_every_command_in_80_columns(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    for command in [*cli.COMMANDS, "version"]:
        assert f"\n  {command}" in text


def test_help_lists_every_setting_with_meaning_type_and_default() -> None:
    done = fresh("from solrl.cli import main; main(['train', '--help'])")
    text = " ".join(done.stdout.replace("\u2502", " ").split())
    assert done.returncode == 0 and all(len(line) <= 80 for line in done.stdout.splitlines())
    for key, _ in setting_types():
        assert f"--{key} " in text
    assert "--train.num_steps INT Optimizer steps; one per round of exploration. (default: 300)" in text
    assert "--explore.enabled {True,False} Whether the stage runs. (default: True)" in text
    for name, field in Config.model_fields["train"].annotation.model_fields.items():  # type: ignore[union-attr]
        assert " ".join(str(field.description).split()) in text, name


def test_help_of_a_config_shows_its_values() -> None:
    done = fresh("from solrl.cli import main; main(['train', 'flux1_dev', '--help'])")
    assert "FLUX.1-dev)" in done.stdout and "model=openai/clip-vit-large-patch14" in done.stdout


def test_help_and_mistakes_answer_before_torch_loads() -> None:
    code = """
import sys
from solrl.cli import main
codes = []
for words in (["--help"], ["version"], ["train", "tiny_flux", "--train.lr", "3"], ["nothing"], ["train", "--help"]):
    codes.append(main(words))
heavy = {"torch", "diffusers", "transformers", "peft", "accelerate"} & set(sys.modules)
sys.exit(f"{codes} {heavy}" if heavy or codes != [0, 0, 2, 2, 0] else 0)
"""
    done = fresh(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_a_reader_that_leaves_early_causes_no_complaint(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "rewards")])}
    done = subprocess.run([sys.executable, "-m", "solrl", *words], env=env, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.stderr == b""


def test_a_rank_names_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "2")
    assert cli.main(["train", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("solrl: error (rank 2): ")


@pytest.mark.parametrize("command", [["-m", "solrl"], [str(ROOT / "scripts" / "train.py")]])
def test_the_other_ways_in_are_the_same_program(command: list[str]) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "rewards")])
    words = ["tiny_flux", "--sed", "1"] if command[0].endswith(".py") else ["train", "tiny_flux", "--sed", "1"]
    done = subprocess.run(
        [sys.executable, *command, *words], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "solrl: error: unknown setting sed (override); the nearest valid one is seed\n"
