"""Errors as a user should read them."""

import pathlib
import traceback

_PROJECT = pathlib.Path(__file__).resolve().parent.parent


def explain(error: Exception) -> str:
    """One line for the user: what happened and, where it is known, what to change."""
    text = " ".join(str(error).split())
    if type(error) is ValueError and _is_ours(error):
        return text
    if is_out_of_memory(error):
        return (
            "out of memory: lower micro_batch_size, or set parallel.remat=full, parallel.offload=optimizer, or "
            f"parallel.strategy=fsdp on several devices ({text[:300]})"
        )
    if isinstance(error, OSError):
        return text
    return f"{type(error).__name__}: {text[:500]} (--debug shows where)"


def _is_ours(error: Exception) -> bool:
    """Whether the error was raised in this package or beside it, in `tools/`: then its text is written for users."""
    *_, last = traceback.walk_tb(error.__traceback__)
    return pathlib.Path(last[0].f_code.co_filename).resolve().is_relative_to(_PROJECT)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory, in any of the wordings of XLA, CUDA, TPUs and Python."""
    text = str(error).lower()
    words = ("resource_exhausted", "out of memory", "exceeds available hbm", "failed to allocate", "bad_alloc")
    full_disk = "os_error_code" in text  # TensorStore calls that RESOURCE_EXHAUSTED too
    return isinstance(error, MemoryError) or (not full_disk and any(word in text for word in words))
