"""lm-evaluation-harness's model interface over the scorer: requests to ids, and an audit of them.
For machinery/benchmarks.py."""

import json
from typing import NamedTuple

import numpy as np
import torch
from lm_eval.api.model import TemplateLM

from machinery.files import sha256

ENCODED_AT_A_TIME = 1024  # texts

# Generation arguments that we take, those that matter to sampling alone, and values of others that
# change nothing.
TAKEN = ("max_gen_toks", "until", "do_sample", "temperature", "top_k")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
NEUTRAL = {"top_p": 1, "min_p": 0, "typical_p": 1, "num_beams": 1, "num_return_sequences": 1,
           "repetition_penalty": 1, "use_cache": True}


class HarnessLM(TemplateLM):
    """lm-evaluation-harness's LM over a Scorer: loglikelihood, loglikelihood_rolling and
    generate_until, with an audit of what was asked."""

    def __init__(self, scorer):
        super().__init__()
        self.scorer, self.candidate = scorer, scorer.candidate
        self.max_length = scorer.max_length
        self._device = scorer.device
        self.audit = {}  # task -> its requests: how many, how many cut, their hashes

    @property
    def eot_token_id(self):
        return self.candidate.prefix_id

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.candidate.encode([string], add_special_tokens is not False)[0]

    def encode_all(self, texts, special=True):
        """Return {text: int32 ids}: each distinct text once, in batches that use all cores."""
        texts, encoded = list(dict.fromkeys(texts)), {}
        for at in range(0, len(texts), ENCODED_AT_A_TIME):
            some = texts[at:at + ENCODED_AT_A_TIME]
            for text, ids in zip(some, self.candidate.encode(some, special)):
                encoded[text] = np.array(ids, np.int32)
        return encoded

    def encode_pairs(self, pairs):
        """Return [(context ids, continuation ids), ...] of (context, continuation) texts, as
        TemplateLM encodes one.

        Spaces that end a context go to the continuation, whose ids are what the joint text has
        beyond the context's. Where that is nothing (one token spans the join) it is encoded on its
        own. The prefix token stands for an empty context.
        """
        moved, joined = [], []
        for context, continuation in pairs:
            kept = context.rstrip()
            rest = context[len(kept):] + continuation
            moved.append((kept, rest))
            if kept:
                joined += [kept, kept + rest]
        joint = self.encode_all(joined)
        alone = self.encode_all((rest for _, rest in moved), special=False)
        encoded, prefix = [], np.array([self.prefix_token_id], np.int32)
        for context, rest in moved:
            ids, front = alone[rest], joint.get(context, prefix[:0])
            if len(front):
                beyond = joint[context + rest][len(front):]
                encoded.append((front, beyond if len(beyond) else ids))
            else:  # empty, or nothing that the tokenizer has an id for
                there_already = ids[:1].tolist() == prefix.tolist()
                encoded.append((prefix, ids[1:] if there_already else ids))
        return encoded

    def note(self, request, texts, ids, truncated=False):
        """Enter a request in the audit of its task: its texts, its ids, and whether it loses its
        beginning."""
        empty = {"n_requests": 0, "n_truncated": 0, "prompts": [], "tokens": []}
        entry = self.audit.setdefault(request.task_name, empty)
        entry["n_requests"] += 1
        entry["n_truncated"] += truncated
        for key, parts in (("prompts", texts), ("tokens", [part.tolist() for part in ids])):
            entry[key].append(sha256(json.dumps([request.doc_id, *parts]).encode()))

    def loglikelihood(self, requests, disable_tqdm=False):
        """Return [(nats, is greedy), ...] of (context, continuation) requests."""
        pairs = self.encode_pairs([request.args for request in requests])
        for request, pair in zip(requests, pairs):
            truncated = sum(map(len, pair)) > self.max_length + 1
            self.note(request, request.args, pair, truncated)
        return self.scorer.score(pairs)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Return the log-likelihood in nats of each whole text: every token once, the first after
        the prefix token."""
        encoded = self.encode_all((request.args[0] for request in requests), special=False)
        prefix = np.array([self.prefix_token_id], np.int32)
        pairs = [(prefix, encoded[request.args[0]]) for request in requests]
        for request, pair in zip(requests, pairs):
            self.note(request, ("", *request.args), pair)  # a page is not cut but read in windows
        return [nats for nats, _ in self.scorer.score(pairs)]

    def _loglikelihood_tokens(self, requests, **_):
        pairs = []
        for _, context, continuation in requests:
            pairs.append((np.array(context, np.int32), np.array(continuation, np.int32)))
        return self.scorer.score(pairs)

    def generate_until(self, requests, disable_tqdm=False):
        """Return the text that continues each (context, generation arguments) request, up to its
        first stop sequence."""
        jobs = []
        for request in requests:
            options = read_generation(request, self.max_length)
            prompt = np.array(self.tok_encode(request.args[0]) or [self.prefix_token_id], np.int32)
            room = self.max_length - options.max_new_tokens
            self.note(request, request.args, [prompt], truncated=len(prompt) > room)
            jobs.append((prompt[-room:].tolist(), options, request.doc_id))
        return self.scorer.share_out(self.generate, jobs)

    def generate(self, job):
        from lm_eval.models.utils import postprocess_generated_text
        prompt, options, seed = job
        # A request's own seed, so that it draws the same in whatever process and order.
        generator = torch.Generator(self.device).manual_seed(seed)
        ids, text = [], ""
        for i in self.candidate.generate(prompt, options.max_new_tokens, options.temperature,
                                         options.top_k, generator):
            ids.append(i)
            text = self.candidate.decode(ids)
            if any(stop in text for stop in options.stops):
                break
        return postprocess_generated_text(text, options.stops, None)


class Generation(NamedTuple):
    """A task's generation arguments, as we take them."""
    max_new_tokens: int
    stops: list
    temperature: float  # 0 takes the most probable
    top_k: int | None


def read_generation(request, max_length):
    """Return the Generation of a request, whose arguments mean what they mean in the harness's hf
    backend. Raises ValueError for those that we have not, rather than leave them out."""
    from lm_eval.models.utils import normalize_gen_kwargs
    given = normalize_gen_kwargs(request.args[1])
    new, temperature = given["max_gen_toks"], given.get("temperature", 0.0)
    if given["do_sample"] and "temperature" not in request.args[1]:
        temperature = 1.0
    wrong = []
    if not 1 <= new < max_length:
        wrong.append(f"max_gen_toks {new} (expected 1 to {max_length - 1}, less than max_length)")
    if given["do_sample"] and not temperature > 0:
        wrong.append(f"temperature {temperature} with do_sample")
    for name, value in given.items():
        unused = name in SAMPLING and not given["do_sample"]
        if name not in TAKEN and not unused and value != NEUTRAL.get(name):
            wrong.append(f"{name} {value}")
    if wrong:
        raise ValueError(f"{request.task_name}: its generation arguments cannot be had here: "
                         + ", ".join(wrong))
    stops = [stop for stop in given["until"] if stop]  # an empty one stops nothing
    return Generation(new, stops, temperature if given["do_sample"] else 0.0, given.get("top_k"))
