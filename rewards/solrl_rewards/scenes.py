"""A small world of captioned shapes: the grammar of its captions, its scenes and their renderer.

A caption names one object, or two and how they lie to each other:

    a red circle
    an orange cross on the left
    a red circle left of a blue square

A scene gives every object a centre and a radius in pixels such that the caption is true of it. `render` draws scenes by
signed distances, anti-aliased, all at once. Coordinates run rightwards and downwards from the image's top left corner.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 32  # pixels
BACKGROUND = 0.95  # grey level
COLOURS = {
    "red": (0.90, 0.12, 0.12),
    "green": (0.10, 0.65, 0.20),
    "blue": (0.12, 0.25, 0.90),
    "yellow": (0.98, 0.85, 0.10),
    "purple": (0.55, 0.15, 0.70),
    "orange": (1.00, 0.50, 0.05),
    "cyan": (0.10, 0.80, 0.85),
    "black": (0.08, 0.08, 0.08),
}
COLOUR_NAMES = tuple(COLOURS)
SHAPE_NAMES = ("circle", "square", "triangle", "cross")
RELATIONS = ("left of", "right of", "above", "below")
PLACES = ("left", "right", "top", "bottom")
# Where the first object lies, seen from the second one or from the middle of the image.
DIRECTIONS = {
    "left of": (-1.0, 0.0),
    "right of": (1.0, 0.0),
    "above": (0.0, -1.0),
    "below": (0.0, 1.0),
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "top": (0.0, -1.0),
    "bottom": (0.0, 1.0),
}


@dataclass(frozen=True)
class Caption:
    """What a caption says: (colour, shape) indices of one or two objects, and a relation or a place."""

    objects: tuple[tuple[int, int], ...]
    relation: str | None = None
    place: str | None = None

    def __str__(self) -> str:
        first, *second = (_phrase(colour, shape) for colour, shape in self.objects)
        if second:
            return f"{first} {self.relation} {second[0]}"
        return f"{first} on the {self.place}" if self.place else first


@dataclass(frozen=True)
class Scene:
    """A caption and one layout, (x, y, radius) in pixels for each of its objects, of which it is true."""

    caption: Caption
    layout: tuple[tuple[float, float, float], ...]
    background: float = BACKGROUND


def _phrase(colour: int, shape: int) -> str:
    name = COLOUR_NAMES[colour]
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name} {SHAPE_NAMES[shape]}"


def parse(text: str) -> Caption:
    """What `text` says; ValueError where the grammar has no such caption."""
    words = text.split()
    objects, tail = [_read_object(words, text)], words[3:]
    if not tail:
        return Caption(tuple(objects))
    if len(tail) == 3 and tail[:2] == ["on", "the"] and tail[2] in PLACES:
        return Caption(tuple(objects), place=tail[2])
    relation = " ".join(tail[:-3])
    if relation not in RELATIONS:
        raise _outside_grammar(text)
    objects.append(_read_object(tail[-3:], text))
    return Caption(tuple(objects), relation=relation)


def _read_object(words: Sequence[str], text: str) -> tuple[int, int]:
    if len(words) < 3 or words[0] not in ("a", "an") or words[1] not in COLOUR_NAMES or words[2] not in SHAPE_NAMES:
        raise _outside_grammar(text)
    return COLOUR_NAMES.index(words[1]), SHAPE_NAMES.index(words[2])


def _outside_grammar(text: str) -> ValueError:
    return ValueError(
        f'not a caption of the shapes world: {text!r} (expected for example "a red circle left of a blue square")'
    )


def sample_scene(rng: random.Random, single: float = 0.5) -> Scene:
    """One random scene: with probability `single` it has one object, else two of different colours."""
    background = BACKGROUND + 0.04 * (rng.random() - 0.5)
    colour, shape = rng.randrange(len(COLOUR_NAMES)), rng.randrange(len(SHAPE_NAMES))
    if rng.random() < single:
        place = rng.choice(PLACES) if rng.random() < 0.6 else None
        caption = Caption(((colour, shape),), place=place)
        return Scene(caption, (_layout_one(rng, place),), background)
    other = (colour + rng.randrange(1, len(COLOUR_NAMES))) % len(COLOUR_NAMES)
    relation = rng.choice(RELATIONS)
    caption = Caption(((colour, shape), (other, rng.randrange(len(SHAPE_NAMES)))), relation=relation)
    return Scene(caption, _layout_two(rng, relation), background)


def _layout_one(rng: random.Random, place: str | None) -> tuple[float, float, float]:
    radius = rng.uniform(4.5, 6.5) if place else rng.uniform(5.0, 9.0)
    low, high = radius + 1, SIZE - radius - 1
    free, near = rng.uniform(low, high), low + rng.uniform(0, 2)
    if place is None:
        return free, rng.uniform(low, high), radius
    edge = near if place in ("left", "top") else SIZE - near
    return (edge, free, radius) if place in ("left", "right") else (free, edge, radius)


def _layout_two(rng: random.Random, relation: str) -> tuple[tuple[float, float, float], ...]:
    radii = rng.uniform(4.2, 6.4), rng.uniform(4.2, 6.4)
    slack = SIZE - 2 * sum(radii) - 3
    near = 1 + radii[0] + 0.5 * slack * rng.random()
    far = SIZE - 1 - radii[1] - 0.5 * slack * rng.random()
    along = (near, far) if relation in ("left of", "above") else (SIZE - near, SIZE - far)
    across = [rng.uniform(radius + 1, SIZE - radius - 1) for radius in radii]
    if relation in ("left of", "right of"):
        return tuple(zip(along, across, radii, strict=True))
    return tuple(zip(across, along, radii, strict=True))


def palette(device: torch.device | str = "cpu") -> Tensor:
    """The colours, in the order of COLOUR_NAMES."""
    return torch.tensor(list(COLOURS.values()), device=device)  # [8, 3]


def pixel_grid(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """x and y of every pixel's centre."""
    centres = torch.arange(SIZE, device=device, dtype=torch.float32) + 0.5
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    return x, y  # [H, W] each


def signed_distance(shape: int, x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """Pixels from (x, y) to the outline of this shape of this radius around the origin, negative inside."""
    name, wide = SHAPE_NAMES[shape], x.abs()
    if name == "circle":
        return (x.square() + y.square()).sqrt() - radius
    if name == "square":
        return torch.maximum(wide, y.abs()) - 0.86 * radius
    if name == "triangle":  # apex at (0, -radius), base at y = 0.8 radius from -radius to radius
        slant = (1.8**2 + 1) ** 0.5
        return torch.maximum(y - 0.8 * radius, (1.8 * wide - y - radius) / slant)
    tall, arm = y.abs(), 0.36 * radius
    return torch.minimum(torch.maximum(wide - radius, tall - arm), torch.maximum(wide - arm, tall - radius))


def coverage(distance: Tensor) -> Tensor:
    """How much of a pixel lies inside an outline at this signed distance of its centre, in [0, 1]."""
    return (0.5 - distance).clamp(0, 1)


def render(scenes: Sequence[Scene]) -> Tensor:
    """Images of the scenes, in [0, 1]; the second object is painted over the first."""
    images = torch.tensor([scene.background for scene in scenes]).view(-1, 1, 1, 1).repeat(1, 3, SIZE, SIZE)
    grid_x, grid_y = pixel_grid()
    colours = palette()
    for layer in range(2):
        rows = [row for row, scene in enumerate(scenes) if len(scene.layout) > layer]
        if not rows:
            continue
        layout = torch.tensor([scenes[row].layout[layer] for row in rows])
        kinds = torch.tensor([scenes[row].caption.objects[layer] for row in rows])
        x, y, radius = layout[:, :, None, None].unbind(1)  # [n, 1, 1] each
        mask = torch.empty(len(rows), 1, SIZE, SIZE)
        for shape in range(len(SHAPE_NAMES)):
            drawn = kinds[:, 1] == shape
            distance = signed_distance(shape, grid_x - x[drawn], grid_y - y[drawn], radius[drawn])
            mask[drawn, 0] = coverage(distance)
        paint = colours[kinds[:, 0]][:, :, None, None]
        images[rows] = images[rows] * (1 - mask) + paint * mask
    return images  # [B, 3, H, W]
