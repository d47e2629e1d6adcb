"""Names: of checkpoints, of items, of files. One rule for what is safe inside a folder."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
SUPERSEDED = "superseded"
ATTEMPT_PREFIX = ".attempt-"
TRASH_PREFIX = ".trash-"
LOCK = ".lock"
TAKEN = "exists already and is left as it is; save under another id, or delete it first"  # what is said of an id

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,127}")
_FILE = re.compile(r"(?:data-[0-9a-f]{1,32}/)?[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,199}")
_RESERVED = ("latest", "best", SUPERSEDED, MANIFEST)
_NUMBER_AT_END = re.compile(r"([0-9]{1,18})$")

ALLOWED = "1 to 128 of A-Z a-z 0-9 _ . = + @ - that start with a letter, digit or _"


def check_id(checkpoint_id: object) -> str:
    """The id itself. Raises TypeError or ValueError for what is no name within a location."""
    if not isinstance(checkpoint_id, str):
        raise TypeError(f"checkpoint_id={checkpoint_id!r:.80} is a {type(checkpoint_id).__name__}; expected a name")
    if not is_name(checkpoint_id):
        raise ValueError(f"checkpoint_id={checkpoint_id!r:.200} is not a name within the location: {ALLOWED}")
    if checkpoint_id in _RESERVED:
        raise ValueError(f"checkpoint_id={checkpoint_id!r} is reserved (so are {', '.join(_RESERVED)})")
    return checkpoint_id


def is_name(text: str) -> bool:
    """Whether `text` may name a checkpoint or an item."""
    return _NAME.fullmatch(text) is not None


def is_file_name(text: object) -> bool:
    """Whether `text` may name a file of a checkpoint, relative to its folder."""
    return isinstance(text, str) and _FILE.fullmatch(text) is not None and text != MANIFEST


def step_of(checkpoint_id: str) -> int | None:
    """The number at the end of an id: 100 for "step-100"; None where there is none."""
    match = _NUMBER_AT_END.search(checkpoint_id)
    return int(match[1]) if match else None
