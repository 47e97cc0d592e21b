"""evaluate.py: scoring against direct computation and the harness's own backend, the audit, export
and import, sampling."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

os.environ["HF_HUB_OFFLINE"] = "1"

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import evaluate
import kernels
import model
from inputs import INPUTS
from machinery import benchmarks, huggingface, packing, references, scorer, scores
from machinery.candidates import Candidate
from machinery.checkpoints import load_model
from machinery.errors import ElsewhereError, is_out_of_memory, one_line
from machinery.harness import HarnessLM
from machinery.runs import data_fingerprint
from machinery.scorer import Scorer
from machinery.shards import open_shards, read_meta
from machinery.tokenizer import UTF16_JSON, load_tokenizer, train_tokenizer
from model import Decoder, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
EVAL = SHARED / "eval"
REFERENCE = EVAL / "reference_smollm2_135m_instruct.json"
needs_shared = pytest.mark.skipif(not (EVAL / "data").is_dir(),
                                  reason="../shared/eval/data is not there")
TEXTS = ["The quick brown fox jumps over the lazy dog. ", "def main():\n    return 42\n",
         "naïve café, plain cafe; question and answer: A B C D. "]
T = 64
SIZES = {"vocab_size": 512, "block_size": T, "n_layer": 2, "n_head": 2, "n_embd": 36, "n_ffn": 48}


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(TEXTS * 20, 320).to_str(), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def make_run(tokenizer_file, tmp_path_factory):
    """Return a function that writes a run directory with a random model, and returns it; one for
    each set of arguments."""
    made = {}

    def make(input="binary", step=7, **sizes):
        key = (input, step, *sorted(sizes.items()))
        if key not in made:
            config = ModelConfig(input=input, **{**SIZES, **sizes})
            model = Decoder(config)
            with torch.no_grad():  # larger than at the start of training, so that a wrong position
                for p in model.parameters():  # or mask shows
                    p.mul_(6 if p.dim() == 2 else 1)
            made[key] = tmp_path_factory.mktemp("run")
            shutil.copy(tokenizer_file, made[key] / "tokenizer.json")
            torch.save({"step": step, "model": model.state_dict(), "data": "", "eot_id": 0,
                        "model_config": dataclasses.asdict(config), "tokenizer_sha256": ""},
                       made[key] / f"step-{step:08d}.pt")
        return made[key]

    return make


def open_run(directory, dtype="float32"):
    return evaluate.open_checkpoint(directory, "cpu", dtype)


@pytest.fixture(scope="session")
def binary(make_run):
    return open_run(make_run("binary"))


def characters(texts, special):
    return [[ord(c) for c in text] for text in texts]


def stub(forward, encode=characters, context=2048, **facts):
    """Return a Candidate whose ids are characters."""
    facts = {"name": "stub", "step": None, "weights_sha256": "w", "tokenizer_sha256": "t"} | facts
    return Candidate(forward, list, encode, lambda ids: "".join(map(chr, ids)), None, 0, "", 256,
                     context, facts)


def uniform(idx, select=None, **_):
    return torch.zeros(len(select[0]), 256)


def encoder(path):
    """Return the encode function of a tokenizer.json."""
    tokenizer = load_tokenizer(path)

    def encode(texts, special):
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return encode


def watch(candidate, seen):
    """Return a candidate that appends the shape of each input to seen."""
    def forward(idx, **options):
        seen.append(tuple(idx.shape))
        return candidate.forward(idx, **options)
    return dataclasses.replace(candidate, forward=forward)


def harness_lm(candidate, **options):
    return HarnessLM(Scorer(candidate, **options))


def score(candidate, pairs, **options):
    return Scorer(candidate, **options).score(pairs)


def request(*args, task="task", doc_id=0, idx=0, kind="loglikelihood"):
    return Instance(kind, {}, args, idx, (task, doc_id, 1))


def direct(candidate, context, continuation, T=T):
    """Score one request by itself, by the definition."""
    ids = list(context) + list(continuation)
    row = torch.tensor([ids[-(T + 1):][:-1]])
    n = len(continuation)
    at = torch.arange(row.size(1) - n, row.size(1))
    logits = candidate.forward(row, select=(torch.zeros_like(at), at)).float()
    logp = F.log_softmax(logits, -1)
    targets = torch.tensor(list(continuation))
    return logp[torch.arange(n), targets].sum().item(), bool((logits.argmax(-1) == targets).all())


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def arrays(pairs):
    return [(np.array(a, np.int32), np.array(b, np.int32)) for a, b in pairs]


def assert_close(got, expected, tolerance=1e-4):
    assert len(got) == len(expected)
    for (a, greedy_a), (b, greedy_b) in zip(got, expected):
        assert a == pytest.approx(b, abs=tolerance) and greedy_a == greedy_b


def random_pairs(seed=0):
    """Return questions with shared contexts, one-token answers, shared examples, twins cut at two
    places, duplicates and over-long ones."""
    r = np.random.default_rng(seed)

    def ids(n):
        return r.integers(0, 320, n).tolist()

    pairs = []
    for _ in range(6):
        context = ids(r.integers(5, 25))
        pairs += [(context, ids(n)) for n in (1, 1, 1, 3, 8)]
    examples = ids(20)
    for _ in range(5):
        question = examples + ids(r.integers(3, 12))
        pairs += [(question, ids(1)) for _ in range(4)]
    twin = ids(30)
    pairs += [(twin[:n], twin[n:]) for n in (10, 20, 29)] + [(twin[:29], [5])]
    pairs += [(ids(60), ids(n)) for n in (4, 5, 6, 20)] + [(ids(200), ids(5)), (ids(1), ids(T))]
    return arrays(pairs + pairs[:3])


# --- scoring

def test_scores_equal_direct_computation(binary):
    pairs = random_pairs()
    expected = [direct(binary, a.tolist(), b.tolist()) for a, b in pairs]
    assert_close(score(binary, pairs, share=False), expected)
    assert_close(score(binary, pairs), expected)
    # Random models are never right: the next test has a model that is.
    assert len({greedy for _, greedy in expected}) == 1


def test_greedy_flag_and_shift():
    """A model sure of the next id of 0 1 2 3 ...: its continuation scores 0 and is greedy."""
    def forward(idx, select=None, **_):
        return F.one_hot((idx[select] + 1) % 256, 256).float() * 1000
    pairs = arrays([(range(5, 9), range(9, 14)), (range(5, 9), [9, 11]), ([1], [2, 3, 3])])
    (right, yes), (wrong, no), (late, partly) = score(stub(forward), pairs, share=False)
    assert (right, yes) == (0.0, True)
    assert wrong < -900 and late < -900 and not no and not partly


def test_of_equal_logits_the_first_is_the_greedy_one():
    """As the harness's argmax has it; in bfloat16 equal logits are common."""
    scores = score(stub(uniform), arrays([([1], [0]), ([1], [5])]))
    assert [greedy for _, greedy in scores] == [True, False]


@pytest.mark.parametrize("batch_tokens", (1, 70, 200, 100_000))
@pytest.mark.parametrize("share", (True, False))
@pytest.mark.parametrize("row", (10, 50, 512))
def test_scores_do_not_depend_on_the_batch(binary, batch_tokens, share, row, monkeypatch):
    """Neither on the rows that sequences are packed in, nor on whether a prefix is in the row or
    its keys and values are."""
    monkeypatch.setattr(packing, "ROW", row)
    pairs = random_pairs(1) + arrays([(np.arange(n), [7, 8]) for n in range(3, 300, 16)])
    # Answers that begin alike: what is scored in their common beginning is no part of a prefix.
    pairs += arrays([(np.arange(30, 60), [1, 2, i, 4]) for i in range(5, 12)])
    assert_close(score(binary, pairs, batch_tokens=batch_tokens, share=share),
                 score(binary, pairs, share=False, batch_tokens=T))


def test_bfloat16_scores_in_float32(make_run):
    pairs = random_pairs(2)[:20]
    got = score(open_run(make_run("binary"), "bfloat16"), pairs)
    exact = score(open_run(make_run("binary")), pairs)
    assert max(abs(a - b) for (a, _), (b, _) in zip(got, exact)) < 2
    assert any(a * 16 % 1 for a, _ in got)  # a bfloat16 sum would be a multiple of 1/16


def test_sharing_saves_the_tokens_it_should(binary):
    context = list(range(40))

    def tokens(pairs, **options):
        seen = []
        score(watch(binary, seen), arrays(pairs), **options)
        return sum(b * t for b, t in seen)

    pairs = [(context, [i, i + 1]) for i in range(50, 58)]
    assert tokens(pairs) == 40 + 8 * 1  # the context once, then of each answer its first token
    assert tokens(pairs, share=False) == 8 * 41
    assert tokens([(context, [i]) for i in range(5)]) == 40  # one-token answers: one row, one place
    # Too long for one row: the context less its last token, then rows on its keys and values.
    long = [(context + [100 + i // 4, i, 5], [200]) for i in range(200)]
    assert tokens(long) == 39 + 200 * 4


def test_many_short_rows_that_share_one_token(binary):
    """Their group is too long for a row, and less its last token its prefix is empty."""
    pairs = arrays([([3], [i, i + 1, 7]) for i in range(300)])
    rows = [np.concatenate(pair)[:-1] for pair in pairs]
    assert packing.share_prefixes(rows, [1] * 300) == [(1, 0, 300)]
    assert_close(score(binary, pairs), score(binary, pairs, share=False))


def test_rows_are_packed_without_gaps(binary):
    seen, r = [], np.random.default_rng(7)
    pairs = arrays([(r.integers(0, 320, n), [1]) for n in r.integers(4, T, 300)])
    score(watch(binary, seen), pairs)
    assert sum(b * t for b, t in seen) < 1.1 * sum(len(context) for context, _ in pairs)
    widths = [t for _, t in seen]
    assert widths == sorted(widths, reverse=True)  # memory trouble shows at once


def test_cost_is_linear_in_the_requests(binary):
    costs = []
    for n in (40, 80):
        seen, r = [], np.random.default_rng(3)
        pairs = [(r.integers(0, 320, 20), r.integers(0, 320, 5)) for _ in range(n)]
        score(watch(binary, seen), arrays(pairs))
        costs.append(sum(b * t for b, t in seen))
    assert costs[1] == 2 * costs[0]


def saving(rows, length):
    """Return what rows that share a prefix of this length save, less the cost of sharing."""
    again = (len(rows) - 1) * length
    return again - (sum(map(len, rows)) - again) / packing.SHARING_COST


def most_saved(rows, limits):
    """The definition, recursively: rows are one group, or cut wherever fewest tokens are common."""
    if len(rows) < 2:
        return 0
    common = []
    for i in range(len(rows) - 1):
        alike = len(os.path.commonprefix([rows[i].tolist(), rows[i + 1].tolist()]))
        common.append(min(limits[i], limits[i + 1], alike))
    whole = saving(rows, min(common))
    cuts = [0, *(i + 1 for i, n in enumerate(common) if n == min(common)), len(rows)]
    parts = [most_saved(rows[a:b], limits[a:b]) for a, b in itertools.pairwise(cuts)]
    return max(whole, sum(parts))


def test_share_prefixes_example_and_optimum(monkeypatch):
    rows = [np.frombuffer(text, np.uint8).astype(np.int32)
            for text in (b"abcd", b"abcef", b"abcg", b"xy")]
    monkeypatch.setattr(packing, "SHARING_COST", math.inf)
    lengths = [len(row) for row in rows]
    assert packing.share_prefixes(rows, lengths) == [(3, 0, 3), (0, 3, 4)]
    assert packing.share_prefixes([], []) == []
    for cost, seed in itertools.product((math.inf, 32, 8, 2), range(40)):
        monkeypatch.setattr(packing, "SHARING_COST", cost)
        r = np.random.default_rng(seed)
        drawn = {tuple(np.repeat(r.integers(0, 2, 5), r.integers(1, 5, 5)).tolist())
                 for _ in range(8)}
        rows = [np.array(row, np.int32) for row in sorted(drawn)]
        limits = [len(row) - 1 for row in rows]
        groups = packing.share_prefixes(rows, limits)
        _, starts, ends = zip(*groups)
        assert (*starts, len(rows)) == (0, *ends)
        saved = 0
        for length, start, end in groups:
            for row, limit in zip(rows[start:end], limits[start:end]):
                assert row[:length].tolist() == rows[start][:length].tolist() and length <= limit
            saved += saving(rows[start:end], length) if length else 0
        assert saved == pytest.approx(most_saved(rows, limits))


def test_many_nested_prefixes_need_no_recursion():
    rows = [np.zeros(n, np.int32) for n in range(1, 3000)]
    groups = packing.share_prefixes(rows, [len(row) for row in rows])
    assert groups[-1][2] == len(rows)


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate "
                 "memory: you tried to allocate 99 bytes. Error code 12 (Cannot allocate memory)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:84] . DefaultCPUAllocator: not enough memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))


@pytest.mark.parametrize("row, error", [(10, OUT_OF_MEMORY[0]),
                                        *((T, error) for error in OUT_OF_MEMORY)])
def test_memory_trouble_halves_the_batch(binary, capsys, row, error, monkeypatch):
    """In the words of CUDA, numpy, Linux, Windows and macOS, and MPS."""
    monkeypatch.setattr(packing, "ROW", row)

    def forward(idx, cache=None, **options):
        if idx.numel() > 100:
            raise error
        return binary.forward(idx, cache=cache, **options)

    def breaks(*_, **__):
        raise RuntimeError("shape")

    pairs = random_pairs(4)
    scorer = Scorer(dataclasses.replace(binary, forward=forward), batch_tokens=1000)
    assert_close(scorer.score(pairs), score(binary, pairs))
    assert scorer.batch_tokens < 1000
    assert "continuing with --batch_tokens=" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="shape"):
        score(dataclasses.replace(binary, forward=breaks), pairs)


@pytest.mark.parametrize("allocate", [
    lambda: torch.empty(1 << 50, dtype=torch.uint8), lambda: np.empty(1 << 50, np.uint8),
    lambda: bytearray(1 << 50)])
def test_this_machines_own_words_for_too_little_memory_are_known(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as error:
        allocate()
    assert is_out_of_memory(error.value)


def test_interrupted_evaluation_continues(binary, tmp_path):
    calls, cache = [], tmp_path / "finished"

    def dies(idx, **options):
        calls.append(1)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return binary.forward(idx, **options)

    pairs = random_pairs(5)
    with pytest.raises(KeyboardInterrupt):
        score(dataclasses.replace(binary, forward=dies), pairs, batch_tokens=64, cache=cache)
    with open(tmp_path / "finished.0", "ab") as file:
        for line in (b"a" * 32 + b" nan 1", b"b" * 32 + b" \xff 1", b"c" * 32 + b" -1.2.3.4 0",
                     b"d" * 32 + b" -1e-07 1", b"0123456789abcdef0123"):  # the last one torn
            file.write(line + b"\n")
    again, whole = [], []
    scorer = Scorer(watch(binary, again), batch_tokens=64, cache=cache)
    assert len(scorer.finished) > 5 and scorer.finished["d" * 32] == (-1e-7, True)
    assert not {letter * 32 for letter in "abc"} & scorer.finished.keys()
    assert_close(scorer.score(pairs), score(binary, pairs))
    score(watch(binary, whole), pairs, batch_tokens=64)
    assert len(again) < len(whole)


# --- requests, as the harness has them

def test_token_spans_the_join():
    """Finite values, and at least one scored token each."""
    joins = {"Ans": [1], "Answer": [2], "wer": [3], "x:": [4, 5], "x: C": [4, 5, 6], " C": [6],
             "hello wor": [7, 8], "hello world": [7, 9], "ld": [10]}
    lm = harness_lm(stub(uniform, lambda texts, special: [joins[text] for text in texts]))
    pairs = lm.encode_pairs([("Ans", "wer"), ("hello wor", "ld"), ("x:", " C")])
    found = [(a.tolist(), b.tolist()) for a, b in pairs]
    assert found == [([1], [3]), ([7, 8], [10]), ([4, 5], [6])]
    assert all(math.isfinite(nats) and nats < 0 for nats, _ in lm.scorer.score(pairs))


PAIRS = [("The capital is ", "Paris"), ("The capital is", " Paris"), ("a  ", "b"), ("a\n", "b"),
         ("a \n ", " b"), ("a\t", "b"), ("Question: x\nAnswer:", " A"), ("1", "2"), ("12 ", "3"),
         ("naïve", " café"), ("é", "é"), ("x", "\n"), ("x", "  y"), ("'", "s it"), ("don", "'t"),
         ("A.", " B."), ("日本", "語"), ("end", "."), ("a b c", " d e f"), ("0.5 ", "0.25")]


@pytest.mark.parametrize("name", ("ours", "smollm2"))
def test_pairs_are_encoded_as_the_harness_does(name, tokenizer_file):
    """Also with spaces at the join."""
    path = tokenizer_file if name == "ours" else SHARED / "smollm2" / "tokenizer.json"
    if not path.is_file():
        pytest.skip("../shared/smollm2 is not there")
    lm = harness_lm(stub(uniform, encoder(path)))
    for pair, (context, continuation) in zip(PAIRS, lm.encode_pairs(PAIRS)):
        theirs = TemplateLM._encode_pair(lm, *pair)
        assert (context.tolist(), continuation.tolist()) == theirs
    moved = lm.encode_pairs([("The capital is ", "Paris"), ("The capital is", " Paris")])
    assert all((a == b).all() for a, b in zip(*moved))


def test_empty_context_takes_the_prefix_token(binary):
    """By hand, with the end-of-text id in front."""
    lm = harness_lm(binary)
    hello, x = binary.encode(["Hello there", "  x"], False)
    assert_close(lm.loglikelihood([request("", "Hello there"), request("  ", "x")]),
                 [direct(binary, [0], hello), direct(binary, [0], x)])
    assert lm.prefix_token_id == 0 and binary.prefix_reason
    there_already = harness_lm(stub(uniform)).loglikelihood([request("", "\0a")])
    assert there_already == [(pytest.approx(-math.log(256)), False)]


@pytest.mark.parametrize("input, config, exact", [
    ("binary", {}, True), ("gf2", {}, True), ("gf2", {"code_offset": "5"}, False),
    ("binary", {"code_values": "pm1"}, False), ("binary", {"table_free": True}, True),
    ("learned", {}, False)])
def test_zero_code_boundary(make_run, input, config, exact):
    """The paper: with an empty context fixed codes of 0 and 1 with b = 0 assign exactly ln V to the
    first token; the others do not. The note says so of these alone."""
    candidate = open_run(make_run(input, **config))
    for text in "aQ5":
        nats = harness_lm(candidate).loglikelihood([request("", text)])[0][0]
        assert (nats == pytest.approx(-math.log(512), abs=1e-6)) == exact
    assert ("ln V" in candidate.note) == exact


@pytest.mark.parametrize("n", (0, 1, 2, 2047, 2048, 2049, 5000))
def test_rolling_windows_score_each_token_once(n):
    """And they are the harness's own windows."""
    lm = harness_lm(stub(uniform))
    scores = lm.loglikelihood_rolling([request("a" * n, kind="loglikelihood_rolling")])
    assert scores == [pytest.approx(-n * math.log(256), rel=1e-5)]
    ids = np.random.default_rng(0).integers(1, 256, n).astype(np.int32)
    theirs = get_rolling_token_windows(ids.tolist(), 0, 2048, 1)
    ours = []
    for row, targets in packing.cut_request(np.zeros(1, np.int32), ids, lm.max_length):
        ours.append((row[:len(row) - len(targets) + 1].tolist(), targets.tolist()))
    assert ours == [make_disjoint_window(window) for window in theirs]


def test_truncation_keeps_the_end_and_is_counted():
    """Counts equal a direct count on prompts that straddle the limit."""
    seen = []
    lm = harness_lm(watch(stub(uniform), seen), share=False)
    text = "".join(chr(1 + i % 200) for i in range(3000)).replace(" ", "x").replace("\n", "x")
    pairs = lm.encode_pairs([(text, "hello"), (text[-2044:], "hello")])
    (cut, _), (alone, _) = lm.scorer.score(pairs)
    assert cut == alone and seen == [(1, 2048)]  # one distinct input
    for n in (2041, 2042, 2043, 2044, 2045, 2046, 3000):
        lm.audit.clear()
        lm.loglikelihood([request(text[:n], "hello"), request("a", "b")])
        assert lm.audit["task"]["n_truncated"] == (n + 5 > 2049)
        assert lm.audit["task"]["n_requests"] == 2


def test_long_and_empty_continuations(binary):
    """A continuation longer than the model is read in windows; an empty one scores 0; the others
    are as alone."""
    r = np.random.default_rng(6)
    long = [r.integers(0, 320, n) for n in (T, T + 1, T + 40)]
    expected = []
    for ids in long:
        windows = map(make_disjoint_window, get_rolling_token_windows(ids.tolist(), 3, T, 1))
        nats, greedy = zip(*(direct(binary, *window) for window in windows))
        expected.append((sum(nats), all(greedy)))
    got = score(binary, arrays([([3], ids) for ids in long] + [([3, 4], []), ([3, 4], [5])]))
    assert_close(got, [*expected, (0.0, True), direct(binary, [3, 4], [5])])
    empty = harness_lm(stub(uniform)).loglikelihood([request("a", ""), request("", "")])
    assert empty == [(0.0, True)] * 2


def test_max_length_beyond_the_model_is_refused(binary):
    with pytest.raises(ValueError, match=f"--max_length={T + 1}: .* takes 1 to {T}"):
        Scorer(binary, max_length=T + 1)


def test_audit_is_over_the_multiset(binary):
    def hashes(requests, candidate=binary):
        lm = harness_lm(candidate)
        lm.loglikelihood(requests)
        return [sorted(lm.audit["task"][key]) for key in ("prompts", "tokens")]

    def encode(texts, special):
        return [[1, *ids] for ids in binary.encode(texts, special)]

    first = [request("a b", " c", doc_id=0), request("a b", " d", doc_id=0)]
    requests = [*first, request("x", " y", doc_id=1)]
    assert hashes(requests) == hashes(requests[::-1])
    # A continuation, which the harness's prompt_hash misses.
    assert hashes(requests) != hashes([*first, request("x", " z", doc_id=1)])
    assert hashes(requests) != hashes([*first, request("x", " y", doc_id=2)])
    prompts, tokens = hashes(requests)
    same, differ = hashes(requests, dataclasses.replace(binary, encode=encode))
    assert prompts == same and tokens != differ


@functools.cache
def load_shared(name):
    return benchmarks.load_tasks([name], None, EVAL / "data")


def shared_tasks(name, shots):
    """Return load_tasks of a benchmark in ../shared, of which each is loaded once."""
    loaded = load_shared(name)
    for task in loaded["tasks"].values():
        task.set_config("num_fewshot", shots)
    return loaded


@needs_shared
@pytest.mark.parametrize("name", (
    "hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande", "openbookqa",
    "commonsense_qa", "lambada_openai", "wikitext", "wikitext_max1024", "mmlu_5shot", "mmlu"))
def test_token_ids_equal_the_reference(name):
    """The harness's own unmodified tasks give, request for request, the ids that its hf backend was
    given."""
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))["tasks"][name]
    lm = harness_lm(stub(uniform, encoder(SHARED / "smollm2" / "tokenizer.json")))
    max_length = 1024 if name.endswith("1024") else 2048
    loaded = shared_tasks(reference["task"], reference["num_fewshot"])
    digest, n = hashlib.sha256(), 0
    for task in loaded["tasks"].values():
        with contextlib.redirect_stderr(io.StringIO()):
            task.build_all_requests(limit=reference["limit_per_task"], rank=0, world_size=1)
        if reference["task"] == "wikitext":
            pairs, texts = [], lm.encode_all([r.args[0] for r in task.instances])
            for ids in texts.values():
                for row, targets in packing.cut_request(np.zeros(1, np.int32), ids, max_length):
                    pairs.append((row[:len(row) - len(targets) + 1], targets))
        else:
            pairs = lm.encode_pairs([r.args for r in task.instances])
        n += len(pairs)
        for pair in pairs:
            digest.update(json.dumps([part.tolist() for part in pair]).encode())
    assert (digest.hexdigest(), n) == (reference["tokens_sha256"], reference["n_requests"])


@needs_shared
def test_truncated_requests_of_mmlu_are_counted():
    """The compact set, one question a subject: 8 of 228 five-shot requests are over 2048, 24 over
    1024."""
    encode = encoder(SHARED / "smollm2" / "tokenizer.json")
    for max_length, expected in ((2048, 8), (1024, 24)):
        lm = harness_lm(stub(uniform, encode), max_length=max_length)
        lm.scorer.score = lambda pairs: [(-1.0, False)] * len(pairs)
        tasks, groups = benchmarks.run_tasks(lm, shared_tasks("mmlu", 5), limit=1)
        assert sum(task["n_truncated"] for task in tasks.values()) == expected
        assert list(groups) == ["mmlu"] and len(groups["mmlu"]["tasks"]) == 57
    assert {task["num_fewshot"] for task in tasks.values()} == {5}


# --- tasks of our own

OWN_TASKS = {
    "own_choice": """
output_type: multiple_choice
doc_to_text: '{{q}} Answer:'
doc_to_choice: '{{choices}}'
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "own_word": """
output_type: loglikelihood
doc_to_text: '{{q}}'
doc_to_target: ' yes'
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "own_page": """
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "own_text": """
output_type: generate_until
doc_to_text: '{{q}}'
doc_to_target: 'x'
generation_kwargs: {until: ["e"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""}
OWN_DATA = """
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/docs.jsonl, train: FOLDER/few.jsonl}}
test_split: test
training_split: train
fewshot_split: train
metadata: {version: 3}
"""


def write_lines(path, docs):
    lines = [json.dumps(doc) + "\n" for doc in docs]
    path.write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="session")
def tasks_dir(tmp_path_factory):
    """A folder of harness tasks with data of their own: multiple choice, log-likelihood, pages,
    generation."""
    folder = tmp_path_factory.mktemp("tasks")
    docs = []
    for i in range(8):
        docs.append({"q": f"What is {i} and {i}?", "gold": i % 3, "text": TEXTS[i % 3] * (1 + i),
                     "choices": ["naïve café", "plain cafe", str(2 * i)]})
    write_lines(folder / "docs.jsonl", docs)
    write_lines(folder / "few.jsonl", docs[:2])
    for name, rest in OWN_TASKS.items():
        data = OWN_DATA.replace("FOLDER", str(folder))
        (folder / f"{name}.yaml").write_text(f"task: {name}{data}{rest}", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def own_tasks(tasks_dir):
    """load_tasks without the harness's own 14,000 files."""
    def load(*names, num_fewshot=None):
        return benchmarks.load_tasks(list(names), num_fewshot, include_path=tasks_dir)
    return load


def simple_evaluate(lm, loaded, **options):
    """Run the harness's own front door, without its index of 14,000 files, which it would read even
    for tasks that are given as objects."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    return lm_eval.simple_evaluate(lm, tasks=list(loaded["tasks"].values()),
                                   task_manager=TaskManager(include_defaults=False), **options)


class OneByOne(Scorer):
    def score(self, pairs):
        return [score(self.candidate, [pair], share=False)[0] for pair in pairs]


def test_metrics_are_the_harness_s_own(binary, own_tasks):
    """All kinds of request, against lm_eval.simple_evaluate with a plain one-by-one LM."""
    names = ("own_choice", "own_word", "own_page")
    tasks, _ = benchmarks.run_tasks(harness_lm(binary), own_tasks(*names))
    results = simple_evaluate(HarnessLM(OneByOne(binary)), own_tasks(*names),
                              bootstrap_iters=benchmarks.BOOTSTRAP_ITERS)["results"]
    for name in names:
        for metric, value in tasks[name]["metrics"].items():
            theirs = results[name][f"{metric},none"]
            expected = theirs if isinstance(theirs, str) else pytest.approx(theirs, rel=1e-5)
            assert value == expected
    choice = tasks["own_choice"]
    assert choice["version"] == 3 and choice["n_docs"] == 8 and choice["n_requests"] == 24
    docs = choice["docs"]
    right = [responses[i % 3][0] for i, responses in enumerate(docs["responses"])]
    assert docs["loglikelihood"] == right
    p = np.mean(docs["acc"])
    assert choice["metrics"]["acc"] == p
    stderr = math.sqrt(p * (1 - p) / 7)  # the paper's standard error
    assert choice["metrics"]["acc_stderr"] == pytest.approx(stderr) and stderr > 0


def test_acc_norm_counts_characters(own_tasks):
    """'naïve café' is 10 characters and 12 bytes; by bytes the other choice would win."""
    lm = harness_lm(stub(uniform))
    scores = {" naïve café": -11.0, " plain cafe": -10.5}

    def loglikelihood(requests, **_):
        for one in requests:
            lm.note(one, one.args, (np.zeros(1), np.zeros(1)))
        return [(scores.get(one.args[1], -99.0), False) for one in requests]

    lm.loglikelihood = loglikelihood
    tasks, _ = benchmarks.run_tasks(lm, own_tasks("own_choice"))
    expected = [1.0 if i % 3 == 1 else 0.0 for i in range(8)]
    assert tasks["own_choice"]["docs"]["acc_norm"] == expected


def test_harness_caches_work(binary, own_tasks, tmp_path, monkeypatch):
    """cache_requests, log_samples and use_cache; the second call takes the cache's, the same."""
    import lm_eval.caching.cache
    monkeypatch.setattr(lm_eval.caching.cache, "PATH", str(tmp_path))
    found = []
    for _ in range(2):
        loaded = own_tasks("own_choice", "own_text")
        found.append(simple_evaluate(harness_lm(binary), loaded, cache_requests=True, limit=2,
                                     log_samples=True, use_cache=str(tmp_path / "cache"),
                                     bootstrap_iters=0))
    first, second = found
    assert first["results"] == second["results"]
    before, after = ([sample["resps"] for sample in each["samples"]["own_choice"]]
                     for each in (first, second))
    assert before == after


def test_more_shots_than_examples(binary, own_tasks):
    """A clear message, or fewer shots that are said; --limit does not cut the examples."""
    two = own_tasks("own_choice", num_fewshot=2)
    tasks, _ = benchmarks.run_tasks(harness_lm(binary), two, limit=1)
    assert tasks["own_choice"]["num_fewshot"] == 2
    with pytest.raises(ValueError, match="own_choice: 5 examples are asked for, but it has 2; give "
                                         "--num_fewshot=2"):
        own_tasks("own_choice", num_fewshot=5)


def greedy_ids(candidate, ids, n):
    """Return the n ids that follow, by full forward passes."""
    ids = list(ids)
    for _ in range(n):
        at = torch.tensor([len(ids) - 1])
        logits = candidate.forward(torch.tensor([ids]), select=(at * 0, at))
        ids.append(logits[0, :candidate.n_ids].argmax().item())
    return ids[-n:]


def test_generation_is_greedy_and_stops(binary, own_tasks):
    tasks, _ = benchmarks.run_tasks(harness_lm(binary), own_tasks("own_text"))
    texts = []
    for response in tasks["own_text"]["docs"]["responses"]:
        texts.append(response[0] if isinstance(response, list) else response)
    prompt = binary.encode(["What is 0 and 0?"], True)[0]
    assert texts[0] == binary.decode(greedy_ids(binary, prompt, 6)).split("e")[0]
    assert all("e" not in text for text in texts)
    assert tasks["own_text"]["n_truncated"] == 0
    # What a prompt loses is counted with the room that its continuation needs: 6 tokens.
    shorter = harness_lm(binary, max_length=len(prompt) + 5)
    tasks, _ = benchmarks.run_tasks(shorter, own_tasks("own_text"), limit=1)
    assert tasks["own_text"]["n_truncated"] == 1


# --- the command line

def run(*arguments, **environment):
    """Run evaluate.py with arguments; return (exit code, stdout, last line of stderr)."""
    done = subprocess.run([sys.executable, ROOT / "evaluate.py", *map(str, arguments)],
                          capture_output=True, text=True, cwd=ROOT, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    return done.returncode, done.stdout, (done.stderr.strip().splitlines() or [""])[-1]


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
    return evaluate.main()


def test_score_writes_and_prints_the_protocol(make_run, tasks_dir, monkeypatch, capsys):
    """Every number has what is needed to repeat it."""
    directory = make_run("binary", step=9)
    tail = ("--limit=2", f"--include_path={tasks_dir}", "--device=cpu")
    call(monkeypatch, "score", directory, "--tasks=own_choice,own_page", "--dtype=bfloat16", *tail)
    out = capsys.readouterr().out
    path = directory / "own_choice+own_page_limit2_bfloat16-00000009.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    protocol = result["protocol"]
    assert set(protocol) >= {
        "lm_eval", "max_length", "truncation", "dtype", "prefix_token_id", "prefix_token", "note",
        "batch_tokens", "share", "data", "limit"}
    assert protocol["max_length"] == T and protocol["dtype"] == "bfloat16"
    assert "ln V = 6.2383" in protocol["note"]
    assert len(result["model"]["weights_sha256"]) == 64
    assert result["tasks"]["own_choice"]["n_docs"] == 2
    for said in ("lm-eval 0.4.13", "max_length 64", "bfloat16", "id 0, the end-of-text token",
                 "ln V = 6.2383", "own_choice", "acc_norm", "truncated"):
        assert said in out
    call(monkeypatch, "score", directory, "--tasks=own_choice", "--num_fewshot=0", *tail)
    # Not in the place of the task's own number.
    assert (directory / "own_choice_0shot_limit2-00000009.json").exists()
    assert not list(directory.glob(".finished*"))


def test_torchrun_gives_the_same(make_run, tasks_dir, monkeypatch, capsys):
    directory = make_run("binary", step=11)
    arguments = ["score", str(directory), "--tasks=own_choice,own_page,own_text",
                 f"--include_path={tasks_dir}", "--device=cpu"]
    call(monkeypatch, *arguments)
    target = directory / "own_choice+own_page+own_text-00000011.json"
    one = json.loads(target.read_text(encoding="utf-8"))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           "--nproc_per_node=2", "evaluate.py", *arguments],
                          capture_output=True, text=True, cwd=ROOT, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    # No bar where there is no terminal.
    assert done.returncode == 0 and "it/s" not in done.stderr, done.stderr[-2000:]
    two = json.loads(target.read_text(encoding="utf-8"))
    assert done.stdout.count("own_choice ") == 1  # one process prints
    assert two["protocol"]["processes"] == 2
    for name, task in one["tasks"].items():
        again = two["tasks"][name]
        assert task["prompts_sha256"] == again["prompts_sha256"]
        if name == "own_text":
            assert again["docs"]["responses"] == task["docs"]["responses"]
        else:
            np.testing.assert_allclose(again["docs"]["loglikelihood"],
                                       task["docs"]["loglikelihood"], atol=1e-4)
    assert not list(directory.glob(".finished*"))


def test_jobs_are_shared_out(binary):
    """Each process does a part, and all have the whole, in order."""
    done = {0: [], 1: []}
    for part in (0, 1, 0, 1):  # the second round has what the first did
        scorer = Scorer(binary)
        scorer.part, scorer.parts, worked = part, 2, []

        def gather(own, part=part):
            done[part] = own
            return [done[0], done[1] or [None] * 3]

        scorer.gather = gather
        result = scorer.share_out(lambda job, worked=worked: worked.append(job) or -job, range(7))
        assert worked == list(range(part, 7, 2))
    assert result == [-job for job in range(7)]


def test_missing_data_is_one_line(make_run, tmp_path):
    """Without network and without data; in a process of its own, so main's boundary is seen too."""
    directory = make_run("binary")
    code, out, error = run("score", directory, "--tasks=hellaswag", HF_HOME=str(tmp_path),
                           HF_DATASETS_OFFLINE="1")
    assert not list(directory.glob(".finished*"))  # nothing is left behind
    assert code == 1 and error.startswith("evaluate.py: hellaswag:")
    assert "Rowan/hellaswag" in error and "--data_dir=DIR" in error


def test_local_benchmarks_do_not_cut_off_the_hub(tmp_path):
    """With --data_dir a data set is there or missing, at once; a --hf model that is scored next is
    still fetched."""
    code = f"""
from machinery import benchmarks
try:
    benchmarks.load_tasks(['piqa'], data_dir={str(tmp_path)!r})
except FileNotFoundError as error:
    print(error)
import huggingface_hub
print('hub offline:', huggingface_hub.constants.HF_HUB_OFFLINE)"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    del environment["HF_HUB_OFFLINE"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          env=environment, timeout=60)
    assert "piqa: its data set cannot be loaded" in done.stdout, done.stderr[-500:]
    assert done.stdout.endswith("hub offline: False\n")


@pytest.mark.parametrize("arguments, code, said", (
    (["score"], 2, "name a CHECKPOINT"),
    (["score", "RUN", "--suite=paper", "--tasks=piqa"], 2, "--suite has its own tasks"),
    (["score", "RUN", "--suite=papers"], 2, "invalid choice"),
    (["score", "RUN", "--limit=3"], 2, "give --tasks or --suite too"),
    (["score", "RUN", "--num_fewshot=0"], 2, "give --tasks or --suite too"),
    (["score", "RUN", "--tasks=piqa", "--data=x"], 2, "--data is for the held-out loss"),
    (["probe", "RUN"], 1, "does not say what data it was trained on"),
    (["probe", "EMPTY"], 1, "no checkpoint"),
    (["score", "RUN", "--no_such_flag"], 2, "unrecognized arguments: --no_such_flag"),
    (["score", "RUN", "--no_share=False"], 2, "ignored explicit argument"),
    (["score", "RUN"], 1, "give --data=DIR"),
    (["score", "/no/such/run"], 1, "/no/such/run"),
    (["score", "RUN", "--tasks=piqa", "--data_dir=/no/such"], 1, "/no/such"),
    (["score", "RUN", "--tasks=piqa", "--max_length=65"], 1, "takes 1 to 64"),
    (["score", "RUN", "--batch_tokens=-1"], 2, "--batch_tokens: -1; expected 1 or more"),
    (["score", "RUN", "--batch_tokens=1e4"], 2, "--batch_tokens: 1e4; expected 1 or more"),
    (["score", "RUN", "--max_length=0"], 2, "--max_length: 0; expected 1 or more"),
    (["score", "RUN", "--tasks=piqa", "--num_fewshot=-1"], 2, "--num_fewshot: -1; expected 0 or"),
    (["score", "RUN", "--tasks=piqa", "--limit=0"], 2, "--limit: 0; expected 1 or more"),
    (["score", "RUN", "--tasks=,"], 2, "--tasks"),
    (["score", "RUN", "--device=cuda"], 2, "--device: cuda; "),
    (["score", "RUN", "--device=gpu"], 2, "--device: gpu; expected"),
    (["probe", "RUN", "--device=cuda:7"], 2, "--device: cuda:7; "),
    (["probe", "RUN", "--positions=0"], 2, "--positions: 0; expected 1 or more"),
    (["sample", "RUN", "--prompt", ""], 2, "--prompt is empty"),
    (["sample", "RUN", "--temperature=-1"], 2, "--temperature: -1; expected 0 or more"),
    (["sample", "RUN", "--temperature=nan"], 2, "--temperature: nan; expected 0 or more"),
    (["sample", "RUN", "--temperature=inf"], 2, "--temperature: inf; expected 0 or more"),
    (["sample", "RUN", "--top_k=0"], 2, "--top_k: 0; expected 1 or more"),
    (["sample", "RUN", f"--seed={2**64}"], 2, "expected 0 to"),
    (["sample", "RUN", "--seed=-1"], 2, "--seed: -1; expected 0 or more"),
    (["sample", "RUN", "--num_samples=0"], 2, "--num_samples: 0; expected 1 or more"),
    (["sample", "RUN", "--max_new_tokens=-5"], 2, "--max_new_tokens: -5; expected 1 or more"),
    (["export", "RUN", "RUN"], 1, "exists; name a directory"),
    (["import", "RUN", "/tmp/x"], 1, "config.json"),
))
def test_mistakes_are_one_line(make_run, monkeypatch, capsys, tmp_path, arguments, code, said):
    places = {"RUN": str(make_run("binary")), "EMPTY": str(tmp_path)}
    try:
        call(monkeypatch, *(places.get(argument, argument) for argument in arguments))
    except SystemExit as error:
        got, message = error.code, capsys.readouterr().err
    except (ValueError, OSError) as error:  # main's caller prints them as one line, exits with 1
        got, message = 1, str(error)
    assert got == code and said in message and len(message.splitlines()) == 1
    assert code == 1 or message.startswith("evaluate.py")


def main_ends_in_one_line(monkeypatch, capsys, *words):
    """Run evaluate.py as its own program does; return (exit code, the line)."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
    with pytest.raises(SystemExit) as end, one_line("evaluate.py", ""):
        evaluate.main()
    code, line = end.value.code, capsys.readouterr().err.strip()
    if isinstance(code, str):
        code, line = 1, code
    assert len(line.splitlines()) == 1 and "Traceback" not in line
    return code, line


def write_task(folder, rest):
    (folder / "odd.yaml").write_text(f"task: odd\noutput_type: multiple_choice\n{rest}",
                                     encoding="utf-8")


CHOICE = """
test_split: test
doc_to_text: q
doc_to_choice: [a, b]
doc_to_target: 0
"""


def script_data_set(folder):
    (folder / "set").mkdir()
    (folder / "set" / "set.py").write_text("import datasets\n", encoding="utf-8")
    write_task(folder, f"dataset_path: {folder}/set/set.py{CHOICE}")


def write_data(folder, text, split="test", choice=CHOICE):
    (folder / "docs.jsonl").write_text(text, encoding="utf-8")
    files = f"{{data_files: {{{split}: {folder}/docs.jsonl}}}}"
    write_task(folder, f"dataset_path: json\ndataset_kwargs: {files}{choice}")


def damaged_data(folder):
    write_data(folder, '{"q": "x"}\n{"q"')


def no_such_split(folder):
    write_data(folder, '{"q": "x"}\n', split="train")


def no_field(folder):
    write_data(folder, '{"question": "x"}\n',
               choice=CHOICE.replace("doc_to_text: q", "doc_to_text: '{{q.a}}'"))


@pytest.mark.parametrize("make, said", [
    (script_data_set, "odd: its data set cannot be loaded"),
    (damaged_data, "odd: its data set cannot be loaded"),
    (no_such_split, "odd: "), (no_field, "odd: ")])
def test_whatever_a_task_is_it_ends_in_one_line(make_run, tmp_path, monkeypatch, capsys, make,
                                                said):
    make(tmp_path)
    code, line = main_ends_in_one_line(
        monkeypatch, capsys, "score", make_run("binary"), "--tasks=odd",
        f"--include_path={tmp_path}", "--device=cpu")
    assert code == 1 and said in line, line


def no_config(folder):
    (folder / "config.json").unlink()


def empty_config(folder):
    (folder / "config.json").write_text("{}", encoding="utf-8")


def config_is_no_json(folder):
    (folder / "config.json").write_text("<html>", encoding="utf-8")


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def other_heads(folder):
    path = folder / "config.json"
    changed = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 9}
    path.write_text(json.dumps(read_json(path) | changed | {"intermediate_size": 50}),
                    encoding="utf-8")


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize("spoil_folder", (no_config, empty_config, config_is_no_json, cut_weights,
                                          other_heads, no_tokenizer))
@pytest.mark.parametrize("command", ("import", "score"))
def test_whatever_a_folder_is_it_ends_in_one_line(make_run, tmp_path, monkeypatch, capsys,
                                                  transformers, spoil_folder, command):
    folder, out = tmp_path / "hf", tmp_path / "run"
    huggingface.export_checkpoint(make_run("learned"), folder)
    spoil_folder(folder)
    capsys.readouterr()
    words = {"import": ["import", folder, out],
             "score": ["score", f"--hf={folder}", "--data=x", f"--out={tmp_path}/scores"]}
    code, line = main_ends_in_one_line(monkeypatch, capsys, *words[command])
    assert code == 1 and str(folder) in line, line
    assert not out.exists()


@pytest.mark.parametrize("error, code, said", [
    (KeyboardInterrupt(), 130, "interrupted"), (MemoryError(), 1, "not enough memory"),
    (OUT_OF_MEMORY[2], 1, "not enough memory"),
    (RuntimeError("Connection closed by peer [10.0.0.1]"), 1, "another process is lost"),
    (torch.distributed.DistNetworkError("x"), 1, "another process is lost"),
    (OSError(28, "No space left", "x"), 1, "No space"),
    (ValueError("two\nlines"), 1, "two lines")])
def test_what_ends_the_program_is_one_line(monkeypatch, capsys, error, code, said):
    def fail(*_):
        raise error
    monkeypatch.setitem(evaluate.COMMANDS, "sample", fail)
    got, line = main_ends_in_one_line(monkeypatch, capsys, "sample", "x", "--device=cpu")
    assert got == code and line.startswith("evaluate.py: ") and said in line


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    def fail(*_):
        raise RuntimeError("shape")
    monkeypatch.setitem(evaluate.COMMANDS, "sample", fail)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "sample", "x", "--device=cpu"])
    with pytest.raises(RuntimeError), one_line("evaluate.py", ""):
        evaluate.main()


def test_a_place_that_is_not_ours_is_told_as_such(make_run, tasks_dir, monkeypatch, capsys):
    """Not as a data set that is missing."""
    from lm_eval.tasks import TaskManager
    place = PermissionError(13, "Permission denied", "/nobody/cache")

    def load(self, names):
        raise RuntimeError("cannot be cached") from place

    monkeypatch.setattr(TaskManager, "load", load)
    code, line = main_ends_in_one_line(
        monkeypatch, capsys, "score", make_run("binary"), "--tasks=own_choice", "--device=cpu",
        f"--include_path={tasks_dir}")
    assert code == 1 and "/nobody/cache: Permission denied" in line and "set HF_HOME=DIR" in line
    assert "--data_dir" not in line


@pytest.mark.parametrize("name", ("org/name", "here"))
def test_a_cache_that_is_not_ours_is_no_wrong_model(tmp_path, transformers, monkeypatch, capsys,
                                                    name):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", "/nobody/cache")

    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    code, line = main_ends_in_one_line(monkeypatch, capsys, "score", f"--hf={name}", "--data=x",
                                       "--device=cpu")
    assert code == 1 and "/nobody/cache: Permission denied" in line
    assert ("set HF_HOME=DIR" in line) == (name == "org/name")


def test_a_run_that_cannot_be_written_is_scored_elsewhere(own_run, prepared, tmp_path, monkeypatch,
                                                          capsys):
    """It is known before the work, and --out has another place."""
    whole = tempfile.TemporaryFile

    def read_only(dir):
        if Path(dir) == own_run:
            raise OSError(30, "Read-only file system", str(dir))
        return whole(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    before = sorted(own_run.iterdir())
    for command in ("score", "probe"):
        code, line = main_ends_in_one_line(monkeypatch, capsys, command, own_run, "--device=cpu")
        assert code == 1 and "Read-only file system; give --out=DIR" in line
    call(monkeypatch, "score", own_run, "--device=cpu", f"--out={tmp_path}/scores")
    assert (tmp_path / "scores" / "own" / "heldout-00000007.json").exists()
    assert sorted(own_run.iterdir()) == before
    file = tmp_path / "file"
    file.touch()
    code, line = main_ends_in_one_line(monkeypatch, capsys, "score", own_run, f"--out={file}")
    assert code == 1 and "give --out=DIR" in line


def test_a_long_list_of_tasks_has_a_short_name(own_tasks, binary):
    names = [f"a_task_of_forty_two_letters_or_thereabouts_{i}" for i in range(8)]
    args = SimpleNamespace(suite=None, num_fewshot=None, limit=3, dtype="float32", max_length=None)
    found = set()
    for order in (names, names[:7], ["a", "b"], ["set/part:1"]):
        args.tasks = ",".join(order)
        found.add(scores.scores_name(args, {"step": 9}, T))
    assert len(found) == 4 and max(map(len, found)) < 150
    assert {"a+b_limit3-00000009.json", "set_part_1_limit3-00000009.json"} <= found


def test_paths_are_taken_as_the_shell_would(make_run, tmp_path, monkeypatch, capsys):
    """A ~ that the shell left, and a slash at the end."""
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(make_run("learned"), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, "export", "~/run/", "hf/")
    call(monkeypatch, "import", "~/hf/", "~/again/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hf", "run"]


def test_a_console_of_ascii_and_a_notebook_s_back_end(make_run, prepared, tmp_path, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    with one_line("evaluate.py", ""):
        call(monkeypatch, "sample", make_run("learned"), "--prompt", "naïve 日本", "--device=cpu",
             "--max_new_tokens=5")
    console.flush()
    assert console.buffer.getvalue().startswith(b"na?ve ??")
    directory = Path(shutil.copytree(make_run("learned", vocab_size=320), tmp_path / "日本"))
    code, out, error = run("probe", directory, f"--data={prepared}", "--device=cpu",
                           PYTHONIOENCODING="ascii",
                           MPLBACKEND="module://matplotlib_inline.backend_inline")
    assert code == 0 and (directory / "probe-00000007.png").exists(), error


def test_processes_that_were_told_different_things_stop(make_run, monkeypatch):
    """The same command is not the same where a shell expands it for each process, nor the same code
    on each machine."""
    theirs = {}

    def gather(out, own):
        out[:] = [own, {**own, **theirs} if isinstance(own, dict) else own]

    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in (("init_process_group", lambda _: None), ("is_initialized", lambda: True),
                        ("is_torchelastic_launched", lambda: True), ("get_rank", lambda: 0),
                        ("get_world_size", lambda: 2), ("all_gather_object", gather)):
        monkeypatch.setattr(torch.distributed, name, value)
    for name, value, said in (("limit", 1, "limit: 1 in 1, 2 in 1; start"),
                              ("data_dir", "a", "data_dir: None in 1, a in 1; start"),
                              ("code", "other", "code: .* in 1, other in 1; start"),
                              ("weights_sha256", "w", "weights_sha256: .* in 1, w in 1; start")):
        theirs.clear()
        theirs[name] = value
        with pytest.raises(ValueError, match=f"the 2 processes differ in {said}"):
            call(monkeypatch, "score", make_run("binary"), "--tasks=piqa", "--limit=2",
                 "--device=cpu")


def test_code_that_comes_with_a_model_is_run_only_if_told(make_reference, tmp_path, transformers,
                                                          monkeypatch, capsys):
    folder = Path(shutil.copytree(make_reference("llama"), tmp_path / "own_model"))
    (folder / "own.py").write_text("""
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
""", encoding="utf-8")
    changed = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": {
        "AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}}
    config = folder / "config.json"
    config.write_text(json.dumps(read_json(config) | changed), encoding="utf-8")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "m"))
    with pytest.raises(ValueError, match="needs --trust_remote_code"):
        open_reference(folder)
    candidate = open_reference(folder, trust_remote_code=True)
    assert "it runs code that came with it" in candidate.note
    assert "it runs code that came with it" in capsys.readouterr().err
    pairs = random_pairs(3)[:9]
    assert_close(score(candidate, pairs), score(open_reference(make_reference("llama")), pairs))


@pytest.mark.parametrize("words", (["sample", "RUN"], ["probe", "RUN"], ["export", "RUN", "HF"],
                                   ["import", "HF", "OUT"]))
def test_only_score_shares_its_work_out(tmp_path, monkeypatch, words):
    """Two processes would write the same files, or print everything twice."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=f"{words[0]} is the work of one process: leave torchrun"):
        call(monkeypatch, *words)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ElsewhereError):
        call(monkeypatch, *words)
    assert not list(tmp_path.iterdir())


def test_utf16_ids(make_run, tmp_path, monkeypatch, capsys):
    """A run on UTF-16 code units samples; no tokenizer of Hugging Face's has these ids, so it has
    no export."""
    directory = tmp_path / "run"
    shutil.copytree(make_run("binary", vocab_size=65_536, n_embd=64), directory)
    (directory / "tokenizer.json").write_bytes(UTF16_JSON)
    call(monkeypatch, "sample", directory, "--prompt", "aé🙂", "--max_new_tokens=3", "--device=cpu")
    assert capsys.readouterr().out.startswith("aé🙂")
    with pytest.raises(ValueError, match="UTF-16 code units"):
        huggingface.export_checkpoint(directory, tmp_path / "hf")


def test_reference_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        references.open_reference("x", "cpu", "float32")


@pytest.mark.parametrize("command", ("score", "sample", "probe", "export"))
def test_a_tokenizer_that_is_not_the_run_s_is_refused(make_run, prepared, tmp_path, monkeypatch,
                                                      command):
    """It is known by its sha256, which the checkpoint has; another of as many ids would do."""
    run = Path(shutil.copytree(make_run("learned", vocab_size=320), tmp_path / "run"))
    path, tokenizer = run / "step-00000007.pt", run / "tokenizer.json"
    facts = {"tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest()}
    torch.save(torch.load(path, weights_only=True) | facts, path)
    tokenizer.write_text(json.dumps(read_json(tokenizer), indent=7), encoding="utf-8")
    words = {"score": ["score", run, f"--data={prepared}"], "sample": ["sample", run],
             "probe": ["probe", run, f"--data={prepared}"],
             "export": ["export", run, tmp_path / "hf"]}
    with pytest.raises(ValueError, match="tokenizer.json: its sha256 is not the check"):
        call(monkeypatch, *words[command])


def test_tokenizer_larger_than_the_model_is_refused(make_run):
    with pytest.raises(ValueError, match="320 ids, but the model 300"):
        open_run(make_run("learned", vocab_size=300))


# --- held-out loss

@pytest.fixture(scope="session")
def prepared(tmp_path_factory, tokenizer_file):
    folder = tmp_path_factory.mktemp("data")
    docs = [{"id": str(i), "text": TEXTS[i % 3] * (1 + i % 7) + str(i)} for i in range(60)]
    write_lines(folder / "docs.jsonl", docs)
    subprocess.run([sys.executable, "prepare.py", f"--source={folder}/docs.jsonl",
                    f"--tokenizer={tokenizer_file}", f"--out={folder}/ready",
                    "--val_fraction=0.3"], check=True, cwd=ROOT, capture_output=True)
    return folder / "ready"


def test_heldout_equals_direct_computation(binary, prepared):
    result = evaluate.score_heldout(Scorer(binary), prepared)
    nats, targets = [], []
    for shard in open_shards(prepared, "val"):
        tokens, starts = shard.map()
        for start, end in zip(starts[:-1], starts[1:]):
            ids, total = tokens[start:end].astype(np.int64).tolist(), 0.0
            for at in range(0, len(ids) - 1, T):
                total -= direct(binary, ids[at:at + 1], ids[at + 1:at + T + 1])[0]
            nats.append(total)
            targets.append(len(ids) - 1)
    documents = result["documents"]
    assert [d["targets"] for d in documents] == targets
    assert len(targets) > 10 and max(targets) > T
    assert [d["nats"] for d in documents] == pytest.approx(nats, rel=1e-5)
    loss = sum(nats) / sum(targets)
    bits_per_byte = sum(nats) / math.log(2) / sum(d["bytes"] for d in documents)
    assert result["loss"] == pytest.approx(loss, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(bits_per_byte, rel=1e-6)
    # The standard error against a bootstrap over documents.
    r, n = np.random.default_rng(0), len(nats)
    draws = r.integers(n, size=(4000, n))
    losses = np.array(nats)[draws].sum(1) / np.array(targets)[draws].sum(1)
    assert result["loss_stderr"] == pytest.approx(losses.std(), rel=0.15)


def test_heldout_from_the_command_line(make_run, prepared, monkeypatch, capsys):
    """Also where a batch system has left the names that torchrun uses."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    directory = make_run("learned", vocab_size=320, n_embd=36)
    call(monkeypatch, "score", directory, f"--data={prepared}", "--device=cpu")
    assert "bits/byte" in capsys.readouterr().out
    result = json.loads((directory / "heldout-00000007.json").read_text(encoding="utf-8"))
    assert result["loss"] > 0


def heldout(monkeypatch, directory, data, *flags):
    """Score held-out documents; return the names of the run's scores files."""
    call(monkeypatch, "score", directory, f"--data={data}", "--device=cpu", *flags)
    return sorted(path.name for path in directory.glob("heldout-*.json"))


@pytest.fixture
def own_run(make_run, prepared, tmp_path):
    """A run that says that it was trained on `prepared`."""
    run = Path(shutil.copytree(make_run("learned", vocab_size=320), tmp_path / "own"))
    path = run / "step-00000007.pt"
    state = torch.load(path, weights_only=True)
    fingerprint = data_fingerprint(read_meta(prepared))
    torch.save(state | {"data": str(prepared), "config": {"data_fingerprint": fingerprint}}, path)
    return run


def test_unlike_scores_never_share_a_file(own_run, prepared, tmp_path, monkeypatch, capsys):
    """Named by data, dtype and length where they are not the run's own; each says what it is of."""
    plain = heldout(monkeypatch, own_run, prepared)
    assert plain == ["heldout-00000007.json"]
    first = (own_run / plain[0]).read_bytes()
    assert len(heldout(monkeypatch, own_run, prepared, "--dtype=bfloat16")) == 2
    assert (own_run / "heldout-00000007-bfloat16.json").exists()
    assert len(heldout(monkeypatch, own_run, prepared, f"--max_length={T}")) == 2  # as it would be
    assert len(heldout(monkeypatch, own_run, prepared, "--max_length=32")) == 3
    assert (own_run / "heldout-00000007-T32.json").exists()
    other = Path(shutil.copytree(prepared, tmp_path / "other"))
    meta = read_json(other / "meta.json")
    meta["shards"][0]["train"]["bin_sha256"] = "another"
    (other / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    names = heldout(monkeypatch, own_run, other)
    assert len(names) == 4 and heldout(monkeypatch, own_run, other) == names  # the like of it
    assert sum("-data" in name for name in names) == 1
    assert (own_run / plain[0]).read_bytes() == first
    said = [read_json(own_run / name) for name in names]
    facts = [(each["data_sha256"], each["dtype"], each["max_length"]) for each in said]
    assert len(set(facts)) == 4
    assert len({each["weights_sha256"] for each in said}) == 2  # float32 and bfloat16
    capsys.readouterr()


def test_scores_of_two_models_with_one_name_get_two_files(make_run, prepared, tmp_path,
                                                          monkeypatch, capsys):
    for parent, input in (("a", "learned"), ("b", "binary")):
        shutil.copytree(make_run(input, vocab_size=320), tmp_path / parent / "model")
    runs = tmp_path / "a" / "model", tmp_path / "b" / "model"
    for _ in range(2):
        call(monkeypatch, "score", *runs, f"--data={prepared}", "--device=cpu",
             f"--out={tmp_path}/scores")
        files = list((tmp_path / "scores" / "model").glob("heldout-*.json"))
        assert len(files) == 2
    assert {read_json(file)["checkpoint"] for file in files} == set(map(str, runs))
    for run in runs:
        assert not list(run.glob("heldout*"))
    capsys.readouterr()


@pytest.mark.parametrize("command", ("score", "probe", "score --hf"))
def test_data_of_another_tokenizer_are_refused(make_run, prepared, tmp_path, monkeypatch, command,
                                               transformers):
    """Also of as many ids: what is compared is which id stands for which text."""
    other = Path(shutil.copytree(prepared, tmp_path / "other"))
    tokenizer = read_json(other / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    text = json.dumps(tokenizer)
    (other / "tokenizer.json").write_text(text, encoding="utf-8")
    meta = read_json(other / "meta.json")
    run = make_run("learned", vocab_size=320)
    words = [*command.split(), run, f"--data={other}", "--device=cpu"]
    if command == "score --hf":
        huggingface.export_checkpoint(run, tmp_path / "hf")
        words = ["score", f"--hf={tmp_path}/hf", f"--data={other}", "--device=cpu"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="sha256 is not the one in meta.json"):
        call(monkeypatch, *words)
    meta["tokenizer"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (other / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(ValueError, match="another tokenizer"):
        call(monkeypatch, *words)
    if command == "score --hf":
        call(monkeypatch, *words[:2], f"--data={prepared}", "--device=cpu")
        assert (tmp_path / "out" / "hf" / "heldout.json").exists()


def spoil(run, value):
    """Put a value into one place of the head of a run's checkpoint."""
    path = next(run.glob("step-*.pt"))
    state = torch.load(path, weights_only=True)
    state["model"]["lm_head.weight"][3, 5] = value
    torch.save(state, path)


@pytest.mark.parametrize("command", (
    ["score", "RUN", "--data=DATA"], ["score", "RUN", "--tasks=own_choice", "--include_path=TASKS"],
    ["probe", "RUN", "--data=DATA"], ["sample", "RUN"], ["export", "RUN", "OUT"]))
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_weights_that_are_not_finite_stop(make_run, prepared, tasks_dir, tmp_path, monkeypatch,
                                          command, value):
    run = Path(shutil.copytree(make_run("learned", vocab_size=320), tmp_path / "run"))
    spoil(run, value)
    places = {"RUN": run, "DATA": prepared, "TASKS": tasks_dir, "OUT": tmp_path / "hf"}
    words = []
    for word in command:
        for name, place in places.items():
            word = word.replace(name, str(place))
        words.append(word)
    with pytest.raises(ValueError, match="lm_head.weight .* not finite"):
        call(monkeypatch, *words)
    assert not list(run.glob("*.json.tmp")) and not list(run.glob("heldout*"))
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_a_score_that_is_not_finite_stops(value):
    def forward(idx, select=None, **_):
        logits = torch.zeros(len(select[0]), 256)
        logits[:, 7] = value
        return logits
    with pytest.raises(ValueError, match="stub: a log-likelihood is nan"):
        score(stub(forward), arrays([([1], [7])]))


def test_an_extreme_score_loses_nothing_else(own_tasks, tmp_path):
    """exp() of 710 nats a word overflows; the other tasks and metrics are kept."""
    def forward(idx, select=None, **_):
        return torch.nn.functional.one_hot(torch.zeros_like(select[0]), 256).float() * 3000
    tasks, _ = benchmarks.run_tasks(harness_lm(stub(forward, context=64, encode=lambda texts, _: [
        [ord(c) % 255 + 1 for c in text] for text in texts])), own_tasks("own_page", "own_choice"))
    assert tasks["own_page"]["metrics"]["word_perplexity"] == math.inf
    assert tasks["own_page"]["metrics"]["bits_per_byte"] > 1000
    assert "acc_stderr" in tasks["own_choice"]["metrics"]
    scores_file = tmp_path / "scores.json"
    scores.write(scores_file, {"tasks": tasks})
    assert read_json(scores_file)["tasks"]["own_page"]["metrics"]["word_perplexity"] is None


class NoFloat64(TorchDispatchMode):
    """Refuses float64 tensors on the meta device, as Apple's GPUs refuse theirs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                assert tensor.dtype != torch.float64, func
        return result


@pytest.mark.parametrize("input", ("gf2", "learned"))
def test_no_float64_on_the_model_s_device(input, monkeypatch):
    """The forward pass, a tree's, the loss and its gradient."""
    for module in (kernels, model):
        monkeypatch.setattr(module, "NO_FLOAT64", ("meta",))
    to = torch.Tensor.to

    def bring(tensor, *args, **options):  # a meta tensor has nothing to bring
        if tensor.device.type == "meta" and args == (torch.device("cpu"),):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return to(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", bring)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # meta knows none
    decoder = Decoder(ModelConfig(input=input, **SIZES)).to("meta")
    idx = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    mask = scorer.tree_mask(idx, idx, 0)
    with NoFloat64():
        logits = decoder(idx, positions=idx, mask=mask, select=(idx[0], idx[0]))[0]
        loss = decoder(idx, idx)[1]
        loss.backward()
    assert logits.shape == (9, 512) and loss.dtype == torch.float32


# --- sampling

def test_sampling(make_run, monkeypatch, capsys):
    """Several prompts, seeds: the same seed gives the same text, the next sample another."""
    def sample(*arguments):
        call(monkeypatch, "sample", make_run("binary"), "--max_new_tokens=30", "--device=cpu",
             *arguments)
        return capsys.readouterr().out

    two_prompts, line = ("--prompt", "def", "The quick"), "-" * 80
    greedy = sample("--temperature=0", *two_prompts)
    assert greedy == sample("--temperature=0", *two_prompts) and greedy.count(line) == 2
    assert greedy.startswith("def") and "\nThe quick" in greedy
    assert sample("--temperature=1e-8", *two_prompts) == greedy
    first, second, _ = sample("--num_samples=2", "--seed=5", "--prompt", "def").split(line + "\n")
    next_seed, _ = sample("--seed=6", "--prompt", "def").split(line + "\n")
    assert first != second == next_seed


def test_ids_without_a_token_are_never_sampled(make_run):
    """A head of 512 rows, a tokenizer of 320 ids."""
    candidate, ids = open_run(make_run("binary")), []
    for seed in range(8):
        ids += candidate.generate([5], 60, 5.0, None, torch.Generator().manual_seed(seed))
    assert len(ids) > 100 and max(ids) < candidate.n_ids == 320 and candidate.decode(ids)


@pytest.mark.parametrize("pieces", ((7,), (3, 4), (1, 6)))
def test_cached_decoding_equals_a_full_forward(make_run, pieces):
    """Also a prompt that is read in two pieces."""
    model, _ = load_model(make_run("gf2"))
    ids = torch.randint(0, 512, (2, 27), generator=torch.Generator().manual_seed(0))
    cache, logits, at = model.new_cache(), [], 0
    with torch.no_grad():
        for n in (*pieces, *[1] * 20):
            logits.append(model(ids[:, at:at + n], cache=cache)[0])
            at += n
        torch.testing.assert_close(torch.cat(logits, 1), model(ids)[0], atol=1e-4, rtol=0)


def test_positions_mask_and_select_change_nothing_by_themselves(make_run):
    model, _ = load_model(make_run("binary"))
    ids = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(9).expand(2, 9)
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    rows, columns = torch.tensor([1, 0, 1]), torch.tensor([8, 2, 0])
    with torch.no_grad():
        expected = model(ids)[0]
        given = model(ids, positions=positions, mask=mask)[0]
        selected = model(ids, select=(rows, columns))[0]
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(selected, expected[rows, columns], atol=1e-5, rtol=1e-5)


# --- Hugging Face

FIXED_INPUTS = ("binary", "gf2", "random", "sinusoid")


@pytest.mark.parametrize("input, fields", [
    ("learned", {}), ("tied", {}), ("lowdim", {}), ("lowdim", {"lift": "interleave"}),
    ("binary", {}), ("binary", {"code_values": "pm1", "code_scale": "matched"}), ("gf2", {}),
    ("gf2", {"code_offset": "1f"}), ("random", {}), ("sinusoid", {"lift": "interleave"})])
def test_export_and_import_give_the_checkpoint_back(make_run, tmp_path, input, fields):
    directory = make_run(input, **fields)
    huggingface.export_checkpoint(directory, tmp_path / "hf")
    path = huggingface.import_folder(tmp_path / "hf", tmp_path / "run")
    (model, _), (back, restored) = load_model(directory), load_model(path)
    assert back.config == model.config
    assert restored["step"] == 7 and restored["eot_id"] == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, back.state_dict()[name])
    tokenizer = (directory / "tokenizer.json").read_bytes()
    assert (path.parent / "tokenizer.json").read_bytes() == tokenizer
    nanobit = read_json(tmp_path / "hf" / "config.json")["nanobit"]
    assert nanobit["input"] == input
    card = (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    assert ("fixed, not trained" in card) == (input in FIXED_INPUTS)
    if input == "gf2":
        assert nanobit["matrix"] == model.model.embed_tokens.matrix.tolist()
        assert nanobit["lift"] == "tile"
    with pytest.raises(FileExistsError):
        huggingface.import_folder(tmp_path / "hf", tmp_path / "run")


@pytest.mark.parametrize("input", sorted(set(INPUTS) - set(huggingface.READ_BACK)))
def test_what_a_table_does_not_tell_is_imported_as_a_learned_one(make_run, tmp_path, capsys, input):
    """The same logits, one line that says so, and a card that does not call the table trained."""
    directory = make_run(input)
    huggingface.export_checkpoint(directory, tmp_path / "hf")
    assert f"`{input}`" in (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    capsys.readouterr()
    path = huggingface.import_folder(tmp_path / "hf", tmp_path / "run")
    assert f"its {input} input cannot be had back" in capsys.readouterr().out
    (model, _), (back, _) = load_model(directory), load_model(path)
    assert back.config == ModelConfig(input="learned", **SIZES)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids)[0], back(ids)[0])


def test_exported_input_matrix_is_the_tiled_codebook(make_run, tmp_path):
    from safetensors.torch import load_file
    huggingface.export_checkpoint(make_run("gf2"), tmp_path / "hf", "bfloat16")
    weight = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    codebook = load_model(make_run("gf2"))[0].model.embed_tokens.codebook
    assert weight.dtype == torch.bfloat16 and weight.shape == (512, 36)
    for copy in weight.split(9, dim=1):
        assert torch.equal(copy.to(torch.uint8), codebook)


@pytest.mark.parametrize("input", ("binary", "gf2"))
def test_import_refuses_a_matrix_that_is_not_the_code(make_run, tmp_path, input):
    from safetensors.torch import load_file, save_file
    huggingface.export_checkpoint(make_run(input), tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["model.embed_tokens.weight"][3, 5] += 1e-3
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ValueError, match=f"is not the {input} code"):
        huggingface.import_folder(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change, said", [
    ({"model_type": "gpt2"}, "model_type gpt2"), ({"attention_bias": True}, "attention_bias True"),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"num_hidden_layers": 3}, "Missing key"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_type llama3"),
    ({"head_dim": 64}, "head_dim 64 .expected 18")])
def test_import_refuses_what_the_decoder_is_not(make_run, tmp_path, change, said):
    huggingface.export_checkpoint(make_run("learned"), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(read_json(path) | change), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        huggingface.import_folder(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def transformers():
    module = pytest.importorskip("transformers", reason="transformers is optional")
    module.logging.set_verbosity_error()
    return module


@pytest.mark.parametrize("input", ("learned", "binary", "gf2"))
def test_exported_folder_loads_in_transformers(make_run, tmp_path, transformers, input):
    huggingface.export_checkpoint(make_run(input), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ours, _ = load_model(make_run(input))
    ids = torch.randint(0, 512, (2, T), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids)[0], atol=1e-4, rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "The quick brown fox  42"
    assert tokenizer.bos_token_id == 0 and tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.fixture
def hf_backend(transformers, monkeypatch):
    """Return a function that opens a folder in the harness's own hf backend. On one CPU it uses
    nothing of accelerate's but its device."""
    if importlib.util.find_spec("accelerate") is None:
        here = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
        accelerate = SimpleNamespace(
            Accelerator=lambda **_: here, InitProcessGroupKwargs=SimpleNamespace,
            find_executable_batch_size=None, utils=SimpleNamespace(get_max_memory=None))
        monkeypatch.setitem(sys.modules, "accelerate", accelerate)
        monkeypatch.setitem(sys.modules, "accelerate.utils", accelerate.utils)
    from lm_eval.models.huggingface import HFLM

    def open_folder(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=T)

    return open_folder


def test_scores_through_the_harness_s_backend_equal_ours(make_run, tmp_path, hf_backend):
    """Our checkpoint, the exported folder as a reference model, and the harness's own hf backend,
    on one set of requests."""
    directory, folder = make_run("gf2"), str(tmp_path / "hf")
    huggingface.export_checkpoint(directory, folder)
    hf = hf_backend(folder)
    reference = references.open_reference(folder, "cpu", "float32")
    lms = [harness_lm(open_run(directory)), harness_lm(reference),
           harness_lm(reference, share=False)]
    pairs = [*PAIRS, ("", "Hello there"), ("word " * 80, "and more"),
             ("The quick brown fox", " jumps"), ("The quick brown fox", " jumps over")]
    requests = [request(*pair) for pair in pairs]
    expected = hf.loglikelihood(requests, disable_tqdm=True)
    pages = [request(text * n, kind="loglikelihood_rolling") for text in TEXTS for n in (1, 9)]
    rolling = hf.loglikelihood_rolling(pages, disable_tqdm=True)
    options = {"until": ["\n"], "max_gen_toks": 8}
    stop = [request(text, options, kind="generate_until") for text in TEXTS]
    texts = hf.generate_until(stop, disable_tqdm=True)
    for lm in lms:
        assert lm.max_length == T and lm.prefix_token_id == hf.prefix_token_id
        assert_close(lm.loglikelihood(requests), expected, 1e-3)
        assert lm.loglikelihood_rolling(pages) == pytest.approx(rolling, abs=1e-2)
        assert_close(lm.scorer.score(random_pairs()), lms[0].scorer.score(random_pairs()), 1e-3)
    assert lms[1].generate_until(stop) == texts


def test_a_tokenizer_s_bos_is_kept_for_references(make_run, tmp_path, transformers):
    """A reference model gets what its own tokenizer adds in front, ours gets nothing; an empty
    context gets the prefix once."""
    from tokenizers.processors import TemplateProcessing
    folder = tmp_path / "hf"
    huggingface.export_checkpoint(make_run("learned"), folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A",
                                                  special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    ours = harness_lm(open_run(make_run("learned")))
    theirs = harness_lm(references.open_reference(str(folder), "cpu", "float32"))
    plain = ours.encode_pairs([("The quick", " brown")])[0][0].tolist()
    for lm, front in ((ours, []), (theirs, [0])):
        pairs = lm.encode_pairs([("The quick", " brown"), ("", "The")])
        (context, continuation), (empty, first) = pairs
        assert context.tolist()[:3] == (front + plain)[:3] and 0 not in continuation
        assert empty.tolist() == [0] and 0 not in first


@pytest.mark.parametrize("tied", (True, False))
def test_import_of_a_llama_with_shared_heads(tokenizer_file, tmp_path, transformers, tied):
    """Grouped key/value heads repeated, and a tied table written out, change no logit; eps and
    theta are its own."""
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=T, rms_norm_eps=1e-3,
        rope_theta=500.0, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    shutil.copy(tokenizer_file, tmp_path / "hf" / "tokenizer.json")
    ours, state = load_model(huggingface.import_folder(tmp_path / "hf", tmp_path / "run"))
    assert ours.config.input == "learned"
    assert ours.config.norm_eps == 1e-3 and ours.config.rope_theta == 500
    ids = torch.randint(0, 320, (2, T), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, atol=1e-4, rtol=0)


# --- reference models of every architecture

HF_SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": T, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# Architecture, its fields, and whether it may share: it obeys a 4-D mask and given positions.
ARCHITECTURES = {
    "llama": ("Llama", {}, True),
    "mistral": ("Mistral", {"sliding_window": None}, True),
    "gpt2": ("GPT2", {"n_positions": T, "n_embd": 32, "n_layer": 2, "n_head": 4}, True),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 4096}, True),
    "gpt_neo": ("GPTNeo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2,
                           "num_heads": 4}, True),
    "a short window": ("Mistral", {"sliding_window": 8}, False),
    "a longer window": ("Mistral", {"sliding_window": 40}, False),
    "windows in some layers": ("Gemma3Text", {"sliding_window": 40, "query_pre_attn_scalar": 8,
                                              "layer_types": ["sliding_attention",
                                                              "full_attention"]}, False),
    "a window of code models": ("Starcoder2", {"sliding_window": 40}, False),
    "a state": ("Mamba", {"state_size": 4}, False),
    "other names, biased scores": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2,
                                           "max_seq_len": T}, False),
    "no position ids": ("Bloom", {"n_head": 4, "n_layer": 2}, False)}


@pytest.fixture(scope="session")
def make_reference(tokenizer_file, tmp_path_factory):
    """Return a function that writes a random transformers model as a folder, and returns it; one
    for each set of arguments."""
    transformers = pytest.importorskip("transformers", reason="transformers is optional")
    transformers.logging.set_verbosity_error()
    made = {}

    def make(name, **fields):
        key = json.dumps([name, fields])
        if key not in made:
            kind, own, _ = ARCHITECTURES[name]
            config = getattr(transformers, f"{kind}Config")(**{**HF_SIZES, **own, **fields})
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():  # larger than at the start, so that a wrong mask shows
                for p in model.parameters():
                    p.mul_(6 if p.dim() == 2 else 1)
            made[key] = tmp_path_factory.mktemp("reference") / "model"
            model.save_pretrained(made[key])
            shutil.copy(tokenizer_file, made[key] / "tokenizer.json")
            (made[key] / "tokenizer_config.json").write_text(json.dumps({
                "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
                "eos_token": "<|endoftext|>"}), encoding="utf-8")
        return made[key]

    return make


def open_reference(folder, **options):
    return references.open_reference(str(folder), "cpu", "float32", **options)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_references_score_as_their_plain_pass(make_reference, transformers, name, capsys):
    """Packed rows and cached prefixes are for models that obey their mask and positions; the others
    run every input whole, which is said in one line."""
    folder, shares = make_reference(name), ARCHITECTURES[name][2]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def forward(idx, select):
        return model(idx).logits[select]

    plain = dataclasses.replace(stub(None), forward=forward)
    context = np.random.default_rng(9).integers(0, 320, 55).tolist()  # longer than any window here
    pairs = random_pairs(8)[:-3] + arrays([(context, [i, 7, i]) for i in range(5)])
    expected = [direct(plain, a.tolist(), b.tolist()) for a, b in pairs]
    assert len({round(nats, 2) for nats, _ in expected}) > 20  # the model tells inputs apart
    candidate = open_reference(folder)
    said = capsys.readouterr().err
    for share in (True, False):
        assert_close(score(candidate, pairs, share=share, max_length=T), expected, 1e-3)
    assert Scorer(candidate, max_length=T).share == shares
    assert (said.count("every input is run whole") == 1) != shares
    assert ("every input is run whole" in candidate.note) != shares


@pytest.mark.parametrize("takes", (True, False))
def test_a_model_that_makes_all_logits_is_read_at_the_right_places(make_reference, monkeypatch,
                                                                   transformers, takes):
    """One that takes logits_to_keep and ignores it, and one that does not know it."""
    folder, pairs = make_reference("llama"), random_pairs(9)[:20]
    expected = score(open_reference(folder), pairs)
    kept = transformers.LlamaForCausalLM.forward

    def ignores(self, *args, logits_to_keep=0, **options):
        return kept(self, *args, **options)

    def does_not_know(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None,
                      use_cache=None):
        return kept(self, input_ids, attention_mask=attention_mask, position_ids=position_ids,
                    past_key_values=past_key_values, use_cache=use_cache)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward",
                        ignores if takes else does_not_know)
    assert_close(score(open_reference(folder), pairs), expected)
    assert_close(score(open_reference(folder), pairs, share=False), expected)


def test_generation_of_references_sees_its_whole_prompt(llama_with_bos):
    """Its bos too, which generate() would take for padding."""
    candidate = open_reference(llama_with_bos)
    for prompt in ([320, 5, 9, 12], [7, 320, 320, 3]):
        assert list(candidate.generate(prompt, 5, 0.0, None)) == greedy_ids(candidate, prompt, 5)
    drawn = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        drawn.append(list(candidate.generate([3, 4], 20, 1.0, None, generator)))
    assert drawn[0] == drawn[1] != drawn[2]


def generation(text, **options):
    return request(text, options, kind="generate_until")


def test_generation_arguments_are_taken_whole_or_refused(binary):
    lm = harness_lm(binary)
    greedy, = lm.generate_until([generation("def", until=["zzzz"], max_gen_toks=9)])
    # An empty stop string stops nothing, as the harness has it.
    assert lm.generate_until([generation("def", until=["", "zzzz"], max_gen_toks=9)]) == [greedy]
    assert len(greedy) > 3
    neutral = {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "num_beams": 1}
    assert lm.generate_until([generation("def", max_gen_toks=9, **neutral)]) == [greedy]
    sampled = [lm.generate_until([generation("def", do_sample=True, max_gen_toks=9)])
               for _ in range(2)]
    assert sampled[0] == sampled[1] != [greedy]  # at temperature 1, and repeatable
    for options, said in (({"num_beams": 4}, "num_beams"), ({"repetition_penalty": 1.3}, "repet"),
                          ({"do_sample": True, "top_p": 0.9}, "top_p"),
                          ({"do_sample": True, "temperature": 0.0}, "temperature"),
                          ({"max_gen_toks": T}, "max_gen_toks"), ({"max_gen_toks": 0}, "max_gen")):
        with pytest.raises(ValueError, match=f"task: .*{said}"):
            lm.generate_until([generation("def", **{"max_gen_toks": 9, **options})])


@pytest.fixture(scope="module")
def llama_with_bos(tokenizer_file, tmp_path_factory):
    """A folder of a Llama whose bos and eos differ, with a tokenizer that puts the bos in front."""
    transformers = pytest.importorskip("transformers", reason="transformers is optional")
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    tokenizer, folder = load_tokenizer(tokenizer_file), tmp_path_factory.mktemp("llama") / "hf"
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>",
                                                                              special=True)])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 320)])
    config = transformers.LlamaConfig(**{**HF_SIZES, "vocab_size": 322, "head_dim": None,
                                         "bos_token_id": 320, "eos_token_id": 321})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6 if p.dim() == 2 else 1)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}),
        encoding="utf-8")
    return folder


def test_bos_and_eos_stay_apart_through_import_and_export(llama_with_bos, tmp_path, transformers):
    """The one begins, as the tokenizer's template has it, the other stops."""
    run = huggingface.import_folder(llama_with_bos, tmp_path / "run").parent
    huggingface.export_checkpoint(run, tmp_path / "again")
    again = huggingface.import_folder(tmp_path / "again", tmp_path / "run2").parent
    theirs = harness_lm(open_reference(llama_with_bos))
    for lm in (harness_lm(open_run(run)), harness_lm(open_reference(tmp_path / "again")),
               harness_lm(open_run(again))):
        assert lm.prefix_token_id == 320 == theirs.prefix_token_id
        for ours, expected in zip(lm.encode_pairs(PAIRS), theirs.encode_pairs(PAIRS)):
            assert [part.tolist() for part in ours] == [part.tolist() for part in expected]
    assert load_model(run)[1]["eot_id"] == 321  # what stops generation
    config = read_json(tmp_path / "again" / "config.json")
    assert (config["bos_token_id"], config["eos_token_id"]) == (320, 321)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_export_drops_a_template_that_the_model_was_not_trained_with(make_run, tmp_path,
                                                                     transformers):
    from tokenizers.processors import TemplateProcessing
    run = Path(shutil.copytree(make_run("learned"), tmp_path / "run"))
    tokenizer = load_tokenizer(run / "tokenizer.json")
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A",
                                                  special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(run / "tokenizer.json"))
    huggingface.export_checkpoint(run, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs("The quick")["input_ids"] == open_run(run).encode(["The quick"], True)[0]


@pytest.mark.parametrize("input", ("binary", "gf2", "learned"))
def test_an_imported_checkpoint_has_a_digest(make_run, tmp_path, input):
    """One flipped bit of its codebook would let two ids share a code."""
    huggingface.export_checkpoint(make_run(input), tmp_path / "hf")
    path = huggingface.import_folder(tmp_path / "hf", tmp_path / "run")
    load_model(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="sha256"):
        load_model(path)


REAL = os.environ.get("REFERENCE_MODEL")  # what ../shared/eval/make_reference_model.py builds


@needs_shared
@pytest.mark.skipif(not REAL, reason="REFERENCE_MODEL does not name the real model's folder")
@pytest.mark.parametrize("kind", ("imported", "reference"))
def test_real_weights_equal_the_reference(tmp_path, kind, request):
    """Real SmolLM2-135M-Instruct weights against what the harness's own backend gave: 20 documents
    of two tasks."""
    if kind == "imported":
        candidate = open_run(huggingface.import_folder(REAL, tmp_path))
    else:
        request.getfixturevalue("transformers")
        candidate = references.open_reference(REAL, "cpu", "float32")
    reference = read_json(REFERENCE)["tasks"]
    loaded = benchmarks.load_tasks(["winogrande", "commonsense_qa"], 0, EVAL / "data")
    tasks, _ = benchmarks.run_tasks(harness_lm(candidate), loaded, limit=20)
    for name, task in tasks.items():
        expected = [row[4] for row in reference[name]["docs"][name][:20]]
        np.testing.assert_allclose(np.array(task["docs"]["responses"], float),
                                   np.array(expected, float), atol=1e-3)
