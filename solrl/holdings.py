"""What each role of a session holds on its device, for runtime/context.py.

Everything is loaded when a run begins, and the role train needs all of it: the update, the rollout trees that it
refreshes, and evaluation. A role explore needs the trees and the decoders, a role score the reward's own modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from solrl.runtime.context import Context, Kind, module_tensors
from solrl.runtime.roles import EXPLORE, SCORE, TRAIN
from solrl.session import Session
from solrl.types import Reward


def role_contexts(session: Session) -> list[Context]:
    """The contexts of the three roles. All of it is offloadable: what one role gives up waits in host memory."""
    exploring = {"explorer": session.explorer, "rollout": session.rollout_policy}
    scoring = {f"reward{number}": module for number, module in enumerate(modules_of(session.reward))}
    everything = {"policy": session.policy} | exploring | scoring

    def learning() -> dict[str, Tensor]:
        learner = session.learner
        moments = {
            f"adam.{number}.{name}": tensor
            for number, state in enumerate(learner.optimizer.state.values())
            for name, tensor in state.items()
        }
        return moments | {f"ema.{number}": tensor for number, tensor in enumerate(learner.ema_parameters)}

    kinds: list[tuple[str, Kind]] = [("*", "offloadable")]
    return [
        Context(EXPLORE, lambda: module_tensors(exploring), kinds),
        Context(SCORE, lambda: module_tensors(scoring), kinds),
        Context(TRAIN, lambda: module_tensors(everything) | learning(), kinds),
    ]


def modules_of(reward: object, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """The modules that a reward holds, also those of rewards inside it, each once."""
    seen = set() if seen is None else seen
    if id(reward) in seen or isinstance(reward, str | bytes | type):
        return
    seen.add(id(reward))
    if isinstance(reward, nn.Module):
        yield reward
        return
    inner: Iterable[object] = ()
    if isinstance(reward, Mapping):
        inner = reward.values()
    elif isinstance(reward, list | tuple):
        inner = reward
    elif isinstance(reward, Reward):
        inner = vars(reward).values()
    for each in inner:
        yield from modules_of(each, seen)
