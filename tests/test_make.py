"""The make targets a newcomer types, with a stub for the installed program; and the rule that CI skips nothing."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def checkout(folder: Path, program: str) -> None:
    """A folder with the Makefile and an installed environment whose `solrl` and `accelerate` are ``program``."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("solrl", "accelerate"):
        (binaries / name).write_text(f"#!/bin/sh\n{program}\n")
        (binaries / name).chmod(0o755)
    stamp = folder / ".venv" / "installed"
    stamp.touch()
    os.utime(stamp, (time.time() + 1, time.time() + 1))


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"]}  # none of the variables of a `make test` that runs these tests
    return subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_make_demo_starts_each_run_in_a_folder_of_its_own(tmp_path: Path) -> None:
    checkout(tmp_path, 'echo "cpu: $ACCELERATE_USE_CPU args: $*"; for word; do last=$word; done; mkdir -p "$last"')
    for run, words, start in (
        ("runs/demo", ["PROCESSES=1"], "cpu:  args: train"),
        ("runs/demo-2", [], "cpu: true args: launch --multi_gpu --num_processes 2"),
        ("runs/demo-3", ["PROCESSES=4"], "cpu: true args: launch --multi_gpu --num_processes 4"),
    ):
        done = make(tmp_path, "demo", *words)
        assert done.returncode == 0, done.stderr
        assert start in done.stdout and f" tiny_flux --output.dir {run}\n" in done.stdout
        assert done.stdout.endswith(f"Open {run}/report.html in a browser.\n")


def test_make_demo_fails_when_training_fails(tmp_path: Path) -> None:
    checkout(tmp_path, "exit 1")
    done = make(tmp_path, "demo")
    assert done.returncode != 0 and "report.html" not in done.stdout


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    old = tmp_path / "python"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 10, 4); exec(sys.argv[1])" "$2"\n'
    )
    old.chmod(0o755)
    done = make(tmp_path, "test", f"PYTHON={old}")
    assert done.returncode != 0 and "Python 3.11 or newer is needed" in done.stderr and "is 3.10" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(("value", "code"), [("1", 1), ("", 0)])
def test_a_skipped_test_fails_the_run_where_nothing_may_be_skipped(value: str, code: int, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text("import pytest\ndef test_a(): pytest.skip('no')\ndef test_b(): pass\n")
    environment = {**os.environ, "SOLRL_FAIL_ON_SKIP": value}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
