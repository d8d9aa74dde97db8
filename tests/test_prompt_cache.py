"""Encoded prompts on the disk: the bits of an encoding or none, within the bound, whoever writes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from solrl.errors import UsageError
from solrl.models import load_policy
from solrl.models.base import DiffusersPolicy
from solrl.prompt_cache import NAME, PromptCache
from solrl.types import Conditioning, Policy
from tests.children import in_children
from tests.families import FAMILIES, family_config, save_random_pipeline
from tests.parts import CPU, tiny_config
from tests.test_encoding import assert_equal, two_steps

PROMPTS = ["a red circle left of a blue square", "a green cross above", "a blue square"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("random")
    return {family: save_random_pipeline(family, root / family) for family in FAMILIES}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's encoded prompts."""
    monkeypatch.setenv("SOLRL_PROMPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(family: str, folder: Path, cache_gb: float = 0.1, **model: Any) -> DiffusersPolicy:
    prompts = {"cache_gb": cache_gb}
    policy = load_policy(family_config(family, folder, model=model, prompts=prompts), CPU)
    assert isinstance(policy, DiffusersPolicy)
    return policy


def calls(policy: DiffusersPolicy, action: Callable[[], Any]) -> tuple[Any, int]:
    """(what ``action`` gives, how often a text encoder ran)."""
    seen: list[int] = []
    hooks = [m.register_forward_hook(lambda *_: seen.append(1)) for m in policy.encoders.modules.values()]
    result = action()
    for hook in hooks:
        hook.remove()
    return result, len(seen)


def files(cache: Path) -> list[Path]:
    return [path for path in sorted(cache.iterdir()) if NAME.fullmatch(path.name)]


def row(value: float, size: int = 100) -> Conditioning:
    return Conditioning(torch.full((1, 1, size), value), mask=torch.ones(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("family", FAMILIES)
def test_cold_warm_and_off_give_the_same_bits_and_a_warm_cache_runs_no_encoder(
    family: str, folders: dict[str, Path], cache: Path
) -> None:
    plain = load(family, folders[family], 0.0).encode(PROMPTS)
    assert not cache.exists()
    first = load(family, folders[family])
    cold, ran = calls(first, lambda: first.encode(PROMPTS[:2]))
    assert ran == 2 * len(first.encoders.modules) and len(files(cache)) == 2
    again = load(family, folders[family])
    warm, ran = calls(again, lambda: again.encode(PROMPTS[:2]))
    assert ran == 0
    mixed, ran = calls(again, lambda: again.encode([*PROMPTS, PROMPTS[0]]))
    assert ran == len(again.encoders.modules), "only the third is new"
    assert_equal(cold, plain.rows([0, 1]))
    assert_equal(warm, plain.rows([0, 1]))
    assert_equal(mixed, plain.rows([0, 1, 2, 0]))


@pytest.mark.slow
def test_all_that_decides_the_bits_is_in_the_key(folders: dict[str, Path], tmp_path: Path, cache: Path) -> None:
    def identity(folder: Path = folders["sana"], family: str = "sana", **model: Any) -> str:
        opened = load(family, folder, **model).cache
        assert opened is not None and opened.folder == cache
        return opened.encoders

    base = identity()
    assert identity() == base == identity(shutil.copytree(folders["sana"], tmp_path / "copy")), "not where it lies"
    assert identity(height=64, guidance=3.0) == base, "what encoding does not depend on"
    found = {base, identity(max_text_tokens=11), identity(dtype="bfloat16"), identity(folders["sd3"], "sd3")}
    changed = shutil.copytree(folders["sana"], tmp_path / "changed") / "text_encoder" / "model.safetensors"
    weights = safetensors.torch.load_file(changed)
    last = sorted(weights)[-1]
    weights[last].flatten()[-1] += 0.5
    safetensors.torch.save_file(weights, changed, {"format": "pt"})
    found.add(identity(tmp_path / "changed"))
    tokenizer = shutil.copytree(folders["sana"], tmp_path / "words") / "tokenizer" / "tokenizer.json"
    described = json.loads(tokenizer.read_text())
    vocabulary = described["model"]["vocab"]
    one, two = (next(word for word in vocabulary if word.endswith(end)) for end in ("circle", "square"))
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    tokenizer.write_text(json.dumps(described))
    found.add(identity(tmp_path / "words"))
    settings = shutil.copytree(folders["sana"], tmp_path / "settings") / "text_encoder" / "config.json"
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps(values | {"rms_norm_eps": 0.1}))
    found.add(identity(tmp_path / "settings"))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        found.add(identity())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 8


def test_a_damaged_or_foreign_file_is_named_and_encoded_again(
    folders: dict[str, Path], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = load("flux", folders["flux"])
    plain = policy.encode(PROMPTS)
    assert policy.cache is not None
    paths = [policy.cache.path(prompt) for prompt in PROMPTS]
    whole = paths[0].read_bytes()
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    foreign = safetensors.torch.save({"embeds": torch.zeros(1, 2, 3)})
    for content in (whole[:-3], b"", flipped, foreign, paths[1].read_bytes()):
        paths[0].write_bytes(content)
        found, ran = calls(policy, lambda: policy.encode(PROMPTS))
        assert_equal(found, plain)
        assert ran == len(policy.encoders.modules) and paths[0].read_bytes() == whole, "whole again"
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"warning: {paths[0]} is damaged or no encoded prompt") and repr(PROMPTS[0]) in line


def test_the_least_recently_used_go_first_and_strangers_stay(tmp_path: Path) -> None:
    cache = PromptCache(tmp_path, 10_000, "encoders")
    cache.write({name: row(1.0) for name in "abc"})
    cache.max_bytes = 7 * files(tmp_path)[0].stat().st_size // 2  # three and a half
    (tmp_path / "mine.safetensors").write_bytes(bytes(10000))
    for age, name in enumerate("abc"):  # a is the newest
        os.utime(cache.path(name), (time.time() - 100 * (age + 1),) * 2)
    assert cache.read("c") is not None, "and now c is"
    cache.write({"d": row(2.0)})
    assert [name for name in "abcd" if cache.read(name) is None] == ["b"]
    leftover = tmp_path / f".{cache.path('e').name}.tmp"
    leftover.write_bytes(bytes(2000))
    cache.write({"e": row(3.0), "huge": row(4.0, 1000)})
    assert not leftover.exists() and cache.read("huge") is None, "larger than the bound"
    assert (tmp_path / "mine.safetensors").stat().st_size == 10000
    found = cache.read("e")
    assert found is None or torch.equal(found.embeds, row(3.0).embeds)


def test_the_bound_holds_while_two_processes_write_and_read(tmp_path: Path) -> None:
    bound = 20_000
    PromptCache(tmp_path, bound, "encoders")

    def work(rank: int) -> None:
        cache = PromptCache(tmp_path, bound, "encoders")
        for number in range(150):
            name = str((7 * number + 3 * rank) % 40)
            cache.write({name: row(float(name))})
            assert total(cache) <= bound
            for other in range(0, 40, 5):
                found = cache.read(str(other))
                assert found is None or torch.equal(found.embeds, row(float(other)).embeds)

    assert in_children(2, work) == [(0, ""), (0, "")]
    assert 10_000 < sum(path.stat().st_size for path in files(tmp_path)) <= bound


def total(cache: PromptCache) -> int:
    """Bytes in the folder, temporary files included, held still by the writers' lock."""
    with cache._locked():
        return sum(path.stat().st_size for path in cache.folder.iterdir())


def test_a_folder_that_refuses_is_named_before_the_run_and_only_warned_of_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UsageError, match=r"prompts\.cache_gb: .*file: .*set SOLRL_PROMPT_CACHE to another folder, or cache_gb to 0"
    ):
        PromptCache(tmp_path / "file", 1000, "encoders")
    cache = PromptCache(tmp_path / "cache", 10000, "encoders")
    shutil.rmtree(tmp_path / "cache")
    cache.write({"a": row(1.0)})
    cache.write({"b": row(1.0)})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: prompts.cache_gb") and line.endswith("going on without writing to it")
    assert cache.read("a") is None


class Own(Policy):
    """A policy that is no diffusers pipeline."""

    def __init__(self, *rest: Any) -> None:
        super().__init__()

    def encode(self, prompts: Any) -> Any: ...
    def velocity(self, latents: Any, sigma: Any, conditioning: Any) -> Any: ...
    def decode(self, latents: Any) -> Any: ...
    def sigmas(self, num_steps: int) -> Any: ...
    def sibling(self, transformer: Any) -> Any: ...


def test_a_policy_that_encodes_in_its_own_way_has_no_cache() -> None:
    config = tiny_config(model={"family": f"{__name__}:Own"}, prompts={"per_step": 3, "cache_gb": 1})
    with pytest.raises(UsageError, match=r"prompts\.cache_gb: .*Own encodes in its own way"):
        load_policy(config, CPU)


@pytest.mark.slow
def test_steps_are_the_same_with_a_cold_a_warm_and_no_cache(cache: Path) -> None:
    model = {**tiny_config().model.model_dump(), "cfg_scale": 2.0}
    plain, calls_plain = two_steps("draw", model=model)
    assert not cache.exists()
    cold, calls_cold = two_steps("draw", model=model, prompts={"per_step": 2, "cache_gb": 1})
    written = {path.name: path.stat().st_ino for path in files(cache)}
    warm, calls_warm = two_steps("draw", model=model, prompts={"per_step": 2, "cache_gb": 1})
    assert plain == cold == warm
    assert {path.name: path.stat().st_ino for path in files(cache)} == written
    assert len(written) == 4 + 1, "the steps' prompts, and no prompt"
    assert (len(calls_plain), len(calls_cold), len(calls_warm)) == (4, 4, 0)
