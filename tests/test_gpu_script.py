"""tests/gpu/run.py where there is no GPU: it says so, its dry run meets every part, and a wrong byte fails it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import run

SCRIPT = Path(__file__).parent / "gpu" / "run.py"


def fast(path: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and file of a dry run without what is compiled."""
    code = run.main([str(path), "--dry-run", "--limit-s", "0"])
    return code, json.loads(path.read_text())


def test_quantizers_and_products_are_checked_on_a_cpu(tmp_path: Path) -> None:
    code, payload = fast(tmp_path / "new" / "gpu.json")
    assert code == 0 and payload["dry_run"] and payload["formats"] == ["fp8", "nvfp4"]
    assert payload["environment"]["device"] == "cpu" and payload["environment"]["torch"] == torch.__version__
    assert all(check["passed"] for check in payload["checks"]) and len(payload["checks"]) == 3
    assert {"nvfp4_quantize", "fp8_quantize_rows", "product, bf16", "product, nvfp4"} <= set(payload["measured"])
    assert "the limit is 0" in payload["left_out"]["flux, batch 2, fp8"]


def test_a_wrong_byte_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))

    def swapped(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = real(name, x)
        if next(calls) == 0:
            codes = (codes >> 4) | (codes << 4)
        return codes, scales

    real = run.quantized
    monkeypatch.setattr(run, "quantized", swapped)
    code, payload = fast(tmp_path / "gpu.json")
    failed = [check for check in payload["checks"] if not check["passed"]]
    assert code == 1 and len(failed) == 1 and "codes" in failed[0]["detail"]


def test_a_part_that_raises_is_a_failed_check_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setattr(run, "measure_bandwidth", broken)
    code, payload = fast(tmp_path / "gpu.json")
    failed = [check for check in payload["checks"] if not check["passed"]]
    assert code == 1 and [check["detail"] for check in failed] == ["RuntimeError: no such kernel"]
    assert len(payload["checks"]) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run.main([str(tmp_path / "gpu.json")]) == 2
    assert "--dry-run" in capsys.readouterr().err and not (tmp_path / "gpu.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_meets_every_part(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, SCRIPT, "gpu.json", "--dry-run", "--limit-s", "2000"], cwd=tmp_path, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    payload = json.loads((tmp_path / "gpu.json").read_text())
    names = " ".join(check["name"] for check in payload["checks"])
    for part in ("bytes", "computes what it says", "CUDA graph", "flux", "sd3", "sana", "requantize"):
        assert part in names
    assert set(payload["left_out"]) == {"fp8: kernel name", "nvfp4: kernel name"}
