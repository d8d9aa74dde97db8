"""Teaches a T5 encoder who is who in a caption: every word of an object tells its colour, shape and side.

Flow matching alone leaves tiny encoders with a bag of words: their relative-position biases start near zero and get
almost no gradient. An image model that never sees who lies where settles on that, and no reward brings it back.
"""

import random
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from solrl_rewards import scenes
from tiny_models import TEXT_LENGTH
from tiny_steps import caption_ids, set_learning_rate, warmup_hold_decay
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, T5EncoderModel

SIDES = list(dict.fromkeys(scenes.DIRECTIONS.values()))
HEADS = {"colour": len(scenes.COLOUR_NAMES), "shape": len(scenes.SHAPE_NAMES), "side": len(SIDES) + 1}
OBJECT_WORDS = 3  # article, colour, shape; the tokenizer makes one token of each word
UNTOLD = -100  # what cross_entropy ignores


def teach_reading(encoder: T5EncoderModel, tokenizer: PreTrainedTokenizerBase, *, steps: int, seed: int) -> None:
    """Fixed random heads read an object's colour, shape and side from every word's state; `encoder` is then frozen."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads = nn.Linear(encoder.config.d_model, sum(HEADS.values()))
    heads.requires_grad_(False)  # so that it is the states that move apart, by as much as they are long
    positions, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in encoder.requires_grad_(True).named_parameters():
        (positions if "relative_attention_bias" in name else others).append(parameter)
    groups = [{"params": positions, "peak_lr": 3e-2}, {"params": others, "peak_lr": 1e-3}]  # biases have far to go
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.perf_counter()
    for step in range(steps):
        set_learning_rate([optimizer], warmup_hold_decay(step, steps))
        captions = [scenes.sample_scene(rng, single=0.3).caption for _ in range(128)]
        states = encoder(caption_ids(tokenizer, [str(caption) for caption in captions]))[0]
        told = heads(states).flatten(0, 1).split(list(HEADS.values()), -1)
        wanted = contents(captions).flatten(0, 1).unbind(-1)
        losses = [F.cross_entropy(one, target, ignore_index=UNTOLD) for one, target in zip(told, wanted, strict=True)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            right = [
                (one.argmax(-1) == target)[target != UNTOLD].float().mean().item()
                for one, target in zip(told, wanted, strict=True)
            ]
            listed = ", ".join(f"{name} {share:.2f}" for name, share in zip(HEADS, right, strict=True))
            print(f"reading {step} loss {loss.item():.4f} {listed} {time.perf_counter() - started:.0f} s", flush=True)
    encoder.requires_grad_(False)


def contents(captions: Sequence[scenes.Caption]) -> Tensor:
    """[captions, TEXT_LENGTH, heads] int64: what each token tells of its object; UNTOLD where it belongs to none."""
    classes = torch.full((len(captions), TEXT_LENGTH, len(HEADS)), UNTOLD)
    for row, caption in zip(classes, captions, strict=True):
        direction = scenes.DIRECTIONS.get(caption.relation or caption.place or "")
        side = len(SIDES) if direction is None else SIDES.index(direction)
        row[:OBJECT_WORDS] = torch.tensor([*caption.objects[0], side])
        if len(caption.objects) > 1:
            assert direction is not None
            opposite = SIDES.index((-direction[0], -direction[1]))
            last = len(str(caption).split())
            row[last - OBJECT_WORDS : last] = torch.tensor([*caption.objects[1], opposite])
    return classes
