"""Contrastive training of the tiny CLIP on scenes, each against its batch and its caption with one thing changed."""

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from solrl_rewards import scenes
from tiny_kernels import quick_arithmetic
from tiny_models import build_clip
from tiny_steps import caption_ids, scene_batch, set_learning_rate, tidy_configs, warmup_hold_decay
from torch import Tensor, nn
from transformers import CLIPModel, CLIPTokenizer

OPPOSITES = {
    "left of": "right of",
    "right of": "left of",
    "above": "below",
    "below": "above",
    "left": "right",
    "right": "left",
    "top": "bottom",
    "bottom": "top",
}


# A CLIPImageProcessor would write the same, but cannot be made without torchvision.
PREPROCESSING = {
    "image_processor_type": "CLIPImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": scenes.SIZE},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": scenes.SIZE, "width": scenes.SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def one_change(rng: random.Random, text: str) -> str:
    """The caption with another colour, another shape, or the opposite relation or place."""
    caption = scenes.parse(text)
    kind = rng.randrange(3 if caption.relation or caption.place else 2)
    if kind == 2 and caption.relation:
        return str(dataclasses.replace(caption, relation=OPPOSITES[caption.relation]))
    if kind == 2 and caption.place:
        return str(dataclasses.replace(caption, place=OPPOSITES[caption.place]))
    objects = list(caption.objects)
    changed = rng.randrange(len(objects))
    colour, shape = objects[changed]
    if kind == 0:
        colour = (colour + rng.randrange(1, len(scenes.COLOUR_NAMES))) % len(scenes.COLOUR_NAMES)
    else:
        shape = (shape + rng.randrange(1, len(scenes.SHAPE_NAMES))) % len(scenes.SHAPE_NAMES)
    objects[changed] = (colour, shape)
    return str(dataclasses.replace(caption, objects=tuple(objects)))


class Embedder:
    """A CLIPModel's normalized embeddings of images in [0, 1] and of captions."""

    def __init__(self, model: CLIPModel, tokenizer: CLIPTokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.mean = torch.tensor(PREPROCESSING["image_mean"])[:, None, None]
        self.deviation = torch.tensor(PREPROCESSING["image_std"])[:, None, None]

    def images(self, images: Tensor) -> Tensor:
        pixels = (images - self.mean) / self.deviation
        return F.normalize(
            self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output).float(), dim=-1
        )

    def captions(self, captions: Sequence[str]) -> Tensor:
        ids = caption_ids(self.tokenizer, captions)
        return F.normalize(
            self.model.text_projection(self.model.text_model(input_ids=ids).pooler_output).float(), dim=-1
        )


def contrastive_loss(similarity: Tensor, captions: Sequence[str], changed: Sequence[str]) -> Tensor:
    """[B, 2B] scaled similarities of images with their captions, then changed ones -> mean loss of both directions."""
    rows = torch.arange(len(captions))
    same = torch.tensor([[caption == other for other in (*captions, *changed)] for caption in captions])
    same[rows, rows] = False  # an equal caption elsewhere in the batch is no mistake
    similarity = similarity.masked_fill(same, -1e4)
    return 0.5 * (F.cross_entropy(similarity, rows) + F.cross_entropy(similarity[:, : len(captions)].T, rows))


@torch.no_grad()
def report(embedder: Embedder, rng: random.Random) -> None:
    """Prints how often unseen images prefer their caption to a changed one, and to all others."""
    captions, images = scene_batch(rng, 1024, single=0.4)
    pictures = embedder.images(images)
    right, wrong = (
        embedder.captions(texts) for texts in (captions, [one_change(rng, caption) for caption in captions])
    )
    preferred = ((pictures * right).sum(1) > (pictures * wrong).sum(1)).float().mean()
    nearest = (pictures @ right.T).argmax(1).tolist()
    found = sum(captions[index] == caption for index, caption in zip(nearest, captions, strict=True)) / len(captions)
    print(f"held out: {preferred:.3f} prefer their caption to a changed one, {found:.3f} find it among {len(captions)}")


def train_clip(args: argparse.Namespace) -> None:
    """Trains the tiny CLIP and saves it in `args.out`, in bfloat16."""
    rng = random.Random(args.seed)
    model, tokenizer = build_clip(args.seed)
    embedder = Embedder(model.train(), tokenizer)
    groups = [{"params": model.parameters(), "peak_lr": args.lr}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.05)
    started = time.perf_counter()
    for step in range(args.steps):
        set_learning_rate([optimizer], warmup_hold_decay(step, args.steps))
        captions, images = scene_batch(rng, args.batch_size, single=0.4)
        changed = [one_change(rng, caption) for caption in captions]
        with quick_arithmetic(), torch.autocast("cpu", torch.bfloat16):
            pictures, texts = embedder.images(images), embedder.captions(captions + changed)
        loss = contrastive_loss(model.logit_scale.exp().clamp(max=50) * pictures @ texts.T, captions, changed)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        if (step + 1) % 50 == 0:
            elapsed = time.perf_counter() - started
            print(
                f"clip {step + 1} loss {loss.item():.3f} {elapsed / (step + 1):.3f} s/step {elapsed:.0f} s", flush=True
            )
    report(embedder, random.Random(args.seed + 1))
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING, indent=2) + "\n")
    tidy_configs(args.out)
