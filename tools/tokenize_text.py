"""Tokenises text into Megatron files (OUTPUT.bin, OUTPUT.idx), in parallel; interrupted, the same command goes on.

    python tools/tokenize_text.py --input='corpus/*.jsonl.zst' --tokenizer=tokenizer.json --output=data/corpus

Train on them with --config.data.source=megatron --config.data.path=data/corpus.

Input is plain text (a file is one document unless --document-separator is given), JSON lines (.jsonl, .json,
.ndjson) or parquet; text and JSON lines also as .gz or .zst. A compressed file is the work of one process: many
files of moderate size go faster than one large one. The output needs as much space again while it is made.
"""

import argparse
import os
import sys

import rich.console
import rich.progress

from jaxpretrain.data import documents, megatron, tokenize_job
from jaxpretrain.data.tokenizer import EOD_TOKENS, load_tokenizer


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(message)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, help="files, folders, globs; several also with commas")
    parser.add_argument("--tokenizer", required=True, help="bytes, or the path of a Hugging Face tokenizer.json")
    parser.add_argument("--output", required=True, help="prefix of the .bin and .idx files")
    parser.add_argument("--text-key", help="JSON lines, parquet: the field that holds the text (default: text)")
    parser.add_argument("--document-separator", help=r"plain text: what stands between documents, e.g. '\n\n'")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        help="a token at the end of each document (default: where the tokenizer has one)",
    )
    parser.add_argument("--eod-token", help=f"which (default: the first there is of {' '.join(EOD_TOKENS)})")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    return parser.parse_args(arguments)


def _check(args: argparse.Namespace, files: list[str]) -> tokenize_job.Options:
    """Raises ValueError for options that contradict each other or do nothing."""
    kinds = {documents.kind(path) for path in files}
    if args.text_key is not None and kinds == {"text"}:
        raise ValueError(f"--text-key={args.text_key}: has no effect, the input is plain text; leave it out")
    if args.document_separator is not None and "text" not in kinds:
        raise ValueError("--document-separator: has no effect, there is no plain text in the input; leave it out")
    if args.document_separator == "":
        raise ValueError("--document-separator is empty; leave it out to make each file one document")
    if args.eod_token is not None and args.append_eod is False:
        raise ValueError(f"--eod-token={args.eod_token} contradicts --no-append-eod; remove one of the two")
    if args.workers < 1:
        raise ValueError(f"--workers={args.workers}: must be at least 1")
    tokenizer = load_tokenizer(args.tokenizer, args.eod_token)
    if args.append_eod and tokenizer.eod is None:
        raise ValueError(
            f"--append-eod: {args.tokenizer} has none of {' '.join(EOD_TOKENS)}; name its token with --eod-token"
        )
    separator = args.document_separator
    return tokenize_job.Options(
        tokenizer=args.tokenizer,
        text_key=args.text_key or "text",
        separator=separator and separator.replace("\\n", "\n").replace("\\t", "\t"),
        eod_token=args.eod_token,
        append_eod=args.append_eod is not False,
    )


def _run(args: argparse.Namespace) -> None:
    console = rich.console.Console(highlight=False, soft_wrap=True)  # stderr is for the one line of an error
    files = documents.find_files(args.input)
    options = _check(args, files)
    with tokenize_job.Job(files, options, args.output) as job, rich.progress.Progress(console=console) as progress:
        if not job.finished:
            num_bytes = sum(shard.num_bytes for shard in job.shards)
            num_done = sum(shard.done for shard in job.shards)
            console.print(f"{len(files)} files, {num_bytes:,} bytes, {len(job.shards)} shards, {num_done} of them done")
            for title, shards in (("tokenising", job.tokenize(args.workers)), ("joining", job.join())):
                bar = progress.add_task(title, total=num_bytes)
                for shard in shards:
                    progress.advance(bar, shard.num_bytes)
        job.clean()
    dtype, _, lengths = megatron.read_index(args.output + ".idx", os.path.getsize(args.output + ".bin"))
    print(f"{args.output}.bin: {lengths.size:,} documents, {lengths.sum():,} tokens, {dtype.name}")


def main(arguments: list[str] | None = None) -> int:
    try:
        _run(_parse(arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished shards are kept, the same command goes on from them", file=sys.stderr)
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(main())
