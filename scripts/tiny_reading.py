"""Teaches a text encoder who is who in a caption: words tell the colour, shape and side of their object.

Flow matching alone leaves tiny encoders with a bag of words: their relative-position biases start near zero and get
almost no gradient. An image model that never sees who lies where settles on that, and no reward brings it back.
"""

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from solrl_rewards import scenes
from tiny_models import TEXT_LENGTH
from tiny_steps import caption_ids, set_learning_rate, warmup_hold_decay
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, T5EncoderModel

SIDES = list(dict.fromkeys(scenes.DIRECTIONS.values()))
HEADS = {"colour": len(scenes.COLOUR_NAMES), "shape": len(scenes.SHAPE_NAMES), "side": len(SIDES) + 1}
OBJECT_WORDS = 3  # article, colour, shape; the tokenizer makes one token of each word
UNTOLD = -100  # what cross_entropy ignores


class Speech(NamedTuple):
    """The tokens that tell of an object: each fact from the token `since` on, up to `end`."""

    facts: tuple[int, ...]  # one a head
    since: tuple[int, ...]
    end: int


def teach_reading(encoder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, steps: int, seed: int) -> None:
    """Fixed random heads read from the states of `encoder` what `contents` says; it is then frozen."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads = nn.Linear(encoder.config.hidden_size, sum(HEADS.values()))
    heads.requires_grad_(False)  # so that it is the states that move apart, by as much as they are long
    positions, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in encoder.requires_grad_(True).named_parameters():
        (positions if "relative_attention_bias" in name else others).append(parameter)
    groups = [{"params": positions, "peak_lr": 3e-2}, {"params": others, "peak_lr": 1e-3}]  # biases have far to go
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    causal = not isinstance(encoder, T5EncoderModel)
    started = time.perf_counter()
    for step in range(steps):
        set_learning_rate([optimizer], warmup_hold_decay(step, steps))
        captions = [scenes.sample_scene(rng, single=0.3).caption for _ in range(128)]
        states = encoder(caption_ids(tokenizer, [str(caption) for caption in captions]))[0]
        told = heads(states).flatten(0, 1).split(list(HEADS.values()), -1)
        wanted = contents(captions, causal=causal).flatten(0, 1).unbind(-1)
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


def contents(captions: Sequence[scenes.Caption], *, causal: bool) -> Tensor:
    """[captions, TEXT_LENGTH, heads] int64: what each token tells of an object; UNTOLD where that is nothing."""
    classes = torch.full((len(captions), TEXT_LENGTH, len(HEADS)), UNTOLD)
    for row, caption in zip(classes, captions, strict=True):
        for told, since, end in (causal_speech if causal else speech)(caption):
            for head, (fact, start) in enumerate(zip(told, since, strict=True)):
                row[start:end, head] = fact
    return classes


def speech(caption: scenes.Caption) -> list[Speech]:
    """Words that see the whole caption, one token each: those of an object tell everything of it."""
    starts = 0, len(str(caption).split()) - OBJECT_WORDS
    pairs = zip(facts(caption), starts, strict=False)  # there may be one object only
    return [Speech(told, (start,) * len(HEADS), start + OBJECT_WORDS) for told, start in pairs]


def causal_speech(caption: scenes.Caption) -> list[Speech]:
    """Words that see what was said before them, after a token that begins the text.

    From its colour on they tell what is known of the first object, its side once that is said; the second object's
    colour and shape tell of the second.
    """
    end = len(str(caption).split()) + 1
    first, *second = facts(caption)
    if not second:
        return [Speech(first, (2, 3, end - 1 if caption.place else end), end)]
    colour, shape = end - 2, end - 1
    return [Speech(first, (2, 3, 4), colour), Speech(second[0], (colour, shape, colour), end)]


def facts(caption: scenes.Caption) -> list[tuple[int, int, int]]:
    """Colour, shape and side of each object."""
    direction = scenes.DIRECTIONS.get(caption.relation or caption.place or "")
    if direction is None:
        return [(*caption.objects[0], len(SIDES))]
    opposite = (-direction[0], -direction[1])
    return [(*one, SIDES.index(side)) for one, side in zip(caption.objects, (direction, opposite), strict=False)]
