"""What every test shares: no hub, one thread, and a switch that turns skipped tests into a failure."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads; tests that never import torch stay fast


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With SOLRL_FAIL_ON_SKIP=1 a run that skipped something fails."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("SOLRL_FAIL_ON_SKIP") == "1" and reporter is not None and reporter.stats.get("skipped"):
        reporter.ensure_newline()
        reporter.write_line(f"{len(reporter.stats['skipped'])} skipped, and SOLRL_FAIL_ON_SKIP=1: failed", red=True)
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
