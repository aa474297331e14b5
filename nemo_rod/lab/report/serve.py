"""`nemo-rod status RUN_DIR --serve`: the report of a run under way, kept up to date."""

from __future__ import annotations

import mimetypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from nemo_rod.commands.text import say
from nemo_rod.files import read_bytes
from nemo_rod.lab.launches import read_launch
from nemo_rod.lab.report.stage import build
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages

_MOST = 1 << 28  # bytes of a file
_HOSTS = ("127.0.0.1", "localhost")
_WATCHED = ("arms/*/metrics.jsonl", "arms/*/*.json", "base*/metrics.jsonl", "references/*")


def serve_run(run_dir: Path, *, port: int, every: int, trusted: bool) -> None:
    """Serves the report of a run, rebuilt as the run makes progress, until the process is ended.

    Args:
        run_dir: folder of the run, which goes on whether it is served or not.
        port: port on 127.0.0.1; 0 for any free one.
        every: seconds between two checks of the run.
        trusted: whether code that lies beside a checkpoint of the folder may run.

    Raises:
        ValueError: the folder is not that of a run, or the port cannot be had.
    """
    _, config = read_launch(run_dir, trusted=trusted)
    stages = Stages(config)
    try:
        server = serve(stages.results.path / "report", port=port, every=every)
    except OSError as error:
        raise ValueError(
            f"port={port} cannot be had ({error.strerror}): choose another, or 0 for any free one."
        ) from None
    print(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends)", flush=True)
    record = StageLog(run_dir, "report")

    def refresh() -> None:
        with record.only_one():  # the run's own report stage writes the same files
            build(stages)

    try:
        keep_fresh(run_dir, refresh, every=every)
    except KeyboardInterrupt:
        server.shutdown()


def serve(folder: Path, *, port: int, every: int) -> ThreadingHTTPServer:
    """Serves a folder on 127.0.0.1 from a thread; its index page reloads every `every` seconds."""
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, folder, every))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def keep_fresh(
    run_dir: Path,
    build: Callable[[], object],
    *,
    every: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Rebuilds the report whenever files of the run have changed; never returns.

    If a file cannot be read, perhaps because it is being written, the old page stays.
    """
    built: dict[Path, int] | None = None  # times of the files in the report
    while True:
        times: dict[Path, int] = {}
        for file in (file for pattern in _WATCHED for file in run_dir.glob(pattern)):
            with suppress(OSError):  # its stage has just ended, or it is a link to itself
                times[file] = file.stat().st_mtime_ns
        if times != built:
            try:
                build()
                built = times
            except (ValueError, OSError) as error:
                say(f"nemo-rod: {error}")
        sleep(every)


class _Handler(BaseHTTPRequestHandler):
    """Serves the files of a folder, without its lists; no link is followed.

    A page elsewhere whose name resolves to this machine sends that name as the host.
    """

    def __init__(self, folder: Path, every: int, *arguments: Any) -> None:
        self.folder, self.every = folder, every
        super().__init__(*arguments)

    def handle(self) -> None:
        """Answers, unless the browser has gone: a page that reloads itself is often left."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Answers with a file."""
        name = unquote(urlsplit(self.path).path).lstrip("/") or "index.html"
        host = self.headers.get("Host", "").rpartition(":")[0]
        try:
            if host not in _HOSTS or {"..", ""} & {*name.split("/")} or "\0" in name:
                raise ValueError(name)
            content = read_bytes(self.folder / name, _MOST, below=self.folder.parent)
        except (ValueError, OSError):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, _ = mimetypes.guess_type(name)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind or "application/octet-stream")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if name == "index.html":
            self.send_header("Refresh", str(self.every))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing: requests of a page that reloads itself would fill the terminal."""
