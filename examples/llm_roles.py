"""A language model and its judge on solrl's runtime, as it is: processes shift between writing and judging.

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/llm_roles.py

Both are small, random and generative; a process has room for one of them: a shift releases its weights and reads the
other's. Whoever goes on with an unfinished text or verdict gets its tokens and computes their KV cache anew (prefill).
"""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solrl.distributed import start
from solrl.groups import derive_seed, generator
from solrl.runtime.context import Context, Residency, module_tensors
from solrl.runtime.controller import Job
from solrl.runtime.entries import EntrySet
from solrl.runtime.gang import Gang
from solrl.runtime.mailbox import connect
from solrl.runtime.plans import planned
from solrl.runtime.store import Store

NUM_TEXTS, A_ROUND, ROUNDS, END = 8, 8, 8, 2  # a token below END is the last one, after about ROUNDS


class Writing:
    def __init__(self, model, rank, payload, state):
        self.model, self.seed, self.cache = model, payload["seed"], None
        self.tokens, self.ranks = (state or payload)["tokens"], [*(state or payload)["ranks"], rank]  # who wrote

    @torch.no_grad()
    def advance(self):
        for _ in range(A_ROUND):
            new = self.tokens if self.cache is None else self.tokens[-1:]  # all of them: a prefill
            out = self.model(torch.tensor([new]), cache=self.cache, use_cache=True)
            self.cache, logits = out.cache, out.logits[0, -1]
            luck = generator(derive_seed(self.seed, str(len(self.tokens)))).gumbel(size=len(logits))
            self.tokens = [*self.tokens, int((logits + torch.from_numpy(luck)).argmax())]  # the same on any process
            if self.tokens[-1] < END:
                return self.give_back()

    def give_back(self):
        return {"tokens": self.tokens, "ranks": self.ranks}


class Texts:
    def first(self):
        return [Job(n, "explore", {"tokens": [5, 6, 7], "ranks": [], "seed": n}, ROUNDS) for n in range(NUM_TEXTS)]

    def finished(self, job, value, rank):
        is_text, (*new, last) = job.role == "explore", value["tokens"][len(job.payload["tokens"]) :]
        what = "text" if is_text else f"verdict {last} on text"
        print(f"{what} {job.number % NUM_TEXTS}: {len(new)} tokens by process {value['ranks']}", flush=True)
        payload = {"tokens": value["tokens"], "ranks": [], "seed": NUM_TEXTS + job.number}
        return [Job(NUM_TEXTS + job.number, "score", payload, ROUNDS)] if is_text else []

    def outcome(self):
        return {}


if __name__ == "__main__":
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    models = {role: LlamaForCausalLM(config).eval() for role in ("explore", "score")}
    weights = {role: module_tensors({"model": model}) for role, model in models.items()}
    store = Store.create([EntrySet.like(role, tensors, frozen=True) for role, tensors in weights.items()])
    contexts, events = [Context("train", dict, ())], []
    for role, tensors in weights.items():
        store.write(role, 0, tensors)
        read = partial(lambda role, name, tensor: store.read(role, {name: tensor}), role)
        contexts.append(Context(role, partial(weights.get, role), [("*", "parameters")], read))
    residency = Residency(contexts, "train", budget_bytes=0)  # not room for all
    for role in weights:
        residency.shift_down(role, "train")
    with start(cpu_threads=1, deterministic=True) as world, connect(world, 60.0) as post:
        gang = Gang(post, residency, events.append, stop=lambda: None, job_timeout_s=60.0)
        roles = {role: partial(Writing, model, world.rank) for role, model in models.items()}
        gang.work(roles, Texts() if world.is_main else None, planned)
    print(*(f"process {e['rank']} took role {e['role']}\n" for e in events if e["event"] == "shift"), sep="", end="")
