"""lm-evaluation-harness's model interface over the scorer: requests to ids, and an audit of them.
For machinery/benchmarks.py."""

import json

import numpy as np
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from machinery.files import sha256

ENCODED_AT_A_TIME = 1024  # texts


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
        return [self.generate(request) for request in tqdm(requests, unit=" requests",
                                                           disable=None)]

    def generate(self, request):
        from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
        context, options = request.args[0], normalize_gen_kwargs(request.args[1])
        new, stops = min(options["max_gen_toks"], self.max_length - 1), options["until"]
        prompt = np.array(self.tok_encode(context) or [self.prefix_token_id], np.int32)
        room = self.max_length - new
        self.note(request, request.args, [prompt], truncated=len(prompt) > room)
        ids, text = [], ""
        for i in self.candidate.generate(prompt[-room:].tolist(), new,
                                         options.get("temperature", 0.0), options.get("top_k")):
            ids.append(i)
            text = self.candidate.decode(ids)
            if any(stop in text for stop in stops):
                break
        return postprocess_generated_text(text, stops, None)
