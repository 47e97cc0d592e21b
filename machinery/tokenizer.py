"""Tokenizers: find the one that --tokenizer names, load or train it, and UTF-16 code units.

prepare.py makes the ids with it (the fast way to them is in twin.py); train.py and evaluate.py ask
it for the size of the vocabulary and the bytes that an id stands for.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from machinery.downloads import REVISION, check_hub_file, fetch
from machinery.errors import first_line
from machinery.files import sha256, sha256_of, write_whole
from machinery.shards import read_meta

EOT = "<|endoftext|>"  # SmolLM2's end of text, id 0
MAX_VOCAB_SIZE = 65_536  # ids are stored as uint16
# The base model's tokenizer (not an instruct one's), pinned: token ids are data.
SMOLLM2 = "HuggingFaceTB/SmolLM2-1.7B@effd688a12921b4cc83e3312b6feb579f70f9c71"
UTF16_JSON = b'{"model": {"type": "utf16"}}'
# GPT-2's byte-level alphabet writes each byte as one character: these as themselves,
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]  # and these as U+0100 and up
BYTES = {chr(byte): byte for byte in PRINTABLE}
BYTES.update({chr(256 + n): byte for n, byte in enumerate(OTHERS)})


class Utf16:
    """The predecessor's character-level regime: ids are a text's UTF-16 code units.

    So V = 65,536 and nothing is lost. The end of text is U+FFFF, which Unicode keeps free of
    characters; a document that holds it is skipped and counted. In a data directory it is the
    tokenizer.json UTF16_JSON, so that later stages load it as they load any other.
    """
    eot_id = 0xFFFF

    def encode(self, text, add_special_tokens=False):
        return SimpleNamespace(ids=np.frombuffer(text.encode("utf-16-le"), "<u2").tolist())

    def encode_batch_fast(self, texts, add_special_tokens=False):
        return [self.encode(text) for text in texts]

    def decode(self, ids, skip_special_tokens=True):
        if skip_special_tokens:
            ids = [i for i in ids if i != self.eot_id]
        return np.array(ids, "<u2").tobytes().decode("utf-16-le", "replace")


def train_tokenizer(texts, vocab_size):
    """Return a byte-level BPE Tokenizer of up to vocab_size ids trained on texts.

    Id 0 is the end of text, then come 256 bytes, then merges; single digits are split, as SmolLM2
    does.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path):
    """Return the Tokenizer (or Utf16) of a tokenizer.json.

    It is set to encode text as ordinary text, whole and unpadded. Raises FileNotFoundError, or
    ValueError if its ids do not fit in uint16 or it is not a byte-level BPE.
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
    size = vocab_size(tokenizer)
    if size > MAX_VOCAB_SIZE:
        raise ValueError(f"{path}: {size:,} ids; expected at most {MAX_VOCAB_SIZE:,}, since ids "
                         "are stored as uint16")
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise ValueError(f"{path}: expected a byte-level BPE (its decoder is "
                         f"{type(tokenizer.decoder).__name__})")
    return tokenizer


def vocab_size(tokenizer):
    """Return the highest id + 1, added tokens included: the rows that a table or a head needs."""
    if isinstance(tokenizer, Utf16):
        return MAX_VOCAB_SIZE
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_bytes(tokenizer):
    """Return how many bytes of UTF-8 text each id stands for: int64 [V]; 0 for special tokens."""
    if isinstance(tokenizer, Utf16):
        # By first code unit; a surrogate is half of a character of 4 bytes.
        bounds = [0, 0x80, 0x800, 0xD800, 0xE000, 0xFFFF, 0x10000]
        return np.repeat([1, 2, 3, 2, 3, 0], np.diff(bounds))
    sizes = np.zeros(vocab_size(tokenizer), np.int64)
    for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
        sizes[i] = len(token)  # the byte-level alphabet writes each byte as one character
    for i, added in tokenizer.get_added_tokens_decoder().items():
        sizes[i] = 0 if added.special else len(added.content.encode())
    return sizes


def token_spellings(tokenizer):
    """Return the bytes of UTF-8 text that each id stands for, a list of V; a special token's are
    its name, those of an unused id none, and those of a UTF-16 code unit its own two."""
    if isinstance(tokenizer, Utf16):
        return [unit.to_bytes(2, "big") for unit in range(MAX_VOCAB_SIZE)]
    spellings = [b""] * vocab_size(tokenizer)
    for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
        spellings[i] = bytes(BYTES[character] for character in token)
    for i, added in tokenizer.get_added_tokens_decoder().items():
        spellings[i] = added.content.encode()
    return spellings


def find_eot(tokenizer):
    """Return the id that ends each document.

    Raises ValueError if the tokenizer has none, or one that a text may hold.
    """
    if isinstance(tokenizer, Utf16):
        return tokenizer.eot_id
    for token in (EOT, "<|end_of_text|>", "</s>", "<eos>"):
        i = tokenizer.token_to_id(token)
        if i is None:
            continue
        if i in tokenizer.encode(token, add_special_tokens=False).ids:
            raise ValueError(f"the tokenizer's {token} in a text becomes id {i}, the end of text; "
                             "expected it among its added tokens, as special")
        return i
    raise ValueError(f"the tokenizer has no end-of-text token (such as {EOT})")


def check_name(name):
    """Raise ValueError if --tokenizer is train:N with another N than a tokenizer may have."""
    size = name.removeprefix("train:")
    if size != name and not (size.isdigit() and 257 < int(size) <= MAX_VOCAB_SIZE):
        raise ValueError(f"--tokenizer={name}: expected train:N with N from 258 to "
                         f"{MAX_VOCAB_SIZE}")


def find_tokenizer(name, out, train_texts):
    """Return the path of the tokenizer.json that --tokenizer names.

    Args:
        name: train:N (trained on train_texts() and written to out), utf16 (written to out), a path,
            or a Hugging Face OWNER/REPOSITORY@REVISION.
    """
    if name.startswith("train:") or name == "utf16":
        return make_tokenizer(name, Path(out), train_texts)
    if name.endswith(".json") or Path(name).exists():
        return Path(name)
    if not re.fullmatch(rf"[^/@]+/[^/@]+@{REVISION}", name):
        raise ValueError(f"--tokenizer={name}: no such file; expected train:N, utf16, a "
                         f"tokenizer.json, or OWNER/REPOSITORY@REVISION such as {SMOLLM2}")
    source = f"hf://{name}/tokenizer.json"
    path = fetch(source, out, keep=True)
    check_hub_file(source, path, sha256_of(path))
    return Path(path)


def make_tokenizer(name, out, train_texts):
    """Return the path of out/tokenizer.json, made as train:N or utf16 says.

    Where shards are, it is the one that made them: if it is lost or damaged, the same again. Raises
    ValueError if that cannot be.
    """
    path = out / "tokenizer.json"
    there = read_meta(out)["tokenizer"] if (out / "meta.json").exists() else None
    if there and there["name"] != name:
        raise ValueError(f"{out} was prepared differently; tokenizer name: {there['name']} there, "
                         f"{name} now; choose another --out")
    if there and path.is_file() and sha256_of(path) == there.get("sha256"):
        return path
    if name == "utf16":
        data = UTF16_JSON
    else:
        size = int(name.removeprefix("train:"))
        print(f"training a byte-level BPE tokenizer of {size} ids on the train documents",
              flush=True)
        data = train_tokenizer(train_texts(), size).to_str(pretty=True).encode()
    if there and sha256(data) != there.get("sha256"):
        raise ValueError(f"{path}: lost or damaged, and to train it again gave another; choose "
                         "another --out")
    write_whole(path, data)
    return path
