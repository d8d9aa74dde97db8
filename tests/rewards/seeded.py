"""Weights, images and prompts that are the same in every environment: only Philox's raw bits and arithmetic on them.

The script that asks the official implementations (scripts/reward_golden.py) and the tests both build from here, so that
the committed golden numbers need no committed weights. No import but numpy and torch, whatever their versions.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

PROMPTS = [
    "a red circle left of a blue square",
    "A Photo of two cats, 4k",
    "a green triangle",
    "a red circle left of a blue square",
    "many " * 60 + "words",
]
SIZES = [(64, 64), (90, 50), (33, 71)]  # height, width: shrunk, with odd borders, and enlarged
WORDS = [
    "a",
    "red",
    "green",
    "blue",
    "circle",
    "square",
    "triangle",
    "left",
    "of",
    "photo",
    "two",
    "cat",
    "##s",
    "many",
]


def uniform(name: str, shape: Sequence[int]) -> Tensor:
    """Float32 in [-1, 1), a function of name and shape alone."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    count = int(np.prod(shape, dtype=np.int64))
    bits = np.random.Philox(key=key).random_raw(max(count, 1))[:count]
    return torch.from_numpy(((bits >> np.uint64(40)).astype(np.float64) / 2**23 - 1).astype(np.float32)).reshape(
        tuple(shape)
    )


def state(shapes: Mapping[str, Iterable[int]], salt: str = "") -> dict[str, Tensor]:
    """Weights under which signals keep their size: matrices by fan-in, norms around 1, a logit scale of 100."""
    weights = {}
    for name, size in shapes.items():
        shape = tuple(size)
        values = uniform(salt + name, shape)
        if not shape:
            weights[name] = torch.tensor(4.6052)
        elif len(shape) == 1:
            weights[name] = 0.2 * values + (1.0 if name.endswith("weight") else 0.0)
        else:
            weights[name] = values * (3 / np.prod(shape[1:])) ** 0.5
    return weights


def images(size: tuple[int, int], count: int = len(PROMPTS)) -> Tensor:
    """[count, 3, *size] in [0, 1], not on 8-bit levels: coarse blocks under fine noise."""
    height, width = size
    coarse = uniform(f"coarse {size}", (count, 3, -(-height // 8), -(-width // 8)))
    blocks = coarse.repeat_interleave(8, 2).repeat_interleave(8, 3)[..., :height, :width]
    return (0.5 + 0.4 * blocks + 0.15 * uniform(f"fine {size}", (count, 3, height, width))).clamp(0, 1)


def bert_vocabulary() -> list[str]:
    """Word pieces for a tiny BERT tokenizer: enough for the prompts, letter by letter if need be."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,."
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *WORDS]


# Small models of the shapes that the official ones have.
CLIP = {
    "projection_dim": 32,
    "text_config": {
        "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 3, "num_hidden_layers": 2,
        "max_position_embeddings": 77, "vocab_size": 581, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
        "hidden_act": "quick_gelu",
    },
    "vision_config": {
        "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 3, "num_hidden_layers": 2,
        "image_size": 42, "patch_size": 14, "hidden_act": "quick_gelu",
    },
}  # fmt: skip
CLIP_PROCESSOR = {
    "crop_size": {"height": 42, "width": 42}, "size": {"shortest_edge": 42}, "resample": 3,
    "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True, "do_resize": True, "do_rescale": True,
    "rescale_factor": 1 / 255, "image_processor_type": "CLIPImageProcessor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
OPEN_CLIP = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 42, "layers": 2, "width": 80, "head_width": 20, "patch_size": 14},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
BLIP_VISION = {"img_size": 64, "patch_size": 16, "embed_dim": 128, "depth": 2, "num_heads": 2}
BLIP_TEXT = {
    "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 128,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 64, "model_type": "bert", "num_attention_heads": 4,
    "num_hidden_layers": 2, "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": len(bert_vocabulary()) + 2,
    "encoder_width": 128, "add_cross_attention": True,
}  # fmt: skip
