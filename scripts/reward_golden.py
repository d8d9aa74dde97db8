r"""Scores that the official implementations give on seeded weights and images -> tests/rewards/golden.json.

They do not install beside the versions that solrl needs, so this runs in an environment of its own:

    python -m venv golden
    golden/bin/pip install torch torchvision transformers==4.36.2 levenshtein ftfy regex tqdm clint
    golden/bin/pip install --no-deps image-reward==1.5 timm==0.6.13 fairscale==0.4.13 clip-anytorch hpsv2==1.2.0 \
        open-clip-torch==2.20.0
    golden/bin/pip install "setuptools<70"
    golden/bin/python scripts/reward_golden.py

transformers 4.36 prepares images through PIL, as the models' authors had it.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.rewards import seeded  # noqa: E402

Scores = dict[str, list[list[float]]]
"""Reward -> a row of scores for each of seeded.SIZES."""


def pictures(images: Tensor) -> list[Image.Image]:
    """The 8-bit images that trainers hand to the official scorers."""
    levels = (images * 255).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in levels]


def load_seeded(module: nn.Module, salt: str = "") -> None:
    """Fills a model with seeded weights; buffers that are no weights keep their values."""
    shapes = {name: value.shape for name, value in module.state_dict().items() if value.is_floating_point()}
    weights = seeded.state({name: shape for name, shape in shapes.items() if name != "attn_mask"}, salt)
    module.load_state_dict(weights, strict=False)
    module.eval()


def import_image_reward() -> None:
    """Makes the package importable without its trainer, which needs diffusers and more."""
    package = types.ModuleType("ImageReward")
    spec = importlib.util.find_spec("ImageReward")
    assert spec and spec.submodule_search_locations
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["ImageReward"] = package


def clip_scores(folder: Path) -> Scores:
    """CLIPScore in both preprocessings, PickScore over 26 and the aesthetic rating, on transformers' CLIP."""
    from ImageReward.models.AestheticScore import MLP
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

    data = json.loads((ROOT / "solrl" / "assets" / "tiny_clip" / "tokenizer.json").read_text())
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]  # as tokenizers 0.15 wants them
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>")
    model = CLIPModel(CLIPConfig(**seeded.CLIP))
    load_seeded(model)
    head = MLP(seeded.CLIP["projection_dim"])
    load_seeded(head)
    processor = CLIPImageProcessor(**seeded.CLIP_PROCESSOR)
    floats = Compose(
        [
            Resize(42, antialias=True),
            CenterCrop(42),
            Normalize(seeded.CLIP_PROCESSOR["image_mean"], seeded.CLIP_PROCESSOR["image_std"]),
        ]
    )
    tokens = tokenizer(seeded.PROMPTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    texts = model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
    texts = texts / texts.norm(dim=-1, keepdim=True)
    scores: Scores = {"clip_score/paper": [], "clip_score/model": [], "pick_score": [], "aesthetic": []}
    for size in seeded.SIZES:
        images = seeded.images(size)
        through_pil = processor(images=pictures(images), return_tensors="pt").pixel_values
        logits = model(pixel_values=floats(images), input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        scores["clip_score/paper"].append((logits.logits_per_image.diag() / model.logit_scale.exp()).tolist())
        seen = model.get_image_features(pixel_values=through_pil)
        seen = seen / seen.norm(dim=-1, keepdim=True)
        scores["clip_score/model"].append((seen * texts).sum(-1).tolist())
        scores["pick_score"].append((model.logit_scale.exp() * (texts @ seen.T).diag() / 26).tolist())
        scores["aesthetic"].append(head(seen).squeeze(-1).tolist())
    return scores


def hps_scores(folder: Path) -> Scores:
    """HPSv2 by the open_clip that its package carries, as its `score` computes it but for the mixed precision."""
    import hpsv2
    import open_clip

    package = Path(hpsv2.__file__).parent / "src" / "open_clip"
    words = "bpe_simple_vocab_16e6.txt.gz"
    if not (package / words).exists():  # missing from the wheel
        shutil.copy(Path(open_clip.__file__).parent / words, package / words)
    from hpsv2.src.open_clip import create_model_and_transforms, get_tokenizer
    from hpsv2.src.open_clip.factory import add_model_config

    (folder / "tiny-hps.json").write_text(json.dumps(seeded.OPEN_CLIP))
    add_model_config(folder)
    model, _, prepare = create_model_and_transforms(
        "tiny-hps", precision="fp32", output_dict=True, light_augmentation=True
    )
    load_seeded(model)
    tokens = get_tokenizer("tiny-hps")(seeded.PROMPTS)
    rows = []
    for size in seeded.SIZES:
        outputs = model(torch.stack([prepare(picture) for picture in pictures(seeded.images(size))]), tokens)
        rows.append((outputs["image_features"] @ outputs["text_features"].T).diag().tolist())
    return {"hpsv2": rows}


def image_reward_scores(folder: Path) -> tuple[Scores, dict[str, list[int]]]:
    """ImageReward by its own package, and the shapes of its checkpoint's weights."""
    from transformers import BertTokenizer

    (folder / "vocab.txt").write_text("\n".join(seeded.bert_vocabulary()) + "\n")
    (folder / "med_config.json").write_text(json.dumps(seeded.BLIP_TEXT))
    from ImageReward.models.BLIP import blip_pretrain
    from ImageReward.models.BLIP.vit import VisionTransformer

    def small_tokenizer() -> BertTokenizer:
        tokenizer = BertTokenizer(str(folder / "vocab.txt"))
        tokenizer.add_special_tokens({"bos_token": "[DEC]"})
        tokenizer.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
        return tokenizer

    def small_vision(*_: object) -> tuple[nn.Module, int]:
        return VisionTransformer(**seeded.BLIP_VISION), seeded.BLIP_VISION["embed_dim"]

    blip_pretrain.init_tokenizer, blip_pretrain.create_vit = small_tokenizer, small_vision
    package = importlib.import_module("ImageReward.ImageReward")
    model = package.ImageReward(med_config=str(folder / "med_config.json"))
    model.mlp = package.MLP(seeded.BLIP_TEXT["hidden_size"])
    model.preprocess = package._transform(seeded.BLIP_VISION["img_size"])
    load_seeded(model)
    rows = []
    for size in seeded.SIZES:
        row = []
        for picture, prompt in zip(pictures(seeded.images(size)), seeded.PROMPTS, strict=True):
            picture.save(folder / "image.png")
            row.append(model.score(prompt, str(folder / "image.png")))
        rows.append(row)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    return {"image_reward": rows}, shapes


def ocr_scores() -> list[list[Any]]:
    """[prompt, text that was read, reward] by the formula of Flow-GRPO's OCR reward, with python-Levenshtein."""
    from Levenshtein import distance

    rows = []
    for prompt, read in [
        ('a sign that says "Sol RL"', "SOL RL"),
        ('a sign that says "Sol RL" in red', "S0l R1"),
        ('a poster, "New York City" at night', "visit new york city today"),
        ('the word "a"', "completely different"),
        ('a cup with "good morning"', ""),
        ('a cup with "good morning"', "god mornings"),
        ('"first" and "second"', "second first"),
    ]:
        target, text = prompt.split('"')[1].replace(" ", "").lower(), read.replace(" ", "").lower()
        edits = 0 if target in text else min(distance(text, target), len(target))
        rows.append([prompt, read, 1 - edits / len(target)])
    return rows


def main() -> None:
    torch.set_num_threads(1)
    import_image_reward()
    names = ("torch", "torchvision", "transformers", "image-reward", "timm", "hpsv2", "levenshtein", "pillow")
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        scores, shapes = image_reward_scores(folder)
        scores |= clip_scores(folder) | hps_scores(folder)
    golden = {
        "versions": {name: version(name) for name in names},
        "scores": scores,
        "ocr": ocr_scores(),
        "image_reward_shapes": shapes,
    }
    out = ROOT / "tests" / "rewards" / "golden.json"
    out.write_text(json.dumps(golden, indent=1) + "\n")
    for reward, rows in scores.items():
        print(reward, *([f"{value:.4f}" for value in row] for row in rows))


if __name__ == "__main__":
    main()
