"""The tool as users run it: what it writes, in parallel or not, after kill -9, and how it refuses mistakes."""

import contextlib
import gzip
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizers

from jaxpretrain.data import megatron

ROOT = pathlib.Path(__file__).parents[2]
TOOL = ROOT / "tools" / "tokenize_text.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
# The tool with shards so small that a test has many.
SMALL_SHARDS = f"""
import sys
sys.path.insert(0, {str(TOOL.parent)!r})
from jaxpretrain.data import tokenize_job
import tokenize_text
tokenize_job.SHARD_BYTES = 20_000
sys.exit(tokenize_text.main())
"""


def command(*arguments, small_shards=True) -> list[str]:
    program = ["-c", SMALL_SHARDS] if small_shards else [str(TOOL)]
    return [sys.executable, *program, *map(str, arguments)]


def run(*arguments, small_shards=True) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments, small_shards=small_shards), env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(
        rng.choice("the a naïve model of text 2048 tokens\n\n learns — slowly").strip() or "x" for _ in range(count)
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    """A folder: plain text, JSON lines of 1 MB, the same packed, and two small files."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [words(seed, 50 + seed % 300) for seed in range(2500)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.txt").write_text(words(-1, 3000))
    (folder / "b.jsonl").write_text("".join(lines))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[:300]).encode()))
    (folder / "d.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    (folder / "e.md").write_text("the end")
    return folder


@pytest.fixture(scope="module")
def texts(corpus) -> list[str]:
    """The corpus's documents in order."""
    lines = [json.loads(line)["text"] for line in (corpus / "b.jsonl").read_text().splitlines()]
    return [(corpus / "a.txt").read_text(), *lines, *lines[:300], "the end"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory, texts) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:300], trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def expected(texts, bpe) -> list[list[int]]:
    """The documents as the `tokenizers` library encodes them, with <|endoftext|>, here 1, at the end."""
    tokenizer = tokenizers.Tokenizer.from_file(bpe)
    return [[*encoding.ids, 1] for encoding in tokenizer.encode_batch(texts)]


def stored(prefix) -> list[list[int]]:
    dtype, offsets, lengths = megatron.read_index(f"{prefix}.idx", os.path.getsize(f"{prefix}.bin"))
    tokens = np.fromfile(f"{prefix}.bin", dtype)
    starts = offsets // dtype.itemsize
    return [tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]


def files_of(prefix) -> list[bytes]:
    return [pathlib.Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx")]


def test_parallel_equals_serial_and_the_library(tmp_path, corpus, bpe, expected):
    """Two processes, one process, one shard. Mutations seen to fail: shards joined as they were finished, or in
    reverse; the last shard of the plan left out."""
    for name, workers, small_shards in [("two", 2, True), ("one", 1, True), ("large", 2, False)]:
        done = run(
            f"--input={corpus}", f"--tokenizer={bpe}", f"--output={tmp_path / name}", f"--workers={workers}",
            small_shards=small_shards,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        num_tokens = sum(map(len, expected))
        summary = f"{tmp_path / name}.bin: {len(expected):,} documents, {num_tokens:,} tokens, uint16\n"
        assert done.stdout.endswith(summary) and done.stderr == ""
    assert stored(tmp_path / "two") == expected
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one") == files_of(tmp_path / "large")
    assert sorted(os.listdir(tmp_path)) == sorted(f"{n}{e}" for n in ("two", "one", "large") for e in (".bin", ".idx"))


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return list(map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def gone(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def start(*arguments) -> subprocess.Popen:
    return subprocess.Popen(
        command(*arguments),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_restart_after_a_kill(tmp_path, corpus, bpe, expected, sent):
    """kill -9 of the main process between shards, and Ctrl-C: finished shards are kept and not made again, the result
    is that of a run in one go, and no worker lives on. Mutations seen to fail: workers without _exit_with_parent; all
    shards counted as missing; the output not left out of the input."""
    # The output lies in the input folder: what is half made there must not be taken for input.
    folder = tmp_path / "corpus"
    folder.mkdir()
    for path in corpus.iterdir():
        os.link(path, folder / path.name)
    output = folder / "zz"
    parts = pathlib.Path(f"{output}.parts")
    arguments = (f"--input={folder}", f"--tokenizer={bpe}", f"--output={output}", "--workers=2")

    process = start(*arguments)
    wait_until(lambda: len(list(parts.glob("*.idx"))) >= 3)
    workers = children(process.pid)
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as the terminal does
    else:
        process.kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode == (75 if sent == signal.SIGINT else -sent), err
    assert "Traceback" not in err
    assert len(workers) >= 2
    wait_until(lambda: all(map(gone, workers)))
    assert not output.with_name("zz.idx").exists() and not output.with_name("zz.bin").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.idx")}
    num_shards = int(out.split(" shards")[0].split()[-1])
    assert 3 <= len(kept) < num_shards - 5, "killed too late to show anything"

    # The rest, but not the end: shards that were kept are still the same files.
    no_join = "def join(self):\n    raise SystemExit('halted')\n    yield\ntokenize_job.Job.join = join\nsys.exit"
    program = SMALL_SHARDS.replace("sys.exit", no_join)
    halted = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert halted.stderr == "halted\n"
    assert f"{num_shards} shards, {len(kept)} of them done" in halted.stdout
    now = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.idx")}
    assert len(now) == num_shards and now | kept == now

    done = run(*arguments)
    assert done.returncode == 0 and f"{num_shards} shards, {num_shards} of them done" in done.stdout
    assert stored(output) == expected
    assert not parts.exists()


def test_ctrl_c_does_not_wait_for_long_shards(tmp_path):
    """Here for one that never ends. Mutation seen to fail (by the timeout): without process.terminate."""
    pipe = tmp_path / "a.jsonl.gz"
    os.mkfifo(pipe)
    process = start(f"--input={pipe}", "--tokenizer=bytes", f"--output={tmp_path / 'out'}")
    writers = []

    def a_worker_reads() -> bool:
        with contextlib.suppress(OSError):  # nobody has opened the other end yet
            writers.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    wait_until(a_worker_reads)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=20)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.returncode is None else os.close(writers[0])
    assert (
        process.returncode == 75
        and err == "interrupted; finished shards are kept, the same command goes on from them\n"
    )


def test_restart_between_the_last_renames(tmp_path, corpus, bpe, expected):
    """Killed when .bin is in its place and .idx is not, and when only the folder of parts is left over."""
    arguments = (f"--input={corpus}", f"--tokenizer={bpe}", f"--output={tmp_path / 'out'}")
    one_rename = SMALL_SHARDS.replace(
        "sys.exit",
        """
import os
rename = os.replace
def replace(old, new):
    rename(old, new)
    if new.endswith("out" + END):
        os.kill(os.getpid(), 9)
os.replace = replace
sys.exit""",
    )
    for end in (".bin", ".idx"):
        program = f"END = {end!r}\n{one_rename}"
        killed = subprocess.run([sys.executable, "-c", program, *arguments], env=ENVIRONMENT, capture_output=True)
        assert killed.returncode == -9, killed.stderr
        assert (tmp_path / "out.bin").exists() and (tmp_path / "out.idx").exists() == (end == ".idx")
        assert (tmp_path / "out.parts").exists()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert stored(tmp_path / "out") == expected
    assert sorted(os.listdir(tmp_path)) == ["out.bin", "out.idx"]


def test_a_mended_file_costs_only_its_own_shards(tmp_path, bpe):
    """A bad line stops the run; when it is mended, the other files' shards are still good."""
    good = [json.dumps({"text": words(seed, 100)}) + "\n" for seed in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(good))
    (tmp_path / "b.jsonl").write_text("".join([*good[:150], "broken\n", *good]))
    arguments = (f"--input={tmp_path}/*.jsonl", f"--tokenizer={bpe}", f"--output={tmp_path / 'out'}", "--workers=1")
    broken = run(*arguments)
    assert broken.returncode == 1
    assert broken.stderr.startswith(f"error: {tmp_path}/b.jsonl: line 151: invalid JSON")
    num_kept = len(list((tmp_path / "out.parts").glob("*.idx")))
    assert num_kept >= 2
    (tmp_path / "b.jsonl").write_text("".join(good))
    mended = run(*arguments)
    assert mended.returncode == 0, mended.stderr
    num_done = int(mended.stdout.split(" of them done")[0].split()[-1])
    assert 1 <= num_done < num_kept
    assert len(stored(tmp_path / "out")) == 400


def test_options(tmp_path, bpe):
    (tmp_path / "a.txt").write_text("the text\n\ntokens\n\n\n\nof a model")
    (tmp_path / "b.jsonl").write_text('{"body": "model"}')
    tokenizer = tokenizers.Tokenizer.from_file(bpe)
    pieces = ["the text", "tokens", "of a model"]

    def result(*arguments):
        (tmp_path / "out.bin").unlink(missing_ok=True)
        (tmp_path / "out.idx").unlink(missing_ok=True)
        done = run(f"--tokenizer={bpe}", f"--output={tmp_path / 'out'}", *arguments, small_shards=False)
        assert done.returncode == 0, done.stderr
        return stored(tmp_path / "out")

    def ids(*texts):
        return [tokenizer.encode(text).ids for text in texts]

    split = result(f"--input={tmp_path / 'a.txt'}", r"--document-separator=\n\n", "--no-append-eod")
    assert split == ids(*pieces)
    padded = result("--input", tmp_path / "a.txt", tmp_path / "b.jsonl", "--text-key=body", "--eod-token=<pad>")
    assert padded == [[*document, 0] for document in ids((tmp_path / "a.txt").read_text(), "model")]
    assert result(f"--input={tmp_path / 'a.txt'}", "--tokenizer=bytes") == [list((tmp_path / "a.txt").read_bytes())]


def test_help():
    done = run("--help", small_shards=False)
    assert done.returncode == 0 and "--document-separator" in done.stdout


MISTAKES = [
    ("--input={d}/none.txt", "none.txt: no such file"),
    ("--tokenizer=gpt2", "tokenizer 'gpt2': no such file"),
    ("--tokenizer={d}/a.txt", "a.txt: not a Hugging Face tokenizer.json"),
    ("--output={d}/taken", "taken.bin: exists already; delete it or choose another --output"),
    ("--output={d}/a.txt/out", "a.txt/out: cannot be written: Not a directory; choose a folder that can"),
    ("--input={d}/latin.txt", "latin.txt: byte 3 (0xe9) is not UTF-8"),
    ("--input={d}/empty.txt", "the input holds no text"),
    ("--input={d}/broken.jsonl", "broken.jsonl: line 2: invalid JSON"),
    ("--input={d}/other.jsonl", "other.jsonl: line 1: no 'text' among its keys body: set data.text_key (--text-key)"),
    ("--input={d}/short.jsonl.gz", "short.jsonl.gz: truncated or damaged gzip file"),
    ("--text-key=body", "--text-key=body: has no effect"),
    ("--input={d}/other.jsonl --document-separator=x", "--document-separator: has no effect"),
    ("--document-separator=", "--document-separator is empty"),
    ("--append-eod", "--append-eod: bytes has none of <|endoftext|>"),
    ("--eod-token=<x> --no-append-eod", "--eod-token=<x> contradicts --no-append-eod"),
    ("--eod-token=<x>", "'bytes' has no special tokens"),
    ("--workers=0", "--workers=0: must be at least 1"),
    ("--workers=many", "--workers: invalid int value: 'many'"),
    ("--worker=2", "unrecognized arguments: --worker=2"),
]


@pytest.fixture(scope="module")
def mistakes_folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "a.txt").write_text("text")
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "taken.bin").write_bytes(b"somebody else's")
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "other.jsonl").write_text('{"body": "a"}\n')
    (folder / "short.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-10])
    return folder


def call_main(arguments: list[str]) -> int:
    sys.path.insert(0, str(TOOL.parent))
    try:
        import tokenize_text
    finally:
        sys.path.pop(0)
    return tokenize_text.main(arguments)


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes(mistakes_folder, capfd, monkeypatch, arguments, message):
    """One line on stderr and exit code 1, also where the work had begun."""
    d = str(mistakes_folder)
    given = [argument.format(d=d) for argument in arguments.split()]
    names = {argument.split("=")[0] for argument in given}
    defaults = {"--input": f"{d}/a.txt", "--tokenizer": "bytes", "--output": f"{d}/out"}
    given += [f"{name}={value}" for name, value in defaults.items() if name not in names]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert call_main(given) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert (mistakes_folder / "taken.bin").read_bytes() == b"somebody else's"
    assert not (mistakes_folder / "out.idx").exists()


def test_missing_arguments(capfd):
    assert call_main([]) == 1
    assert capfd.readouterr().err == "error: the following arguments are required: --input, --tokenizer, --output\n"


def test_two_at_once_are_refused(tmp_path):
    """Mutation seen to fail: without flock."""
    import fcntl

    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out.parts").mkdir()
    with open(tmp_path / "out.parts" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(f"--input={tmp_path / 'a.txt'}", "--tokenizer=bytes", f"--output={tmp_path / 'out'}")
        assert done.returncode == 1
        assert done.stderr == f"error: --output={tmp_path / 'out'}: another process is writing it; wait for it\n"
