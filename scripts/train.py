"""``accelerate launch scripts/train.py CONFIG [--section.key value ...]``: ``solrl train`` on each of its processes."""

import sys

from solrl.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
