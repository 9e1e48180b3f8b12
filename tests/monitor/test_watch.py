"""`pipetrain watch` serves the page of a run as its folder grows: to this machine alone, read-only, and it runs nothing of the folder."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import browsing, find_browser
from commands import begin
from pages import drawn_in, panels_in
from ranks import PATIENCE_SECONDS
from test_report import REPORT
from test_run_page import MEASURED, PREDICTED, TEXT, recorded_in, report_of

from pipetrain.cli.main import main
from pipetrain.monitor.report import write_report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has just begun."""
    (tmp_path / "config.yaml").write_text("experiment: smoke\n")
    return tmp_path


@pytest.fixture
def watched(run: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command, and its port."""
    command = [sys.executable, "-m", "pipetrain.cli", "watch", str(run)]
    process = begin(run.parent, command)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline().strip().strip("/").rpartition(":")[2])
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_the_page_grows_with_the_folder_and_then_is_the_report(
    run: Path, watched: tuple[subprocess.Popen[str], int]
) -> None:
    process, port = watched
    status, text, headers = ask(port)
    assert status == 200
    assert "No step is recorded yet" in text
    assert 'data-live="1"' in text
    assert "script-src 'sha256-" in headers["Content-Security-Policy"]
    recorded = recorded_in(run)
    recorded.add(1, report_of(step=1))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    text = ask(port)[1]
    assert panels_in(text)[0]["name"] == "Measured, step 1"
    assert drawn_in(text)["charts"]["lines"][0]["values"] == [2.5]
    recorded.finish(run / "timeline.json", REPORT, report_of(), [MEASURED], PREDICTED, range(2, 5))
    write_report(run / "report.json", REPORT)
    text = ask(port)[1]
    assert [panel["name"] for panel in panels_in(text)] == [
        "Predicted from the op times of steps 2 to 4",
        "Measured, step 200",
    ]
    assert "peak activations" in text
    (run / "timeline.json").write_text("{")
    assert ask(port)[0] == 503
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_it_is_for_this_machine_and_cannot_write(run: Path, watched: tuple[subprocess.Popen[str], int]) -> None:
    _, port = watched
    before = sorted(run.rglob("*"))
    assert ask(port, Host=f"localhost:{port}")[0] == 200
    assert ask(port, Host="elsewhere.example")[0] == 403
    assert ask(port, method="HEAD")[:2] == (200, "")
    for path in ("/config.yaml", "/../config.yaml", "/?x=1"):
        assert ask(port, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE"):
        assert ask(port, method=method)[0] == 501
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{port:04X}" in listening  # 127.0.0.1
    assert f"00000000:{port:04X}" not in listening
    assert sorted(run.rglob("*")) == before


def test_what_cannot_be_watched_is_refused_in_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run / "missing")]) == 2
    assert "there is no run" in capsys.readouterr().err
    write_report(run / "report.json", REPORT)
    assert main(["watch", str(run)]) == 2
    assert "an older version wrote it" in capsys.readouterr().err
    (run / "timeline.json").write_text("{")
    assert main(["watch", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "timeline.json cannot be read" in line
    recorded_in(run).add(1, report_of(step=1))
    assert main(["watch", str(run), "--port=99999"]) == 2
    assert "--port=99999: cannot be used" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_follows_the_run(run: Path, watched: tuple[subprocess.Popen[str], int]) -> None:
    _, port = watched
    with browsing() as browser:
        browser.open(f"http://127.0.0.1:{port}/")
        assert browser.run("document.getElementById('drawing').hidden")
        recorded = recorded_in(run, TEXT)
        for step in (1, 2):
            recorded.add(step, report_of(step=step))
            told = f"Measured, step {step}"
            browser.run(
                f"""new Promise((done, late) => {{
                    const started = Date.now(), look = () => {{
                        if (document.getElementById('bars-of').textContent === {json.dumps(told)}) done(1);
                        else if (Date.now() - started > 60000) late(new Error('{told} did not come within 60 s'));
                        else setTimeout(look, 50); }};
                    look(); }})"""
            )
        assert browser.run("document.images.length") == 0
        assert browser.problems == []
