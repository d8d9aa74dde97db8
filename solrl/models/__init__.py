"""Policies: one small adapter per diffusers model family."""

from __future__ import annotations

from solrl.models.adapters import adapter, lora_state
from solrl.models.base import load_policy

__all__ = ["adapter", "load_policy", "lora_state"]
