"""An exported LoRA or transformer with its model card, pushed to a model repository of the Hugging Face hub."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from solrl.config import Config
from solrl.errors import SolrlError, UsageError

FILES = ("README.md", "pytorch_lora_weights.safetensors")
TRANSFORMER_FILES = ("README.md", "config.json", "diffusion_pytorch_model.safetensors")


def push(folder: Path, repository: str, *, public: bool = False, message: str = "trained with solrl") -> str:
    """The files of an export are in ``repository`` (OWNER/NAME); returns the commit's address.

    A repository that is not there yet is made, private unless ``public``. The login is
    that of `hf auth login`, or HF_TOKEN.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # no answer at all

    files = TRANSFORMER_FILES if (folder / TRANSFORMER_FILES[-1]).is_file() else FILES
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise SolrlError(f"{folder} is no exported LoRA or transformer: {missing[0]} is missing")
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        commit = api.create_commit(
            repository,
            [CommitOperationAdd(name, str(folder / name)) for name in files],
            commit_message=message,
        )
    except (OSError, HTTPError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SolrlError(f"cannot push {folder} to {repository}: {reason}; the folder itself is complete") from error
    return str(commit.commit_url)


def check_push(repository: str | None) -> None:
    """UsageError where a run could not push to ``repository`` in the end, as far as this machine alone can tell.

    Whether the token may write there is known to the hub only.
    """
    if repository is None or not _is_main():
        return
    from huggingface_hub import get_token
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"output.push_to: {error}") from None
    if "/" not in repository:
        raise UsageError(f"output.push_to = {repository} names no owner: write OWNER/{repository}")
    if HF_HUB_OFFLINE:
        raise UsageError("output.push_to: HF_HUB_OFFLINE is set, so nothing could be pushed: unset one of the two")
    if get_token() is None:
        raise UsageError("output.push_to: this machine has no token of the hub: run `hf auth login`, or set HF_TOKEN")


def push_run(config: Config) -> None:
    """The ``lora`` or ``transformer`` of the finished run is at ``output.push_to``, if set; the main process does it.

    SolrlError where the hub refuses: one line with the command that tries again.
    """
    repository, run = config.output.push_to, config.output.dir
    folder = run / ("lora" if config.lora.enabled else "transformer")
    if repository is None or not _is_main():
        return
    try:
        print(f"pushed: {push(folder, repository)}", flush=True)
    except SolrlError as error:
        again = shlex.join(["solrl", "export", str(run), str(folder), "--push", repository])
        raise SolrlError(f"the run is complete and saved; {error}. Try again with: {again}") from error


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"
