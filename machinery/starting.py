"""What a run of train.py starts from: new weights, with the bytes of the tokens where the input is
made of them."""

from pathlib import Path

from codes import spelling_codes
from machinery.tokenizer import load_tokenizer, token_spellings
from model import Decoder


def new_model(args, config, say):
    """Return the Decoder of a run with its first weights. Raises ValueError for codes that cannot
    be."""
    spellings = None
    if config.input == "spelling":
        spellings = token_spellings(load_tokenizer(Path(args.data) / "tokenizer.json"))
        _, alike = spelling_codes(spellings, config.positions)
        say(f"  spelt alike in {config.positions} bytes and told apart by the last: {alike:,} of "
            f"{config.vocab_size:,} ids")
    return Decoder(config, args.seed, spellings)
