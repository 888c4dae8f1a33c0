"""A stand-in for the part of the hub's HTTP interface that an upload speaks to, on this machine."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_of_a_test"


class Hub:
    """Repositories by name, each a dict of files."""

    def __init__(self):
        self.repos, self.address = {}, ""

    def answer(self, method, path, body):
        """Return status and JSON of a request."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            known = name in self.repos
            self.repos.setdefault(name, {})
            return (409 if known else 200), {"url": f"{self.address}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name = "/".join(path.split("/")[3:5])
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            mode = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return 200, {"files": [{"path": file["path"], **mode} for file in files]}
        if path.endswith("/commit/main"):
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.repos[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return 200, {"commitUrl": f"{self.address}/{name}/commit/{40 * 'a'}", "commitOid": 40 * "a"}
        if method == "GET" and path.startswith("/api/models/") and name in self.repos:
            return 200, {"id": name, "private": True, "tags": [], "downloads": 0, "siblings": []}
        return 404, {"error": f"nothing at {path}"}


@contextmanager
def running_hub():
    """Run a hub on a free port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            path = self.path.partition("?")[0]
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self.chunks()
            status, said = hub.answer(self.command, path, body)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status, said = 401, {"error": "Invalid username or password."}
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status >= 400:
                self.send_header("X-Error-Message", said.get("error", ""))
            self.end_headers()
            self.wfile.write(content)

        def chunks(self):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_POST = answer

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
