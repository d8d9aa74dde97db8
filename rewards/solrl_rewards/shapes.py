"""A verifiable reward for captions of the shapes world: it reads colour, shape, position and relation from the pixels.

Every pixel is taken for background that one paint covers to some degree: for each of the eight colours the nearest
point on the line from background to that colour gives a degree, and the better a line fits, the more of the pixel it
gets. An edge pixel of a red circle thus counts as half red, not as pink. That yields a soft mask for every colour, and
from the masks of the colours that the caption names:

- present: enough of the colour for an object;
- shape: the four shapes, placed at the mask's centroid and sized by its second moment, compete by overlap with the
  mask; the named one gets its share of a softmax, scaled by how well it overlaps;
- place or relation: how many pixels the centroid lies in the named direction, from the middle or from the other object;
- clean: how much of all the paint has a named colour.

    object = present * (0.3 + 0.7 * shape)
    reward = mean(object) * (0.4 + 0.6 * relation) * clean
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from solrl_rewards import scenes
from solrl_rewards.inputs import check_inputs

OBJECT_AREA = 24.0  # pixels of a colour from which it is fully present; the smallest object has 41
PAINT_SHARPNESS = 0.01  # squared sine between two colours by which the worse fitting one loses a factor e
FAINT_INK = 0.02  # squared distance in RGB from the background below which the colour of a pixel counts less
FAINT = 0.2  # degrees of paint below this are noise
OVERLAP_SHARPNESS = 0.03  # overlap by which a worse fitting shape loses a factor e
OVERLAP_RANGE = (0.4, 0.9)  # overlaps that count as no fit and as a full one
CLEAR_OFFSET, OFFSET_SOFTNESS = 2.5, 1.5  # pixels: half of the credit for a direction, and its slope
STRAY_RANGE = (0.05, 0.55)  # shares of wrong paint that cost nothing and everything
SHAPE_WEIGHT, RELATION_WEIGHT = 0.7, 0.6
# Mean squared distance to the centroid over squared radius, and the centroid's y over radius, for each shape.
SPREAD = (0.5, 0.493, 0.347, 0.44)
CENTROID_Y = (0.0, 0.0, 0.2, 0.0)


@dataclass(frozen=True)
class Parts:
    """What the reward is made of, for looking into it; `shape` and `present` of a missing second object are 0."""

    present: Tensor  # [B, 2]
    shape: Tensor  # [B, 2]
    relation: Tensor  # [B]
    clean: Tensor  # [B]
    reward: Tensor  # [B]


@dataclass(frozen=True)
class Wanted:
    """Captions as tensors. Where a caption has one object, the second repeats the first and counts 0."""

    colours: Tensor  # [B, 2] int64
    shapes: Tensor  # [B, 2] int64
    counts: Tensor  # [B, 2] 1 or 0
    direction: Tensor  # [B, 2] of the first object from its reference; zero where none is named


def read_captions(prompts: Sequence[str], device: torch.device) -> Wanted:
    """The prompts' contents; ValueError at the first one outside of the grammar."""
    captions = [scenes.parse(prompt) for prompt in prompts]
    objects = torch.tensor([(caption.objects * 2)[:2] for caption in captions])  # [B, 2, 2]
    counts = torch.tensor([[1.0, float(len(caption.objects) - 1)] for caption in captions])
    direction = torch.tensor(
        [scenes.DIRECTIONS.get(caption.relation or caption.place or "", (0.0, 0.0)) for caption in captions]
    )
    colours, shapes = objects.to(device).unbind(-1)
    return Wanted(colours, shapes, counts.to(device), direction.to(device))


def paint_masks(images: Tensor) -> Tensor:
    """[B, 3, H, W] -> [B, 8, H, W], how much of each pixel each colour covers."""
    paints = scenes.palette(images.device) - scenes.BACKGROUND  # [8, 3]
    ink = images - scenes.BACKGROUND
    projected = torch.einsum("bchw,kc->bkhw", ink, paints)
    length = paints.square().sum(1)[:, None, None]
    degree = (projected / length).clamp(0, 1)
    # |ink - degree * paint|^2, expanded so that no [B, 8, 3, H, W] tensor is made
    amount = ink.square().sum(1, keepdim=True)
    misfit = (amount - 2 * degree * projected + degree.square() * length) / (amount + FAINT_INK)
    strength = ((degree - FAINT) / (1 - 2 * FAINT)).clamp(0, 1)
    return strength * torch.softmax(-misfit / PAINT_SHARPNESS, 1)


def shape_overlaps(masks: Tensor, centre_x: Tensor, centre_y: Tensor, area: Tensor) -> Tensor:
    """[B, 2, H, W] masks -> [4, B, 2], soft intersection over union with each shape of equal centroid and spread."""
    grid_x, grid_y = scenes.pixel_grid(masks.device)
    x, y = grid_x - centre_x[..., None, None], grid_y - centre_y[..., None, None]  # [B, 2, H, W]
    variance = _total(masks * (x.square() + y.square())) / area
    overlaps = []
    for shape, (spread, centroid_y) in enumerate(zip(SPREAD, CENTROID_Y, strict=True)):
        radius = (variance / spread).sqrt().clamp(2, 14)[..., None, None]
        template = scenes.coverage(scenes.signed_distance(shape, x, y + centroid_y * radius, radius))
        # minimum and maximum, not product and sum: half covered pixels that agree are a full match
        overlaps.append(_total(torch.minimum(masks, template)) / _total(torch.maximum(masks, template)))
    return torch.stack(overlaps)


def _total(per_pixel: Tensor) -> Tensor:
    return per_pixel.flatten(-2).sum(-1)


def _ramp(value: Tensor, low: float, high: float) -> Tensor:
    return ((value - low) / (high - low)).clamp(0, 1)


def score(images: Tensor, wanted: Wanted) -> Parts:
    """The reward of float32 images in [0, 1] and all its parts."""
    paint = paint_masks(images)
    rows = torch.arange(len(images), device=images.device)[:, None]
    masks = paint[rows, wanted.colours]  # [B, 2, H, W]
    area = _total(masks)
    safe_area = area.clamp(min=1.0)
    grid_x, grid_y = scenes.pixel_grid(images.device)
    centre_x, centre_y = _total(masks * grid_x) / safe_area, _total(masks * grid_y) / safe_area

    overlaps = shape_overlaps(masks, centre_x, centre_y, safe_area)  # [4, B, 2]
    named = wanted.shapes[None]
    share = torch.softmax(overlaps / OVERLAP_SHARPNESS, 0).gather(0, named)[0]
    shape = share * _ramp(overlaps.gather(0, named)[0], *OVERLAP_RANGE) * wanted.counts
    present = (area / OBJECT_AREA).clamp(max=1) * wanted.counts
    objects = (present * (1 - SHAPE_WEIGHT + SHAPE_WEIGHT * shape)).sum(1) / wanted.counts.sum(1)

    two = wanted.counts[:, 1]
    middle = scenes.SIZE / 2
    offset_x = centre_x[:, 0] - torch.where(two > 0, centre_x[:, 1], middle)
    offset_y = centre_y[:, 0] - torch.where(two > 0, centre_y[:, 1], middle)
    offset = offset_x * wanted.direction[:, 0] + offset_y * wanted.direction[:, 1]
    both = present[:, 0] * torch.where(two > 0, present[:, 1], 1.0)
    relation = both * torch.sigmoid((offset - CLEAR_OFFSET) / OFFSET_SOFTNESS)
    relation = torch.where(wanted.direction.abs().sum(1) > 0, relation, 1.0)

    stray = 1 - (area * wanted.counts).sum(1) / _total(paint).sum(1).clamp(min=1.0)
    clean = 1 - _ramp(stray, *STRAY_RANGE)
    reward = objects * (1 - RELATION_WEIGHT + RELATION_WEIGHT * relation) * clean
    return Parts(present, shape, relation, clean, reward)


class Shapes:
    """Whether an image shows what a caption of the shapes world says."""

    name = "shapes"
    range = (0.0, 1.0)
    description = (
        "0 is a blank or wrong image, about 0.97 a perfect one; about half for the right objects in a wrong relation"
    )

    def __init__(self, device: torch.device | str | None = None) -> None:
        """Scores on `device`, or where each batch of images already is."""
        self.device = None if device is None else torch.device(device)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B, 3, 32, 32] images in [0, 1] and B prompts -> [B] float32."""
        check_inputs(self.name, images, prompts)
        if images.shape[-2:] != (scenes.SIZE, scenes.SIZE):
            raise ValueError(f"shapes reads images of {scenes.SIZE} x {scenes.SIZE} pixels, got {list(images.shape)}")
        images = images.to(self.device or images.device, torch.float32)
        if not len(images):
            return images.new_empty(0)
        return score(images, read_captions(prompts, images.device)).reward
