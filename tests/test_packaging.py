"""What gets installed, and how light ``import solrl`` is."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import solrl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(code: str, *paths: Path, cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_solrl_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = "torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "pydantic", "tyro", "solrl_rewards"
    code = f"import sys, solrl; print([name for name in {heavy} if name in sys.modules])"
    assert run(code, ROOT, ROOT / "rewards", cwd=tmp_path) == "[]"


def test_loading_a_config_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, solrl; solrl.load_config('tiny_flux'); print('torch' in sys.modules)"
    assert run(code, ROOT, cwd=tmp_path) == "False"


def test_every_public_name_is_there() -> None:
    for name in solrl.__all__:
        assert getattr(solrl, name) is not None
    assert set(solrl.__all__) == set(dir(solrl))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = solrl.nothing  # type: ignore[attr-defined]


def test_public_functions_are_not_hidden_by_the_modules_they_live_in() -> None:
    import solrl.rollout
    import solrl.train

    assert callable(solrl.train) and callable(solrl.rollout)
    from solrl.train import train

    assert solrl.train is train


def test_every_package_folder_is_listed() -> None:
    """setuptools gets a list because configs/ and rewards/ stand outside solrl/; a forgotten folder would not ship."""
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "solrl").rglob("__init__.py")}
    found |= {".".join(file.parent.relative_to(ROOT / "rewards").parts) for file in ROOT.glob("rewards/**/__init__.py")}
    assert found | {"solrl.configs"} == set(PROJECT["tool"]["setuptools"]["packages"])


def test_the_dependencies_are_exactly_what_is_imported() -> None:
    declared = {line.split(">")[0].replace("-", "_") for line in PROJECT["project"]["dependencies"]}
    imported: set[str] = set()
    for file in [*ROOT.glob("solrl/**/*.py"), *ROOT.glob("rewards/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    optional = {"open_clip", "rapidocr", "transformer_engine", "datasets", "ray"}  # of extras
    optional.add("triton")  # comes with torch where there is a GPU
    foreign = imported - sys.stdlib_module_names - {"solrl", "solrl_rewards"} - optional
    assert {"pillow" if name == "PIL" else name for name in foreign} == declared


@pytest.mark.slow
def test_a_wheel_holds_two_packages_and_everything_they_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignore)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)

    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"solrl", "solrl_rewards"}
    shipped = {path.name for path in ROOT.glob("configs/*.toml")}
    assert {path.name for path in (site / "solrl" / "configs").iterdir()} == shipped
    for assets in ("solrl/assets", "rewards/solrl_rewards/assets"):
        expected = {path.relative_to(ROOT / assets) for path in (ROOT / assets).rglob("*") if path.is_file()}
        installed = site / assets.removeprefix("rewards/")
        assert {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()} == expected
    licenses = list(site.glob("*.dist-info/licenses/LICENSE"))
    assert licenses and "Apache License" in licenses[0].read_text()

    code = "import solrl, solrl_rewards; print(solrl.__file__); print(solrl.load_config('tiny_flux').model.path)"
    file, path = run(code, site, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(site) and path == "tiny_flux"
