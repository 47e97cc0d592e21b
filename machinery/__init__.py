"""What each stage needs and no reader of the method must know: one room a file, named after it."""

import sys

if sys.version_info < (3, 11):  # hashlib.file_digest, contextlib.chdir
    sys.exit(f"nanobit needs Python 3.11 or newer; this is {sys.version.split()[0]}")
