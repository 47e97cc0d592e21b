"""The same ids, faster: by tiktoken, or by splintr where it is installed, in place of tokenizers.

prepare.py encodes with the function that make_encoder returns.
"""

import base64
import json
import re

import numpy as np
import tiktoken

from machinery.tokenizer import BYTES, MAX_VOCAB_SIZE, Utf16

try:
    import splintr
    FAST = "splintr"
except ImportError:  # it is optional: tiktoken gives the same ids in three times the time
    FAST = "tiktoken"

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
# Pre-tokenizers, and the one regular expression that cuts as they do. Words come first, since most
# cuts are words, and what needs no look-ahead is one group, which tiktoken's engine hands to its
# faster half.
PATTERNS = [
    ([BYTE_LEVEL],
     r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s+"),
    # Where Digits has cut, ByteLevel sees an end of text: a digit ends a run of spaces as that.
    ([DIGITS, BYTE_LEVEL],
     r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)|\p{N}| ?[^\s\p{L}\p{N}]+)|\s+(?![^\s\p{N}])|\s+"),
]
LONE_NEWLINE = re.compile(r"[!-~]\n(?=[!-~])")
PART_CHARACTERS = 1 << 20  # of a text, encoded at a time
CACHED_CHARACTERS = 8 << 20  # of text, after which splintr's cache is emptied
NOT_PLAIN_BPE = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")


def find_twin(tokenizer):
    """Return (pattern, ranks) with which tiktoken gives exactly a Tokenizer's ids.

    So does splintr, but for what splintr_encoder says. The pattern is the regular expression that
    cuts a text into pieces; ranks maps the bytes of a token to its id.

    They join any two neighbours that together are a token, lowest id first; tokenizers joins the
    two that a merge names, first merge first. That is the same if (1) ids rise in the order of the
    merges, each of which makes a token of its own out of bytes and earlier tokens, and (2) every
    token, alone, is encoded as itself. For take the first join where they differ: neighbours x y
    make token t, whose merge is a b. Nothing has been joined across the ends of t, so within them
    all is as if t stood alone, and then by (2) what stands there is a b.

    Bytes without a token (SmolLM2 has 21) get ids over 65,535; make_encoder leaves texts that have
    such to tokenizers. Raises ValueError, saying what stands in the way.
    """
    spec = json.loads(tokenizer.to_str())
    pattern = find_pattern(spec)
    ranks = rank_tokens(spec["model"])
    for token, i in ranks.items():
        if [part.id for part in tokenizer.model.tokenize(token)] != [i]:
            raise ValueError(f"a token not encoded as itself, {token!r}")
    twin_ranks = {bytes([byte]): MAX_VOCAB_SIZE + byte for byte in range(256)}
    for token, i in ranks.items():
        twin_ranks[bytes(BYTES[character] for character in token)] = i
    twin = pattern, twin_ranks
    compare_characters(tokenizer, twin)
    return twin


def find_pattern(spec):
    """Return the regular expression that cuts as a tokenizer.json's pre-tokenizer does.

    Raises ValueError if there is none, or if more than byte-level BPE happens to the text.
    """
    step = spec["pre_tokenizer"] or {}
    steps = [dict(one) for one in step.get("pretokenizers", [step])]
    for one in steps:
        one.pop("trim_offsets", None)  # of the tokens' places in the text, not of the ids
    pattern = next((pattern for shape, pattern in PATTERNS if shape == steps), None)
    if pattern is None:
        raise ValueError("another pre-tokenizer than ByteLevel, or Digits and ByteLevel")
    if spec["normalizer"] or any(not token["special"] for token in spec["added_tokens"]):
        raise ValueError("a normalizer, or added tokens that are not special")
    model = spec["model"]
    if model["type"] != "BPE" or any(model.get(key) for key in NOT_PLAIN_BPE):
        raise ValueError("another model than plain BPE")
    return pattern


def rank_tokens(model):
    """Return {token: id} of the byte tokens and of what the merges make.

    Raises ValueError unless ids rise in the order of the merges.
    """
    ranks = {token: model["vocab"][token] for token in BYTES if token in model["vocab"]}
    last = -1
    for a, b in model["merges"]:
        made = model["vocab"][a + b]
        if a not in ranks or b not in ranks or made <= last:
            raise ValueError(f"a merge out of order, {a!r} and {b!r}")
        ranks[a + b] = last = made
    return ranks


def compare_characters(tokenizer, twin):
    """Raise ValueError unless the libraries mean the same by a letter, a digit and a space.

    find_twin's proof takes that for granted.
    """
    plain, fast = make_encoder(tokenizer), make_encoder(tokenizer, twin)
    for start in range(0, 0x3400, 64):
        block = "".join(map(chr, range(start, start + 64)))
        text = f"{block} a1 {block[::-1]}"
        if not np.array_equal(plain(text), fast(text)):
            raise ValueError(f"other ids in {FAST} for characters from U+{start:04X}")


def make_encoder(tokenizer, twin=None):
    """Return the function from a text to its ids, uint16 [n]; None for a text without ids.

    With a twin (see find_twin) they come from the fast engine. Only Utf16 knows texts without ids.
    """
    if isinstance(tokenizer, Utf16):
        return encode_utf16

    def plain(text):
        # encode_batch_fast, because encode also finds each token's place in the text
        encoding = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, "<u2")

    if twin is None:
        return plain
    encode = splintr_encoder(*twin) if FAST == "splintr" else tiktoken_encoder(*twin)

    def encode_part(text):
        """Return the ids by the fast engine; by tokenizers where that cannot, or must not."""
        try:
            ids = encode(text)
        except ValueError:
            return plain(text)
        # An id over 65,535 is a byte without a token, which tokenizers drops.
        return ids.astype("<u2") if ids.max(initial=0) < MAX_VOCAB_SIZE else plain(text)

    return lambda text: np.concatenate([encode_part(part) for part in cut(text)])


def cut(text):
    """Yield a long text in parts, whose ids one after another are those of the whole.

    To encode it takes many times its size. A lone newline between two visible ASCII characters is a
    piece of its own for each of PATTERNS, and none of them looks back; so each part ends with one.
    """
    start = 0
    while len(text) - start > PART_CHARACTERS:
        end = LONE_NEWLINE.search(text, start + PART_CHARACTERS)
        if not end:
            break
        yield text[start:end.end()]
        start = end.end()
    yield text[start:]


def encode_utf16(text):
    if "\uffff" in text:
        return None
    return np.frombuffer(text.encode("utf-16-le"), "<u2")


def splintr_encoder(pattern, ranks):
    """Return the function from a text to its ids by splintr.

    It takes two pieces of text with one hash for the same, and its cache keeps long unbroken runs
    whole. So the bytes of all tokens are compared with the text's, and the cache is emptied now and
    then. Raises ValueError where they differ.
    """
    lines = [b"%s %d\n" % (base64.b64encode(token), i) for token, i in ranks.items()]
    engine = splintr.Tokenizer.from_bytes(b"".join(lines), pattern, {})
    token_bytes = np.full(max(ranks.values()) + 1, b"", object)
    for token, i in ranks.items():
        token_bytes[i] = token
    n_cached = 0

    def encode(text):
        nonlocal n_cached
        n_cached += len(text)
        if n_cached > CACHED_CHARACTERS:
            engine.clear_cache()
            n_cached = 0
        ids = np.frombuffer(engine.encode_flat(text), np.uint32)
        if not spell(token_bytes, ids, text.encode()):
            raise ValueError("the ids of another text")
        return ids

    return encode


def spell(token_bytes, ids, text):
    """Return whether tokens are, byte by byte, a text. A fifth of the time to encode goes here."""
    at = 0
    for start in range(0, len(ids), 1 << 14):  # join takes a hundred bytes a token
        part = b"".join(token_bytes[ids[start:start + (1 << 14)]].tolist())
        if not text.startswith(part, at):
            return False
        at += len(part)
    return at == len(text)


def tiktoken_encoder(pattern, ranks):
    """Return the function from a text to its ids by tiktoken, which compares pieces byte by byte.

    Raises ValueError where its regular expressions give up: on some hundred thousand spaces.
    """
    engine = tiktoken.Encoding("twin", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return engine.encode_to_numpy
