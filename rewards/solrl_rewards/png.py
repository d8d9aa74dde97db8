"""Images as PNG text for a server, and back with limits that hold before anything is decoded."""

import base64
import binascii
import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def encode_png(image: Tensor) -> str:
    """[3, H, W] in [0, 1] -> base64 of a PNG of its nearest 8-bit levels."""
    levels = (image.detach().float() * 255).round().clamp(0, 255).to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels.permute(1, 2, 0).cpu().numpy()).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def decode_png(text: str, max_pixels: int) -> Tensor:
    """base64 of a PNG -> [3, H, W] float32 in [0, 1]; ValueError if it is no RGB PNG of at most `max_pixels`."""
    try:
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]) as file:
            if file.width * file.height > max_pixels:  # known from the header alone
                raise ValueError(f"an image of {file.width} x {file.height} pixels; at most {max_pixels} are allowed")
            if file.mode != "RGB":
                raise ValueError(f"an image of mode {file.mode}; RGB is needed")
            levels = np.asarray(file)
    except (OSError, SyntaxError, binascii.Error, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"no PNG in base64 ({error})") from error
    return torch.from_numpy(levels.copy()).permute(2, 0, 1).float() / 255
