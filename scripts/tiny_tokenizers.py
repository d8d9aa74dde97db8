"""Tokenizers of the tiny models, built offline from a corpus: equal corpora give equal tokenizers."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, GemmaTokenizer, T5Tokenizer

WORD_END = "</w>"
SPACE = "\u2581"


def clip_tokenizer(corpus: Sequence[str], max_length: int, merges: int = 120) -> CLIPTokenizer:
    """A byte-level BPE tokenizer that has learned up to `merges` merges."""
    # tokenizers' own BpeTrainer breaks ties differently on every run.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|startoftext|>", "<|endoftext|>"]
    tokens = specials + alphabet + [symbol + WORD_END for symbol in alphabet]
    counts = Counter(word for line in corpus for word in line.lower().split())
    spelled = {word: (*word[:-1], word[-1] + WORD_END) for word in sorted(counts)}
    learned = _learn_merges(spelled, counts, merges)
    tokens += ["".join(pair) for pair in learned]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=learned, model_max_length=max_length)


def gemma_tokenizer(corpus: Sequence[str], max_length: int, merges: int = 400) -> GemmaTokenizer:
    """A BPE tokenizer that falls back to bytes; a word of a small corpus, with the space before it, is one token."""
    counts = Counter(word for line in corpus for word in line.replace(" ", f" {SPACE}").split())
    learned = _learn_merges({word: tuple(word) for word in sorted(counts)}, counts, merges)
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += sorted(set("".join(counts))) + ["".join(pair) for pair in learned]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return GemmaTokenizer(
        vocab=vocabulary, merges=learned, model_max_length=max_length, padding_side="right", add_bos_token=True
    )


def _learn_merges(spelled: dict[str, tuple[str, ...]], counts: Counter[str], limit: int) -> list[tuple[str, str]]:
    """Up to `limit` merges of the most frequent neighbours in words spelled as symbols; ties go to the smaller pair."""
    learned: list[tuple[str, str]] = []
    while len(learned) < limit:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in spelled.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned.append(best)
        spelled = {word: _merge(symbols, best) for word, symbols in spelled.items()}
    return learned


def _merge(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def t5_tokenizer(corpus: Sequence[str], max_length: int) -> T5Tokenizer:
    """A unigram tokenizer in which every word of the corpus is one piece and printable ASCII the rest."""
    counts = Counter(word for line in corpus for word in line.split())
    total = sum(counts.values())
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (SPACE, -6.0)]
    pieces += [(SPACE + word, math.log(counts[word] / total)) for word in sorted(counts)]
    pieces += [(chr(code), -12.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=max_length)
