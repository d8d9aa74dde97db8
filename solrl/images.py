"""Image grids as PNG files: one row a prompt, fixed seeds side by side, prompt and reward written beside them.

The captions, rewards and places of the images also travel inside the PNG as text, so that the report can cut the
images out again and set captions in type.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
from torch import Tensor

from solrl.files import saving, write_atomic
from solrl.types import SolrlError

SMALLEST, LARGEST = 96, 256
"""Shown width of an image in pixels: smaller ones are enlarged by a whole factor, larger ones shrunk."""
MARGIN, GAP, LINE = 16, 8, 20
INK, FAINT, PAPER = "#1c1e21", "#6a7078", "#ffffff"
KEY = "solrl-grid"

PIXEL_ART = 128
"""Images up to this width are embedded and shown pixel by pixel; larger ones are compressed as photographs."""


@dataclass(frozen=True)
class Grid:
    """A grid read back from its file."""

    prompts: list[str]
    rewards: list[list[float | None]]  # [prompt][seed]
    images: list[list[Image.Image]]  # [prompt][seed], in the pixels that were drawn (or shrunk)


def save_grid(
    path: Path, images: Tensor, prompts: Sequence[str], *, rewards: Tensor | None = None, title: str = ""
) -> None:
    """Write images [P, M, 3, H, W] in [0, 1] (P prompts, M seeds each) with rewards [P, M] to ``path``, atomically.

    A reward that is NaN is one that is missing: the image gets no number.
    """
    if images.ndim != 5 or len(prompts) != len(images) or (rewards is not None and rewards.shape != images.shape[:2]):
        raise ValueError(f"a grid takes images [P, M, 3, H, W], P prompts and rewards [P, M], got {images.shape}")
    enlarge = max(1, -(-SMALLEST // images.shape[4]))
    tiles = [[_tile(image, enlarge) for image in row] for row in images]
    values: list[list[float | None]] = [[None] * images.shape[1] for _ in prompts]
    if rewards is not None:
        values = [[None if v != v else v for v in row] for row in rewards.tolist()]
    canvas, boxes = _draw(tiles, prompts, values, title)
    facts = {"prompts": list(prompts), "rewards": values, "boxes": boxes, "enlarged": enlarge}
    info = PngImagePlugin.PngInfo()
    info.add_itxt(KEY, json.dumps(facts))
    buffer = io.BytesIO()
    canvas.save(buffer, format="PNG", pnginfo=info)
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def load_grid(path: Path) -> Grid:
    """Read a grid that `save_grid` wrote; the images are cut out in their own pixels."""
    try:
        with Image.open(path) as file:
            facts = json.loads(getattr(file, "text", {})[KEY])
            canvas = file.convert("RGB")
        small = facts["enlarged"]
        images = [
            [canvas.crop(box).resize(_shrunk(box, small), Image.Resampling.NEAREST) for box in row]
            for row in facts["boxes"]
        ]
        return Grid(facts["prompts"], facts["rewards"], images)
    except (OSError, KeyError, TypeError, ValueError, SyntaxError) as error:
        raise SolrlError(f"{path} is not an image grid of solrl ({error}); remove it to go on without it") from error


def data_url(image: Image.Image) -> str:
    """The image as a URL that needs no file."""
    buffer = io.BytesIO()
    if image.width <= PIXEL_ART:
        image.save(buffer, format="png", optimize=True)
    else:
        image.save(buffer, format="jpeg", quality=88)
    kind = "png" if image.width <= PIXEL_ART else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _shrunk(box: Sequence[int], factor: int) -> tuple[int, int]:
    return (box[2] - box[0]) // factor, (box[3] - box[1]) // factor


def _tile(image: Tensor, enlarge: int) -> Image.Image:
    """[3, H, W] in [0, 1] -> a picture of the shown size."""
    pixels = (image.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels)
    width, height = picture.size
    if enlarge > 1:
        return picture.resize((width * enlarge, height * enlarge), Image.Resampling.NEAREST)
    if width > LARGEST:
        return picture.resize((LARGEST, round(height * LARGEST / width)), Image.Resampling.LANCZOS)
    return picture


def _draw(
    tiles: list[list[Image.Image]], prompts: Sequence[str], rewards: list[list[float | None]], title: str
) -> tuple[Image.Image, list[list[tuple[int, int, int, int]]]]:
    """The whole picture, and the box of every image in it."""
    text, small = ImageFont.load_default(15), ImageFont.load_default(13)
    wide, high = tiles[0][0].size
    inner = max(len(tiles[0]) * (wide + GAP) - GAP, 320)
    captions = [_wrap(prompt, text, inner) for prompt in prompts]
    top = MARGIN + (LINE + GAP if title else 0)
    height = top + sum(len(lines) * LINE + high + LINE + MARGIN for lines in captions)
    canvas = Image.new("RGB", (inner + 2 * MARGIN, height), PAPER)
    draw = ImageDraw.Draw(canvas)
    if title:
        draw.text((MARGIN, MARGIN), title, font=text, fill=FAINT)
    boxes: list[list[tuple[int, int, int, int]]] = []
    for row, lines, values in zip(tiles, captions, rewards, strict=True):
        for line in lines:
            draw.text((MARGIN, top), line, font=text, fill=INK)
            top += LINE
        boxes.append([])
        for column, (tile, value) in enumerate(zip(row, values, strict=True)):
            left = MARGIN + column * (wide + GAP)
            canvas.paste(tile, (left, top))
            boxes[-1].append((left, top, left + wide, top + high))
            if value is not None:
                draw.text((left, top + high + 3), f"{value:.3f}", font=small, fill=FAINT)
        top += high + LINE + MARGIN
    return canvas, boxes


def _wrap(caption: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> list[str]:
    """The caption in at most two lines of ``width`` pixels; what does not fit ends in an ellipsis."""
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > 2:
        lines = [lines[0], lines[1] + " ..."]
    for i, line in enumerate(lines):
        while font.getlength(line) > width and len(line) > 4:
            line = line.removesuffix(" ...").removesuffix("...")[:-1] + "..."
        lines[i] = line
    return lines
