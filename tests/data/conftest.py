"""A web server on 127.0.0.1 that serves a dict of files by byte ranges, by plain HTTP and as Google Cloud Storage."""

import http.server
import json
import os
import re
import threading
import urllib.parse

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


class Server:
    """`files`: key -> bytes. `requests`: (path, range header) of every request so far. `port`."""

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
