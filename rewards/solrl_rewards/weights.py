"""Files of weights: from a local path or a hub id, and never unpickled."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import cached_file


@contextmanager
def loading(reward: str, source: str) -> Iterator[None]:
    """Inside, a file that cannot be found or read is one line that names the reward and where it looked."""
    try:
        yield
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(
            f"{reward}: cannot load {source!r} ({reason}); give a local folder or file, or a hub id that can be reached"
        ) from error


def find_file(source: str, name: str) -> Path:
    """`source` itself if it is a file, else the file `name` of that folder or hub id; OSError where there is none."""
    return Path(source) if Path(source).is_file() else Path(cached_file(source, name))


def load_state(file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a PyTorch file that holds nothing but tensors.

    A dict under the key `state_dict` is taken for the weights; anything else raises ValueError.
    """
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} is no file of weights: {str(error).splitlines()[0]}") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} is no file of weights: it holds more than tensors by name")
    return state


def fill(module: torch.nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Loads exactly `state`; ValueError names the first weight that is missing, too many or of another shape."""
    wanted = module.state_dict()
    wrong = [
        *(f"has no {name}" for name in wanted if name not in state),
        *(f"has an unknown {name}" for name in state if name not in wanted),
        *(
            f"has {name} of shape {list(state[name].shape)} for {list(value.shape)}"
            for name, value in wanted.items()
            if name in state and state[name].shape != value.shape
        ),
    ]
    if wrong:
        raise ValueError(f"{source} does not fit: it {wrong[0]} ({len(wrong)} in all)")
    module.load_state_dict(state)
