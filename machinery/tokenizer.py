"""Tokenizers: load one, train one, UTF-16 code units, and the same ids faster."""

import base64
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from machinery.files import first_line, write_whole
from machinery.sources import fetch

try:
    import splintr
    FAST = "splintr"
except ImportError:  # tiktoken gives the same ids in three times the time
    FAST = "tiktoken"

EOT = "<|endoftext|>"          # SmolLM2's end of text, id 0

MAX_VOCAB_SIZE = 65_536        # ids are stored as uint16

SMOLLM2 = "HuggingFaceTB/SmolLM2-1.7B@effd688a12921b4cc83e3312b6feb579f70f9c71"


class Utf16:
    """The predecessor's character-level regime: ids are a text's UTF-16 code units, so V = 65,536 and nothing is lost.

    The end of text is U+FFFF, which Unicode keeps free of characters; a document that holds it is skipped and counted.
    In a data directory it is the tokenizer.json UTF16_JSON, so that later stages load it as they load any other.
    """
    eot_id = 0xFFFF

    def encode(self, text, add_special_tokens=False):
        return SimpleNamespace(ids=np.frombuffer(text.encode("utf-16-le"), "<u2").tolist())

    def encode_batch_fast(self, texts, add_special_tokens=False):
        return [self.encode(text) for text in texts]

    def decode(self, ids, skip_special_tokens=True):
        ids = [i for i in ids if not (skip_special_tokens and i == self.eot_id)]
        return np.array(ids, "<u2").tobytes().decode("utf-16-le", "replace")

UTF16_JSON = b'{"model": {"type": "utf16"}}'


def train_tokenizer(texts, vocab_size):
    """Return a byte-level BPE Tokenizer of up to vocab_size ids trained on texts: id 0 is the end of text, then 256
    bytes, then merges; single digits are split, as SmolLM2's are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOT], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty()))
    return tokenizer


def load_tokenizer(path):
    """Return the Tokenizer (or Utf16) of a tokenizer.json, set to encode text as ordinary text, whole and unpadded.

    Raises FileNotFoundError, or ValueError if its ids do not fit in uint16 or it is not a byte-level BPE.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such tokenizer file")
    if Path(path).read_bytes() == UTF16_JSON:
        return Utf16()
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: not a tokenizer.json ({first_line(error)})") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if (size := vocab_size(tokenizer)) > MAX_VOCAB_SIZE:
        raise ValueError(f"{path}: {size:,} ids; expected at most {MAX_VOCAB_SIZE:,}, since ids are stored as uint16")
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise ValueError(f"{path}: expected a byte-level BPE (its decoder is {type(tokenizer.decoder).__name__})")
    return tokenizer


def vocab_size(tokenizer):
    """Return the highest id + 1, added tokens included: the rows that a table or a head needs."""
    if isinstance(tokenizer, Utf16):
        return MAX_VOCAB_SIZE
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_bytes(tokenizer):
    """Return how many bytes of UTF-8 text each id stands for: int64 [V]; special tokens stand for none."""
    if isinstance(tokenizer, Utf16):  # a surrogate is half of a character of 4 bytes; U+FFFF is the end of text
        return np.repeat([1, 2, 3, 2, 3, 0], np.diff([0, 0x80, 0x800, 0xD800, 0xE000, 0xFFFF, 0x10000]))
    sizes = np.zeros(vocab_size(tokenizer), np.int64)
    for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
        sizes[i] = len(token)  # the byte-level alphabet writes each byte as one character
    for i, added in tokenizer.get_added_tokens_decoder().items():
        sizes[i] = 0 if added.special else len(added.content.encode())
    return sizes


def find_eot(tokenizer):
    """Return the id that ends each document. Raises ValueError if the tokenizer has none."""
    if isinstance(tokenizer, Utf16):
        return tokenizer.eot_id
    for token in (EOT, "<|end_of_text|>", "</s>", "<eos>"):
        if (i := tokenizer.token_to_id(token)) is not None:
            return i
    raise ValueError(f"the tokenizer has no end-of-text token (such as {EOT})")


def find_tokenizer(name, out, train_texts):
    """Return the path of the tokenizer.json that --tokenizer names.

    Args:
        name: train:N (trained on train_texts() and written to out), utf16 (written to out), a path, or a Hugging Face
            OWNER/REPOSITORY@REVISION.
    """
    if name.startswith("train:") or name == "utf16":
        path, size = Path(out) / "tokenizer.json", name.removeprefix("train:")
        if name != "utf16" and not (size.isdigit() and 257 < int(size) <= MAX_VOCAB_SIZE):
            raise ValueError(f"--tokenizer={name}: expected train:N with N from 258 to {MAX_VOCAB_SIZE}")
        if not (Path(out) / "meta.json").exists():  # else it is the one that made the shards there
            if name != "utf16":
                print(f"training a byte-level BPE tokenizer of {size} ids on the train documents", flush=True)
            write_whole(path, UTF16_JSON if name == "utf16" else
                        train_tokenizer(train_texts(), int(size)).to_str(pretty=True).encode())
        return path
    if name.endswith(".json") or Path(name).exists():
        return Path(name)
    if not re.fullmatch(r"[^/@]+/[^/@]+@[^/@]+", name):
        raise ValueError(f"--tokenizer={name}: no such file; expected train:N, utf16, a tokenizer.json, or "
                         f"OWNER/REPOSITORY@REVISION such as {SMOLLM2}")
    return Path(fetch(f"hf://{name}/tokenizer.json", out, keep=True))

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's byte-level alphabet: these are themselves,

OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]    # and these are U+0100 and up

BYTES = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(OTHERS)}

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}

DIGITS = {"type": "Digits", "individual_digits": True}

# Pre-tokenizers, and the one regular expression that cuts as they do. Words come first, since most cuts are words, and what
# needs no look-ahead is one group, which tiktoken's engine hands to its faster half.
PATTERNS = [
    ([BYTE_LEVEL], r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s+"),
    # Where Digits has cut, ByteLevel sees an end of text: so a digit ends a run of spaces as the end would.
    ([DIGITS, BYTE_LEVEL], r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)|\p{N}| ?[^\s\p{L}\p{N}]+)|\s+(?![^\s\p{N}])|\s+"),
]


def find_twin(tokenizer):
    """Return (pattern, ranks bytes -> id) with which tiktoken and splintr give exactly the ids of a Tokenizer.

    They join any two neighbours that together are a token, lowest id first; tokenizers joins the two that a merge
    names, first merge first. That is the same if (1) ids rise in the order of the merges, each of which makes a token
    of its own out of bytes and earlier tokens, and (2) every token, alone, is encoded as itself. For take the first
    join where they differ: neighbours x y make token t, whose merge is a b. Nothing has been joined across the ends of
    t, so within them all is as if t stood alone, and then by (2) what stands there is a b.

    Bytes without a token (SmolLM2 has 21) get ids over 65,535; make_encoder leaves texts that have such to tokenizers.
    Raises ValueError, saying what stands in the way.
    """
    spec = json.loads(tokenizer.to_str())
    model, step = spec["model"], spec["pre_tokenizer"] or {}
    steps = [{k: v for k, v in step.items() if k != "trim_offsets"} for step in step.get("pretokenizers", [step])]
    pattern = next((pattern for shape, pattern in PATTERNS if shape == steps), None)
    if pattern is None:
        raise ValueError("another pre-tokenizer than ByteLevel, or Digits and ByteLevel")
    if spec["normalizer"] or any(not token["special"] for token in spec["added_tokens"]):
        raise ValueError("a normalizer, or added tokens that are not special")
    if model["type"] != "BPE" or any(map(model.get, ("dropout", "continuing_subword_prefix", "end_of_word_suffix",
                                                     "ignore_merges"))):
        raise ValueError("another model than plain BPE")
    ranks, last = {token: model["vocab"][token] for token in BYTES if token in model["vocab"]}, -1
    for a, b in model["merges"]:
        if a not in ranks or b not in ranks or model["vocab"][a + b] <= last:
            raise ValueError(f"a merge out of order, {a!r} and {b!r}")
        last = ranks[a + b] = model["vocab"][a + b]
    for token, i in ranks.items():
        if [part.id for part in tokenizer.model.tokenize(token)] != [i]:
            raise ValueError(f"a token not encoded as itself, {token!r}")
    twin = pattern, {bytes([byte]): MAX_VOCAB_SIZE + byte for byte in range(256)} | {
        bytes(BYTES[character] for character in token): i for token, i in ranks.items()}
    # What the proof takes for granted: that the libraries mean the same by a letter, a digit and a space.
    plain, fast = make_encoder(tokenizer), make_encoder(tokenizer, twin)
    for start in range(0, 0x3400, 64):
        block = "".join(map(chr, range(start, start + 64)))
        if not np.array_equal(plain(text := f"{block} a1 {block[::-1]}"), fast(text)):
            raise ValueError(f"other ids in {FAST} for characters from U+{start:04X}")
    return twin


def make_encoder(tokenizer, twin=None):
    """Return the function from a text to its ids, an integer array, or None for a text that has no ids (see Utf16)."""
    if isinstance(tokenizer, Utf16):
        return lambda text: np.frombuffer(text.encode("utf-16-le"), "<u2") if "\uffff" not in text else None

    def plain(text):  # encode_batch_fast, because encode also finds each token's place in the text
        return np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.uint32)

    if twin is None:
        return plain
    pattern, ranks = twin
    if FAST == "splintr":
        lines = b"".join(b"%s %d\n" % (base64.b64encode(token), i) for token, i in ranks.items())
        engine = splintr.Tokenizer.from_bytes(lines, pattern, {})
        encode = lambda text: np.frombuffer(engine.encode_flat(text), np.uint32)
    else:
        encode = tiktoken.Encoding("twin", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode_to_numpy

    def fast(text):
        """Return the ids by the fast engine, or by tokenizers where that cannot or has ids that it should not."""
        try:
            ids = encode(text)
        except ValueError:  # tiktoken's regular expressions give up on some hundred thousand spaces in a row
            return plain(text)
        return ids if ids.max(initial=0) < MAX_VOCAB_SIZE else plain(text)  # tokenizers drops a byte without a token
    return fast
