"""`pipetrain watch`: serves the page of a run as its folder grows; after the run it is the report.

Read-only, and to this machine alone: one page, made anew from the run folder for each request. Nothing of the folder is run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pipetrain.cli.advice import advice_on
from pipetrain.cli.main import Arguments, Parser, add_run, say
from pipetrain.launcher.outcome import Exit
from pipetrain.monitor.draw.page import Section, charts_of, run_page
from pipetrain.monitor.folder import RunFolder, find_folder
from pipetrain.monitor.recorded import page_of_run

_HOST = "127.0.0.1"
_SECONDS_TO_ASK = 10.0  # how long a connection may keep its request back
_SCRIPTS = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def add_arguments(parser: Parser) -> None:
    add_run(parser)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: any free one)")


def run(arguments: Arguments) -> int:
    folder = find_folder(arguments.run)
    _page(folder)  # a folder that cannot be read ends the command here
    try:
        server = _Server((_HOST, arguments.port), _Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port={arguments.port}: cannot be used ({error}); leave it out for a free one") from error
    server.folder = folder
    with server:
        port = server.server_address[1]
        say(f"watching {folder.path}; Ctrl-C ends. From another machine: ssh -L {port}:{_HOST}:{port} THIS_MACHINE")
        print(f"http://{_HOST}:{port}/", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return Exit.DONE
    return Exit.DONE


def _page(folder: RunFolder) -> str:
    """The page of a run, as its folder has it now.

    Raises:
        ValueError: the folder cannot be read.
    """
    is_over = folder.report.is_file()
    if not folder.recorded.is_file() and not is_over:
        waiting = Section("No step is recorded yet", ("The page is drawn when the first step is over.",))
        values: dict[str, Any] = {"title": folder.path.name, "fixed": [], "steps": [], "stages": [], "sections": []}
        return run_page(values, charts_of(()), above=[waiting], live=True)
    advice = _advice(folder, folder.report.stat().st_mtime) if is_over else ()
    above = [Section("What to do next", advice)] if advice else []
    return page_of_run(folder.recorded, folder.metrics, above=above, live=True)


@functools.lru_cache(maxsize=1)
def _advice(folder: RunFolder, written: float) -> tuple[str, ...]:  # noqa: ARG001 (the time of the report that it is on)
    return tuple(map(str, advice_on(folder)))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    folder: RunFolder


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS_TO_ASK
    server: _Server

    def do_GET(self) -> None:
        # A name that another site points at this machine would let that site read the page.
        if self.headers.get("Host") not in {f"{name}:{self.server.server_address[1]}" for name in (_HOST, "localhost")}:
            return self.send_error(HTTPStatus.FORBIDDEN, "this page is for 127.0.0.1 alone")
        if self.path != "/":
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            page = _page(self.server.folder)
        except ValueError as error:
            say(str(error))
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the run folder cannot be read now")
        text = page.encode()
        script = base64.b64encode(hashlib.sha256(_SCRIPTS.findall(page)[-1].encode()).digest()).decode()
        policy = f"default-src 'none'; script-src 'sha256-{script}'; style-src 'unsafe-inline'; connect-src 'self'"
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(text))),
            ("Content-Security-Policy", f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)
        return None

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Says nothing: the page asks every two seconds."""
