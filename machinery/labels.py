"""What an input interface is called, and along which axes two of them differ. For compare.py."""

from codes import CODE_SEED, FIXED, min_bits

# The fields of config.json that describe an input beside its name: as a label says them, and what
# goes without saying, which is also what a run was trained with that does not record the field.
# Sizes always are said.
LABELS = {"base": ("base {}", None), "rank": ("rank {}", None), "inner_width": ("inner {}", None),
          "hashes": ("{}", None), "buckets": ("x {}", None), "positions": ("{} positions", None),
          "code_seed": ("code {}", str(CODE_SEED)), "code_offset": ("offset {}", "0"),
          "code_values": ("{}", "01"), "code_scale": ("scale {}", "1"), "lift": ("{}", "tile"),
          "table_free": ("table-free", "False"), "code_width": ("width {}", "0"),
          "input_std": ("std {}", "0.02")}
# The inputs that have a size of their own; config.json gives all runs all fields.
SIZES = {"base": "digits", "rank": "factored", "inner_width": "alone", "hashes": "hashed",
         "buckets": "hashed", "positions": "spelling"}
# Whether something is drawn for an input beside its trained values: for these always, for these
# where its codes are wider than the id's own bits, for these never.
DRAWN = ("gf2", "random")
DRAWN_IF_WIDE = ("binary", "projected", "alone")
UNDRAWN = ("learned", "tied", "lowdim", "factored", "digits", "spelling", "sinusoid")

# The axes along which inputs can be told apart, and the order of their words; numbers need none.
AXES = {"learning": ("fixed", "learned"), "width": (), "scale": (),
        "values": ("01", "pm1", "sinusoid", "Gaussian"), "recoding": ("none", "A c + b"),
        "lift": ("tile", "interleave", "projection", "network"), "table": ("own", "the output's")}
# Where an input is on them, beside OWN; an axis that an input does not have cannot tell it from
# another. An input that is not here, such as a user's own, is told from its own variants only, by
# the fields that differ.
OWN = {"recoding": "none", "table": "own"}
PLACES = {"learned": {"learning": "learned", "values": "Gaussian"},
          "tied": {"learning": "learned", "values": "Gaussian", "table": "the output's"},
          "lowdim": {"learning": "learned", "values": "Gaussian"},
          "factored": {"learning": "learned", "values": "Gaussian", "lift": "projection"},
          "projected": {"learning": "fixed", "values": "pm1", "lift": "projection"},
          "alone": {"learning": "fixed", "values": "pm1", "lift": "network"},
          "binary": {"learning": "fixed"},
          "gf2": {"learning": "fixed", "recoding": "A c + b"},
          "random": {"learning": "fixed", "values": "Gaussian"},
          "sinusoid": {"learning": "fixed", "values": "sinusoid"}}
MATCHED = "0.02"  # what --code_scale=matched is: the root mean square of a table's first rows


def said(config):
    """Return {field: value, as a string} of what tells a run's input from others of its name."""
    name, usual = config["input"], {field: silent for field, (_, silent) in LABELS.items()}
    values = {field: tidy(field, config.get(field, silent)) for field, silent in usual.items()}
    if "vocab_size" in config and values["code_width"] == str(min_bits(config["vocab_size"])):
        values["code_width"] = "0"  # as many numbers as without the flag
    is_wide = values["code_width"] != "0"
    if name in DRAWN or (name in DRAWN_IF_WIDE and is_wide):
        usual["code_seed"] = None
    elif name in UNDRAWN or name in DRAWN_IF_WIDE:
        values["code_seed"] = "None"
    found = {}
    for field, value in values.items():
        if SIZES.get(field, name) == name and value not in ("None", usual[field]):
            found[field] = value
    return found


def tidy(field, value):
    """Return a field's value as a string, the same for 1, 1.0 and 1e0 where it is a number."""
    if field in ("input_std", "code_scale") and value != "matched":
        return f"{float(value):g}"
    return str(value)


def label(config):
    """Return the name of a run's input: binary, gf2 code 7 (its code_seed), binary pm1 ..."""
    words = [LABELS[field][0].format(value) for field, value in said(config).items()]
    return " ".join([config["input"], *words])


def places(config):
    """Return {axis: where a run's input is on it}, of the axes that it has."""
    name, told = config["input"], said(config)
    usual = {field: told.get(field, silent) for field, (_, silent) in LABELS.items()}
    if name not in PLACES:
        return {"input": name} | usual
    found = {"lift": usual["lift"], "code_offset": usual["code_offset"],
             "table_free": usual["table_free"], "code_seed": told.get("code_seed"),
             "inner_width": told.get("inner_width"), "width": find_width(config, told),
             "values": usual["code_values"]}
    scale = usual["code_scale"] if name in FIXED else usual["input_std"]
    found["scale"] = float(MATCHED if scale == "matched" else scale)
    found = {axis: place for axis, place in found.items() if place is not None}
    return OWN | found | PLACES[name]


def find_width(config, told):
    """Return how many numbers an id of its own has, None where config.json does not say."""
    if config["input"] in ("learned", "tied"):
        return config.get("n_embd")
    if config["input"] == "factored":
        return int(told["rank"]) if "rank" in told else None
    if "code_width" in told:
        return int(told["code_width"])
    return min_bits(config["vocab_size"]) if "vocab_size" in config else None


def differing(a, b):
    """Return the axes on which two inputs' places() differ, of those that both have; None for two
    that cannot be compared axis by axis."""
    if a.get("input") != b.get("input"):
        return None
    return [axis for axis in a if axis in b and a[axis] != b[axis]]
