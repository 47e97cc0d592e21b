"""The ids are exactly those of tokenizers, whichever engine makes them; and the tokenizers."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from preparing import (
    ROOT,
    SMOLLM2,
    assert_is_line,
    contents,
    decoded,
    documents,
    end_of,
    entries,
    needs_shared,
    parquet,
    run,
    texts_of,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from machinery import twin
from machinery.shards import open_shards, read_meta
from machinery.tokenizer import EOT, load_tokenizer, token_bytes

HARD = [
    "", " ", "  ", "a", "hello !", "  two", "a\r\nb", "tab\tend ", "0012345678901", "e\u0301",
    "\ufeffstart", "don't I'LL 'tis we've", "The marker <|endoftext|> ends a page.",
    "<|im_start|>user\n<|endoftext|><|endoftext|>", "  1", " 1", "   1 2", "\n\n1", "x  \n 1\t",
    "\u00a0\u00a0nbsp \u00a0x", "\x00NUL\x00\x01\x02", "".join(map(chr, range(32))) * 3, "''\x06's",
    "\x04", "a\x14b\x1d\x1dc", "\x7f\x80\x9f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 "
    "\U0001f1e9\U0001f1ea", "漢字かな交じり文、全角　空白。", "한국어 조선말",
    "العربية עברית हिन्दी ไทย",
    "Z\u0351\u036b\u0343\u036a\u0302a\u0363\u0349\u0348l\u0348\u034eg\u0347o",
    "\u2160\u2167\u216f \u00bd\u00b2\u2460 \u0660\u0661\u0966", " " * 999,
    "x" + "\n" * 300 + " " * 300 + "1", "\r\n" * 200, "1" * 500, "a" * 3000, "^" * 3000,
    "ab " * 900, "\u2028\u2029\u0085\u180e\u200b\u3000",
    "\U00040000\U000bffff \U000f0000\U0010ffff",
    "\ufffd\ufffe\uffff\ufdd0", "    def f(x):\n        return x  # it's\n",
]
PIECES = [
    " ", "  ", "\n", "\r\n", "\t", "\u00a0", "'s", "'ll", "'", "1", "42", "a", "The", "é",
    "e\u0301", "漢", "🙂", "\u200d", "\x06", "\x00", "<|endoftext|>", "_", "...", "²", "Ⅷ", "٣",
    "\u3000", "\u0085",
]
LONG = [
    "a" * 200_000, "^" * 200_000, " " * 1_000_000, "\n" * 200_000, "1" * 100_000,
    "".join(random.Random(5).choices("abcdefghijklmnopqrstuvwxyz", k=100_000)),
]


def random_texts(n, seed):
    """Joins of what is hard: spaces, digits, letters, marks, symbols, controls, every plane."""
    draw = random.Random(seed)

    def piece():
        if draw.random() < 0.7:
            return draw.choice(PIECES)
        planes = draw.randrange(0x250), draw.randrange(0xd800), draw.randrange(0xe000, 0x110000)
        return chr(draw.choice(planes))

    return ["".join(piece() for _ in range(draw.randint(1, 30))) for _ in range(n)]


def fast_encoders(tokenizer):
    """Yield the encoders by the fast engines: splintr where it is installed, and tiktoken."""
    if twin.FAST == "splintr":
        yield twin.make_encoder(tokenizer, twin.find_twin(tokenizer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "FAST", "tiktoken")
        yield twin.make_encoder(tokenizer, twin.find_twin(tokenizer))


def assert_same_ids(path, texts):
    """Assert that the fast engines give what tokenizers gives; return how many ids there were."""
    tokenizer = load_tokenizer(path)
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    for fast in fast_encoders(tokenizer):
        for text, encoding in zip(texts, encodings):
            assert fast(text).tolist() == encoding.ids, ascii(text[:200])
    return sum(len(encoding.ids) for encoding in encodings)


# Exact ids

@needs_shared
def test_ids_equal_tokenizers_on_hard_text():
    assert assert_same_ids(SMOLLM2, HARD + random_texts(6000, seed=1)) > 100_000


@needs_shared
def test_ids_equal_tokenizers_on_every_code_point():
    """Of planes where all are unassigned or private, one in sixteen."""
    assigned = [*range(0xD800), *range(0xE000, 0x33500), *range(0xE0000, 0xE0200)]
    characters = [chr(i) for i in [*assigned, *range(0x33500, 0x110000, 16)]]
    # Alone it would not show how it is cut off from what stands beside it.
    assert_same_ids(SMOLLM2, [f"a{c} {c}1{c}{c}  {c}\n {c}" for c in characters[:0x3400]])
    triples = [f"a{c} {c}1 {c}" for c in characters]
    assert_same_ids(SMOLLM2, ["".join(triples[i:i + 64]) for i in range(0, len(triples), 64)])


@needs_shared
def test_ids_equal_tokenizers_on_joins_of_vocabulary_words():
    tokenizer, draw = load_tokenizer(SMOLLM2), random.Random(2)
    words = [tokenizer.decode([i]) for i in range(17, 49_152)]
    assert_same_ids(SMOLLM2, ["".join(draw.choices(words, k=2)) for _ in range(20_000)])


def test_ids_equal_tokenizers_for_a_trained_tokenizer(tokenizer_path):
    assert_same_ids(tokenizer_path, HARD + random_texts(2000, seed=3))


def test_ids_equal_tokenizers_for_the_gpt2_pre_tokenizer(tokenizer_path, tmp_path):
    spec = json.loads(Path(tokenizer_path).read_text())
    spec["pre_tokenizer"] = spec["pre_tokenizer"]["pretokenizers"][1]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    assert_same_ids(path, HARD + random_texts(2000, seed=4))


@needs_shared
def test_ids_equal_tokenizers_on_long_runs():
    assert_same_ids(SMOLLM2, LONG)


@needs_shared
def test_long_runs_take_bounded_time(tmp_path, prep):
    """A million equal characters end a regular expression's stack, and some BPEs are quadratic."""
    parquet(tmp_path / "a.parquet", LONG + texts_of(100))
    start = time.monotonic()
    assert len(documents(prep("*.parquet", "--workers=2", tokenizer=SMOLLM2))) == 106
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("characters", [1, 7, 100])
def test_the_ids_of_parts_are_those_of_the_whole(characters, tokenizer_path, monkeypatch):
    monkeypatch.setattr(twin, "PART_CHARACTERS", characters)
    draw, texts = random.Random(9), HARD + random_texts(600, seed=7)
    draw.shuffle(texts)
    joined = ["\n".join(texts[i:i + 9]) for i in range(0, len(texts), 9)]
    joined += ["a\nb\n\nc \n d\n1\n'll\n\t2\n", "x\n" * 50]
    assert sum(len(list(twin.cut(text))) for text in joined) > len(joined)
    assert_same_ids(tokenizer_path, joined)


@needs_shared
def test_a_hash_hit_is_no_match():
    """This word has the hash of " not" in splintr, which does not look further."""
    word = "DLhCQwHGhUQYQsdbBkkfOuypeBJJzZsknQbDJGwJIxxXxto"
    assert assert_same_ids(SMOLLM2, [f"A page with {word} in it.", f"{word} {word}", word]) > 100


def test_the_proof_sees_every_byte():
    tokens = np.array([b"a", b"ab", b"abc", b"0123456789abcdef", b"\0", b"\xff"], object)
    draw = random.Random(0)
    for _ in range(100):
        ids = np.array(draw.choices(range(len(tokens)), k=draw.randint(0, 9)), np.uint32)
        text = b"".join(tokens[ids])
        assert twin.spell(tokens, ids, text)
        for at in range(len(text)):
            other = text[:at] + bytes([text[at] ^ 1 << draw.randrange(8)]) + text[at + 1:]
            assert not twin.spell(tokens, ids, other)
        assert not twin.spell(tokens, ids, text + b"\0")
        assert not (text and twin.spell(tokens, ids, text[:-1]))


@needs_shared
@pytest.mark.skipif(twin.FAST != "splintr", reason="of its cache")
def test_a_worker_does_not_keep_long_runs(tmp_path):
    """Its cache keeps them whole: unbroken runs of 100 kB, and real words between."""
    code = ("import random, re, sys\n"
            "from machinery import tokenizer, twin\n"
            "def resident():\n"
            "    return int(re.search(r'VmRSS:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
            "words, draw = open('README.md').read(), random.Random(0)\n"
            "smollm2 = tokenizer.load_tokenizer(sys.argv[1])\n"
            "encode = twin.make_encoder(smollm2, twin.find_twin(smollm2))\n"
            "for n in range(160):\n"
            "    encode(words + ''.join(draw.choices('ACGT', k=100_000)))\n"
            "    if n == 80:\n"
            "        before = resident()\n"
            "print(resident() - before)\n")
    result = subprocess.run([sys.executable, "-c", code, SMOLLM2], cwd=ROOT, capture_output=True,
                            text=True)
    assert int(result.stdout) < 12_000, result.stderr


def set_normalizer(tokenizer):
    tokenizer.normalizer = normalizers.NFC()


def add_a_token(tokenizer):
    tokenizer.add_tokens([AddedToken("zebra")])


def prefix_a_space(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def split_at_spaces(tokenizer):
    steps = [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


@pytest.mark.parametrize("change, reason", [
    (set_normalizer, "normalizer"), (add_a_token, "added tokens"),
    (prefix_a_space, "pre-tokenizer"), (split_at_spaces, "pre-tokenizer")])
def test_what_the_fast_engines_cannot_do_is_left_to_tokenizers(
        change, reason, tokenizer_path, tmp_path, prep):
    tokenizer = Tokenizer.from_file(tokenizer_path)
    change(tokenizer)
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    with pytest.raises(ValueError, match=reason):
        twin.find_twin(load_tokenizer(path))
    texts = ["e\u0301 a zebra's day", "plain  text"]
    parquet(tmp_path / "a.parquet", texts)
    out = prep(tokenizer=path)
    assert documents(out) == [tokenizer.encode(text).ids for text in texts]


def bpe(merges, extra=()):
    """A byte-level BPE of a small alphabet, ids in order: end of text, letters, extra, merges."""
    vocab = {token: i for i, token in enumerate([EOT, *"abcd", *extra])}
    for a, b in merges:
        vocab.setdefault(a + b, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOT])
    return tokenizer


@pytest.mark.parametrize("tokenizer, reason", [
    # two merges, one token
    (bpe([("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]), "merge out of order"),
    # abc is always ab c
    (bpe([("a", "b"), ("b", "c"), ("a", "bc")]), "token not encoded as itself"),
    # ids not in the merges' order
    (bpe([("b", "c"), ("a", "b")], extra=["ab"]), "merge out of order")])
def test_vocabularies_on_which_the_fast_engines_would_differ_are_refused(tokenizer, reason):
    with pytest.raises(ValueError, match=reason):
        twin.find_twin(tokenizer)


def test_bytes_without_a_token_are_dropped_as_tokenizers_drops_them():
    tokenizer = bpe([("a", "b"), ("c", "d"), ("ab", "cd")])
    for encode in fast_encoders(tokenizer):
        for text in ("axb", "abxcd", "x", "xabcd", "ab cd"):
            assert encode(text).tolist() == tokenizer.encode(text).ids
        assert encode("abxcd").tolist() == [7], "the neighbours of the hole join, as in tokenizers"


# Tokenizers

def test_special_spellings_are_ordinary_text(tmp_path, prep):
    text = "The marker <|endoftext|> ends a page."
    parquet(tmp_path / "a.parquet", [text] * 3)
    out = prep()
    assert decoded(out) == [text] * 3
    tokens = open_shards(out, "train")[0].map()[0]
    assert (tokens == 0).sum() == 3, "as many ends of text as documents"


def test_decoding_gives_the_text_back(tokenizer_path, tmp_path, prep):
    texts = [text for text in HARD if text]
    parquet(tmp_path / "a.parquet", texts)
    out = prep()
    assert decoded(out) == texts
    sizes = token_bytes(load_tokenizer(tokenizer_path))
    found = [int(sizes[ids].sum()) for ids in documents(out)]
    assert found == [len(text.encode()) for text in texts]


def test_a_vocabulary_over_uint16_is_refused_before_writing(tmp_path, flags):
    vocab = {f"w{i}": i for i in range(1, 70_000)}
    vocab[EOT] = 0
    path = tmp_path / "tokenizer.json"
    path.write_text(Tokenizer(models.WordLevel(vocab, unk_token=EOT)).to_str())
    parquet(tmp_path / "a.parquet", ["w66000"])
    assert_is_line(end_of(*flags(tokenizer=path)), "70,000 ids", "65,536")
    assert not contents(tmp_path / "out")


def test_vocab_size_counts_added_tokens(tokenizer_path, tmp_path, prep):
    tokenizer = Tokenizer.from_file(tokenizer_path)
    tokenizer.add_tokens(["zebra", "yak", "xerus"])
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    parquet(tmp_path / "a.parquet", ["a xerus"])
    out = prep(tokenizer=path)
    vocab_size = read_meta(out)["tokenizer"]["vocab_size"]
    assert vocab_size == Tokenizer.from_file(tokenizer_path).get_vocab_size() + 3
    assert documents(out)[0][-1] == vocab_size - 1
    sizes = token_bytes(load_tokenizer(path))
    assert len(sizes) == vocab_size and sizes[-1] == len("xerus") and sizes[0] == 0


def test_truncation_and_padding_of_a_tokenizer_file_are_switched_off(
        tokenizer_path, tmp_path, prep):
    tokenizer = Tokenizer.from_file(tokenizer_path)
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128)
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    parquet(tmp_path / "a.parquet", ["1" * 500, "1" * 10])
    assert [len(ids) for ids in documents(prep(tokenizer=path))] == [500, 10]


@pytest.mark.parametrize("name, part", [
    ("missing.json", "no such tokenizer"), ("nonsense", "expected train:N"),
    ("OWNER/NAME", "OWNER/REPOSITORY@REVISION"), ("bad.json", "not a tokenizer.json")])
def test_a_wrong_tokenizer_is_one_line(name, part, tmp_path, monkeypatch, prep):
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{}")
    parquet(tmp_path / "a.parquet", ["a"])
    with pytest.raises((ValueError, FileNotFoundError), match=part) as error:
        prep(tokenizer=name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spelling", ["an added token", "a word of the vocabulary"])
def test_an_end_of_text_that_text_can_spell_is_refused(spelling, tokenizer_path, tmp_path, prep):
    """Its id would stand inside of documents."""
    spec = json.loads(Path(tokenizer_path).read_text())
    if spelling == "an added token":
        spec["added_tokens"][0]["special"] = False
    else:
        spec["added_tokens"] = []
        spec["model"]["ignore_merges"] = True
        spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False,
                                 "trim_offsets": False, "use_regex": False}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    parquet(tmp_path / "a.parquet", ["a <|endoftext|> b", EOT])
    with pytest.raises(ValueError, match=r"<\|endoftext\|> in a text becomes id 0") as error:
        prep(tokenizer=path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["train:300", "utf16"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{}")])
def test_a_lost_tokenizer_is_made_again(damage, name, tmp_path, prep):
    parquet(tmp_path / "a.parquet", texts_of(50))
    out = prep(tokenizer=name)
    before = contents(out)
    damage(out / "tokenizer.json")
    assert contents(prep(tokenizer=name)) == before


def test_a_lost_tokenizer_of_other_documents_is_not_replaced(tmp_path, prep):
    parquet(tmp_path / "a.parquet", texts_of(50))
    out = prep(tokenizer="train:300")
    (out / "tokenizer.json").unlink()
    parquet(tmp_path / "a.parquet", texts_of(90, seed=1))
    with pytest.raises(ValueError, match="choose another --out"):
        prep(tokenizer="train:300")
    assert not (out / "tokenizer.json").exists()


def test_utf16_is_lossless(tmp_path, flags, prep):
    texts = [text for text in HARD + random_texts(300, seed=6) if text and "\uffff" not in text]
    parquet(tmp_path / "a.parquet", [*texts, "a\uffff"])
    out = prep(tokenizer="utf16")
    assert decoded(out) == texts
    meta = read_meta(out)
    assert meta["tokenizer"]["vocab_size"] == 65_536 and meta["tokenizer"]["eot_id"] == 0xFFFF
    assert entries(out)[0]["skipped"] == {"holds the end of text": 1}
    tokenizer = load_tokenizer(out / "tokenizer.json")
    sizes = token_bytes(tokenizer)
    found = [int(sizes[ids].sum()) for ids in documents(out)]
    assert found == [len(text.encode()) for text in texts]
    code_units = [0x61, 0xE9, 0xD83D, 0xDE42]
    assert tokenizer.encode("aé🙂", add_special_tokens=False).ids == code_units
    half_a_pair = tokenizer.decode([0x61, 0xFFFF, 0xD83D], skip_special_tokens=True)
    assert half_a_pair == "a\ufffd", "as a model may sample it"
    before = contents(out)
    run(*flags(tokenizer="utf16"))
    assert contents(out) == before, "a second run finds it whole"


def test_a_trained_tokenizer_splits_digits(tokenizer_path):
    tokenizer = load_tokenizer(tokenizer_path)
    assert len(tokenizer.encode("1234", add_special_tokens=False).ids) == 4


def test_the_alphabet_is_tokenizers_own():
    assert sorted(twin.BYTES) == sorted(pre_tokenizers.ByteLevel.alphabet())
    text = (ROOT / "prepare.py").read_text() + "é漢🙂"
    [(spelled, _)] = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    assert bytes(twin.BYTES[character] for character in spelled) == text.encode()
