"""A language model and its judge on solrl's runtime, as it is: processes shift between writing and judging.

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no \
        --dynamo_backend no examples/llm_roles.py

Both models are small and random. A process has room for one of them: a shift releases its weights and reads the other's
from shared memory. Whoever goes on with an unfinished text gets its tokens and computes their KV cache anew.
"""

from functools import partial
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from solrl.distributed import start
from solrl.groups import derive_seed, generator
from solrl.runtime.context import Context, Residency, module_tensors
from solrl.runtime.controller import Job
from solrl.runtime.entries import EntrySet
from solrl.runtime.gang import Gang
from solrl.runtime.mailbox import connect
from solrl.runtime.plans import planned
from solrl.runtime.store import Store

NUM_TEXTS, TOKENS_A_ROUND, LONGEST, END = 12, 8, 120, 2  # a text ends at a token below END


class Writing:
    def __init__(self, model, rank, payload, state):
        self.model, self.seed, self.cache = model, payload["seed"], None
        tokens, ranks = (state["tokens"], state["ranks"]) if state else (payload["prompt"], [])
        self.tokens, self.ranks = [*tokens], [*ranks, rank]  # who has had a hand in it

    @torch.no_grad()
    def advance(self):
        for _ in range(TOKENS_A_ROUND):
            new = self.tokens if self.cache is None else self.tokens[-1:]  # all of them: a prefill
            out = self.model(torch.tensor([new]), cache=self.cache, use_cache=True)
            self.cache, logits = out.cache, out.logits[0, -1]
            luck = generator(derive_seed(self.seed, str(len(self.tokens)))).gumbel(size=len(logits))
            self.tokens.append(int((logits + torch.from_numpy(luck)).argmax()))  # a sample, the same on any process
            if self.tokens[-1] < END or len(self.tokens) >= LONGEST:
                return self.give_back()

    def give_back(self):
        return {"tokens": self.tokens, "ranks": self.ranks}


def judging(model, payload, state):
    text = torch.tensor([payload["tokens"]])
    return SimpleNamespace(advance=lambda: {"score": model(text).logits.item()}, give_back=lambda: None)


class Texts:
    def first(self):
        return [
            Job(n, "explore", {"prompt": [5, 6, 7], "seed": n}, LONGEST // TOKENS_A_ROUND) for n in range(NUM_TEXTS)
        ]

    def finished(self, job, value, rank):
        if job.role == "explore":
            return [Job(NUM_TEXTS + job.number, "score", value, 1)]
        n, length, ranks = job.number - NUM_TEXTS, len(job.payload["tokens"]), job.payload["ranks"]
        print(f"text {n}: {length} tokens by process {ranks}, judged {value['score']:+.5f} by {rank}", flush=True)
        return []

    def outcome(self):
        return {}


def refill(store, role, name, tensor):
    store.read(role, {name: tensor})


def say(event):
    if event["event"] == "shift":
        print(f"process {event['rank']} took role {event['role']} in {1000 * event['of_which_shifting_s']:.1f} ms")


if __name__ == "__main__":
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_labels=1)
    writer, judge = LlamaForCausalLM(config).eval(), LlamaForSequenceClassification(config).eval()
    weights = {"explore": module_tensors({"writer": writer}), "score": module_tensors({"judge": judge})}
    store = Store.create([EntrySet.like(role, tensors, frozen=True) for role, tensors in weights.items()])
    contexts = [Context("train", dict, ())]
    for role, tensors in weights.items():
        store.write(role, 0, tensors)
        contexts.append(Context(role, partial(weights.get, role), [("*", "parameters")], partial(refill, store, role)))
    residency = Residency(contexts, "train", budget_bytes=0)  # not room for all
    for role in weights:
        residency.shift_down(role, "train")
    with start(cpu_threads=1, deterministic=True) as world, connect(world, 60.0) as post:
        gang = Gang(post, residency, say, stop=lambda: None, job_timeout_s=60.0)
        roles = {"explore": partial(Writing, writer, world.rank), "score": partial(judging, judge)}
        gang.work(roles, Texts() if world.is_main else None, planned)
