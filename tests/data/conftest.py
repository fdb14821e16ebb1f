"""Sets in Megatron's format, packed by hand, and a web server that stands for a store of files."""

import http.server
import json
import os
import re
import struct
import threading
import urllib.parse

import numpy as np
import pytest


@pytest.fixture(scope="session")
def server():
    """A `Server`; gs://any-bucket leads to it. Put files under names of your own."""
    server = Server()
    # The Google driver reads these once per process.
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{server.port}"
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "none"
    yield server
    server.close()


@pytest.fixture
def pack():
    return _pack


@pytest.fixture
def shard():
    return _shard


def _pack(prefix, sequences, documents=None, dtype="<u2", code=8, modes=b""):
    """Writes a set by the format's table, without the code under test."""
    data = [np.asarray(s, dtype).tobytes() for s in sequences]
    documents = list(range(len(sequences) + 1)) if documents is None else documents
    offsets = [sum(map(len, data[:i])) for i in range(len(data))]
    index = b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<QQ", len(sequences), len(documents))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *offsets)
    index += struct.pack(f"<{len(documents)}q", *documents) + modes
    with open(f"{prefix}.bin", "wb") as file:
        file.write(b"".join(data))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(index)


def _shard(folder, rows, cuts, name="document"):
    """A preshuffled set in shards that end at the bytes `cuts`, as Pythia's are named."""
    _pack(folder / name, rows)
    data = (folder / f"{name}.bin").read_bytes()
    os.remove(folder / f"{name}.bin")
    edges = [0, *cuts, len(data)]
    for i in range(len(edges) - 1):
        path = folder / f"{name}-{i:05}-of-{len(edges) - 2:05}.bin"
        path.write_bytes(data[edges[i] : edges[i + 1]])


class Server:
    """Serves a dict of files on 127.0.0.1 by byte ranges, by plain HTTP and as Google Cloud Storage.

    `files`: key -> bytes. `requests`: (path, range header) of every request so far. `port`.
    """

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # headers and body in one packet

            def log_message(self, *_):
                pass

            def do_GET(self):
                owner._get(self)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def _get(self, handler):
        header = handler.headers.get("Range")
        self.requests.append((handler.path, header))
        url = urllib.parse.urlparse(handler.path)
        path = urllib.parse.unquote(url.path)
        bucket = re.fullmatch(r"/storage/v1/b/[^/]+/o(?:/(.*))?", path)  # Google's JSON API
        if bucket and not bucket[1]:
            query = urllib.parse.parse_qs(url.query)
            first, end = query.get("startOffset", [""])[0], query.get("endOffset", ["\x7f"])[0]
            items = [{"name": key} for key in sorted(self.files) if first <= key < end]
            return self._send(handler, 200, json.dumps({"items": items}).encode())
        key = bucket[1] if bucket else path.lstrip("/")
        if key not in self.files:
            return self._send(handler, 404, b"")
        data = self.files[key]
        if header is None:
            return self._send(handler, 200, data)
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", header).groups()
        first, last = int(first), min(int(last or len(data)), len(data) - 1)
        if first >= len(data):
            return self._send(handler, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
        self._send(handler, 206, data[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    @staticmethod
    def _send(handler, code, body, headers=None):
        handler.send_response(code)
        for name, value in {"x-goog-generation": "7", "Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
