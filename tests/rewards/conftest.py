"""Small checkpoints in the files and names that the official ones have, filled with seeded weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_rewards import load_reward
from solrl_rewards.clip_score import embedded_model
from solrl_rewards.scoring import ModelReward
from torch import nn

from tests.rewards import seeded

torch.set_num_threads(1)

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def seeded_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Seeded values for everything in a model that is trained."""
    names = {name: value.shape for name, value in module.state_dict().items() if value.is_floating_point()}
    return seeded.state({name: shape for name, shape in names.items() if name != "attn_mask"})


def save_clip(folder: Path) -> Path:
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig(**seeded.CLIP))
    model.load_state_dict(seeded_weights(model))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(embedded_model()) / name, folder / name)
    (folder / "preprocessor_config.json").write_text(json.dumps(seeded.CLIP_PROCESSOR))
    return folder


def save_aesthetic_head(folder: Path) -> Path:
    width, shapes = seeded.CLIP["projection_dim"], {}
    for number, size in ((0, 1024), (2, 128), (4, 64), (6, 16), (7, 1)):
        shapes |= {f"layers.{number}.weight": (size, width), f"layers.{number}.bias": (size,)}
        width = size
    folder.mkdir()
    torch.save(seeded.state(shapes), folder / "aesthetic-model.pth")
    return folder


def save_image_reward(folder: Path) -> Path:
    from transformers import BertTokenizer

    folder.mkdir()
    weights = seeded.state(GOLDEN["image_reward_shapes"])
    weights["blip.text_encoder.embeddings.position_ids"] = torch.arange(64)[None]
    torch.save(weights, folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(seeded.BLIP_TEXT))
    words = {word: number for number, word in enumerate(seeded.bert_vocabulary())}
    BertTokenizer(vocab=words, do_lower_case=True).save_pretrained(folder / "tokenizer")
    return folder


def save_hpsv2(folder: Path) -> Path:
    open_clip = pytest.importorskip("open_clip", reason='needs the extra "rewards"')
    folder.mkdir()
    (folder / "tiny-hps.json").write_text(json.dumps(seeded.OPEN_CLIP))
    open_clip.add_model_config(folder / "tiny-hps.json")
    weights = seeded_weights(open_clip.create_model("tiny-hps", load_weights=False))
    torch.save({"state_dict": weights}, folder / "HPS_v2.1_compressed.pt")
    shutil.copy(folder / "HPS_v2.1_compressed.pt", folder / "HPS_v2_compressed.pt")
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelReward]:
    """`small("pick_score", batch_size=2)`: that reward on its small checkpoint."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders: dict[str, Path] = {}

    def folder(name: str, save: Callable[[Path], Path]) -> str:
        if name not in folders:
            folders[name] = save(root / name)
        return str(folders[name])

    def options(name: str) -> dict[str, Any]:
        if name == "image_reward":
            model = folder("image_reward", save_image_reward)
            return {"model": model, "tokenizer": f"{model}/tokenizer"}
        if name == "hpsv2":
            return {"model": folder("hpsv2", save_hpsv2), "architecture": "tiny-hps"}
        model = folder("clip", save_clip)
        if name == "pick_score":
            return {"model": model, "processor": model}
        if name == "aesthetic":
            return {"model": model, "head": folder("head", save_aesthetic_head)}
        return {"model": model}

    def make(name: str, **changes: Any) -> ModelReward:
        made = load_reward(name, **options(name) | changes)
        assert isinstance(made, ModelReward)
        return made

    return make
