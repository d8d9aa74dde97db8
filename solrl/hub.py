"""An exported LoRA and its model card, pushed to a model repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from solrl.errors import SolrlError

FILES = ("README.md", "pytorch_lora_weights.safetensors")


def push(folder: Path, repository: str, *, public: bool = False, message: str = "LoRA trained with solrl") -> str:
    """The files of an exported LoRA are in ``repository`` (OWNER/NAME); returns the commit's address.

    A repository that is not there yet is made, private unless ``public``. The login is
    that of `hf auth login`, or HF_TOKEN.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # no answer at all

    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise SolrlError(f"{folder} is no exported LoRA: {missing[0]} is missing")
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        commit = api.create_commit(
            repository,
            [CommitOperationAdd(name, str(folder / name)) for name in FILES],
            commit_message=message,
        )
    except (OSError, HTTPError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SolrlError(f"cannot push {folder} to {repository}: {reason}; the folder itself is complete") from error
    return str(commit.commit_url)
