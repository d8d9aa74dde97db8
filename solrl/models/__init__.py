"""Policies: one small adapter per diffusers model family."""

from __future__ import annotations

from solrl.models.base import adapter, load_policy, lora_state

__all__ = ["adapter", "load_policy", "lora_state"]
