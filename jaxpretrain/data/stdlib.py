"""The embedded corpus: the source, comments and documentation of this Python's own standard library.

Text that needs no download. It differs between Python versions, and so do losses on it; the number of tokens
and a hash of the corpus are printed when it is made. One document is the source of one module, or one topic of
the language reference (`pydoc_data.topics`, prose).
"""

import ast
import os
import pathlib
import sysconfig
from collections.abc import Iterator

# Tests, other people's packages, tables of numbers, Python 2, demos; pydoc_data is read in its own way.
_SKIPPED_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
_SKIPPED_DIRS |= {"lib2to3", "turtledemo", "pydoc_data"}
# What differs between machines with the same Python: how it was compiled, what an administrator added.
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize")


def files() -> list[pathlib.Path]:
    """The corpus's files, in order. Raises ValueError where the library is not installed as source."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    chosen = []
    for folder, subfolders, names in os.walk(root):
        # Pruned here: site-packages may hold far more files than the library.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_DIRS and not name.startswith("config-")]
        chosen += [
            pathlib.Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES)
        ]
    if not chosen:
        raise ValueError(
            f"data.source='stdlib': no Python source under {root}; set data.source='text' and data.path to text files"
        )
    chosen.sort(key=lambda path: path.relative_to(root).as_posix())
    topics = root / "pydoc_data" / "topics.py"
    return chosen + [topics] * topics.is_file()


def documents() -> Iterator[str]:
    """The corpus's documents, in order."""
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # none in CPython's own releases; whatever else is there is not needed
        if path.parent.name == "pydoc_data":
            yield from _topics(text)
        else:
            yield text


def _topics(source: str) -> Iterator[str]:
    """The texts of `topics = {name: text}`, read without running the file."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            yield from ast.literal_eval(node.value).values()
