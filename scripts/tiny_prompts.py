"""The prompt files of the shapes world."""

import argparse
import random

from solrl_rewards import scenes


def distinct_captions(rng: random.Random, count: int, single: float) -> list[str]:
    """`count` different captions, in the order in which scenes first showed them."""
    captions: dict[str, None] = {}
    while len(captions) < count:
        captions[str(scenes.sample_scene(rng, single).caption)] = None
    return list(captions)


def write_prompts(args: argparse.Namespace) -> None:
    """`args.out` holds shapes_train.txt and shapes_heldout.txt, which share no line, and shapes_single.txt."""
    rng = random.Random(args.seed)
    pairs = distinct_captions(rng, args.train + args.heldout, single=0.0)
    singles = distinct_captions(rng, args.single, single=1.0)
    args.out.mkdir(parents=True, exist_ok=True)
    files = {"shapes_train": pairs[: args.train], "shapes_heldout": pairs[args.train :], "shapes_single": singles}
    for name, lines in files.items():
        (args.out / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
